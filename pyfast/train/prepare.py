"""Tokenizing: documents to token blocks, in memory or, on all cores, to a token file (`pyfast prepare`).

The text is cut into tasks that depend on nothing but the text, so any number of processes writes the same bytes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from pyfast.train.documents import PIECE_BYTES, Document, Listing, Piece, find_sources, read_piece, text_pieces
from pyfast.train.token_file import TokenWriter
from pyfast.train.tokenizer import Tokenizer, load_tokenizer

_TASK_PIECES = 256  # small files travel together, but not without limit


@dataclass(frozen=True)
class TokenBlock:
    """Tokens of some documents: `ids` [tokens], `ends` int64 [documents], `mask` uint8 [tokens] or None; see
    TokenWriter.add.
    """

    ids: np.ndarray
    ends: np.ndarray
    mask: np.ndarray | None


@dataclass(frozen=True)
class PrepareSummary:
    """What `prepare` did: counts, `seconds` of wall time, and the files it passed over in directories."""

    output: Path
    documents: int
    tokens: int
    labels: int
    text_bytes: int
    file_bytes: int
    seconds: float
    processes: int
    listing: Listing

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


def tokenize(documents: Iterable[Document], tokenizer: Tokenizer, *, mask: bool = False) -> TokenBlock:
    """Encode documents in order, an end token after each; `mask`: also say which tokens may be labels.

    The end token may be a label if the last part of its document may.
    """
    ids: list[np.ndarray] = []
    learn: list[tuple[bool, int]] = []
    ends: list[int] = []
    total = 0
    for document in documents:
        encoded = [tokenizer.encode(text) for text, _ in document.parts]
        learn += [(flag, part.size) for part, (_, flag) in zip(encoded, document.parts, strict=True)]
        if document.ends:
            encoded.append(np.array([tokenizer.end_token], dtype=encoded[0].dtype))
            learn.append((document.parts[-1][1], 1))
        total += sum(part.size for part in encoded)
        ids += encoded
        if document.ends:
            ends.append(total)
    flags, sizes = zip(*learn, strict=True) if learn else ((), ())
    return TokenBlock(
        np.concatenate(ids) if ids else np.zeros(0, "<u2"),
        np.array(ends, dtype=np.int64),
        np.repeat(np.array(flags, dtype=np.uint8), np.array(sizes, dtype=np.int64)) if mask else None,
    )


def prepare(
    paths: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    tokenizer: str | Tokenizer = "byte",
    *,
    processes: int | None = None,
    mask_prompt: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> PrepareSummary:
    """Tokenize text files, directories and .jsonl files into one token file, with a progress bar and a summary.

    `tokenizer`: "byte", a path, or a Tokenizer. `processes`: how many (default: one for each usable core, fewer for
    little text); the bytes written do not depend on it. `mask_prompt`: store which tokens may be labels, prompts may
    not. `console`: where bar and summary go (default: standard error). A script that asks for several processes needs
    the usual `if __name__ == "__main__":`, as they are spawned.

    Raises ValueError, before anything is written, for bad paths and an `output` that exists (unless `overwrite`), and
    later for malformed text; then no file is left.
    """
    if processes is not None and (not isinstance(processes, int) or processes < 1):
        raise ValueError(f"processes is {processes!r}; give a number from 1, or None for all cores")
    console = console or Console(stderr=True)
    tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    started = time.perf_counter()
    listing = find_sources(paths)
    output = Path(output)
    if any(os.path.realpath(source.path) == os.path.realpath(output) for source in listing.sources):
        raise ValueError(f"output {str(output)!r} is also one of the inputs; write it to another directory")
    tasks = _group(text_pieces(listing.sources))
    processes = min(processes or _usable_cores(), len(tasks))
    with (
        TokenWriter(output, tokenizer, mask=mask_prompt, overwrite=overwrite) as writer,
        _bar(console) as bar,
        _blocks(tasks, tokenizer, mask_prompt, processes) as blocks,
    ):
        row = bar.add_task("tokenizing", total=listing.bytes)
        for task, block in zip(tasks, blocks, strict=True):
            writer.add(block.ids, block.ends, block.mask)
            bar.advance(row, sum(piece.stop - piece.start for piece in task))
        check_prompts(mask_prompt, writer.summary.masked > 0)
    summary = PrepareSummary(
        output=output,
        documents=writer.summary.documents,
        tokens=writer.summary.tokens,
        labels=writer.summary.labels,
        text_bytes=listing.bytes,
        file_bytes=output.stat().st_size,
        seconds=time.perf_counter() - started,
        processes=processes,
        listing=listing,
    )
    console.print(_table(summary, tokenizer))
    return summary


def check_prompts(mask_prompt: bool, any_prompt: bool) -> None:
    """Raise ValueError when prompts are to be masked and there are none."""
    if mask_prompt and not any_prompt:
        raise ValueError(
            "data.mask_prompt is set, but no document has a prompt; give .jsonl records with "
            '"prompt" and "completion", or "messages", or leave mask_prompt out'
        )


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _group(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Collect pieces, in order, into tasks of about PIECE_BYTES."""
    tasks: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        size = piece.stop - piece.start
        if not tasks or size > room or len(tasks[-1]) == _TASK_PIECES:
            tasks.append([])
            room = PIECE_BYTES
        tasks[-1].append(piece)
        room -= size
    return tasks


def _run_task(task: list[Piece], tokenizer: Tokenizer, mask_prompt: bool) -> TokenBlock:
    documents = (document for piece in task for document in read_piece(piece, mask_prompt=mask_prompt))
    return tokenize(documents, tokenizer, mask=mask_prompt)


# ---- processes


@contextmanager
def _blocks(
    tasks: list[list[Piece]], tokenizer: Tokenizer, mask_prompt: bool, processes: int
) -> Iterator[Iterator[TokenBlock]]:
    """The blocks of all tasks, in order. Process i does tasks i, i + processes, ...; none outlives the `with`."""
    if processes <= 1:
        yield (_run_task(task, tokenizer, mask_prompt) for task in tasks)
        return
    context = multiprocessing.get_context("spawn")
    workers, receivers = [], []
    try:
        for i in range(processes):
            receiver, sender = context.Pipe(duplex=False)
            worker = context.Process(
                target=_work,
                args=(sender, tasks[i::processes], tokenizer, mask_prompt),
                daemon=True,
                name=f"prepare {i}",
            )
            worker.start()
            sender.close()  # the worker holds the only one: its death is the end of the pipe
            workers.append(worker)
            receivers.append(receiver)
        yield (_receive(receivers[i % processes], workers[i % processes]) for i in range(len(tasks)))
    finally:
        for receiver in receivers:
            receiver.close()
        for worker in workers:
            worker.terminate()
            worker.join()


def _work(sender: Connection, tasks: list[list[Piece]], tokenizer: Tokenizer, mask_prompt: bool) -> None:
    """A worker: run tasks, send each result while the next one is computed. A full pipe holds it back."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the workers
    with ThreadPoolExecutor(1) as thread:
        sending = None
        for task in tasks:
            try:
                result: TokenBlock | Exception = _run_task(task, tokenizer, mask_prompt)
            except ValueError as error:
                result = ValueError(*error.args)
            except Exception:
                result = RuntimeError(f"tokenizing failed:\n{traceback.format_exc()}")
            if sending is not None:
                sending.result()
            sending = thread.submit(_send, sender, result)
            if isinstance(result, Exception):
                break


def _send(sender: Connection, result: TokenBlock | Exception) -> None:
    try:
        sender.send(result)
    except BrokenPipeError:  # the parent is gone: nobody wants the rest
        os._exit(1)


def _receive(receiver: Connection, worker: multiprocessing.process.BaseProcess) -> TokenBlock:
    try:
        result = receiver.recv()
    except EOFError:
        worker.join()
        raise RuntimeError(
            f"a tokenizing process ended early (exit code {worker.exitcode}); with little memory use processes=1; "
            'in a script, call prepare under `if __name__ == "__main__":`'
        ) from None
    if isinstance(result, Exception):
        raise result
    return result


# ---- screen


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def _table(summary: PrepareSummary, tokenizer: Tokenizer) -> Table:
    table = Table(show_header=False, title=f"prepared {summary.output}")
    listing = summary.listing
    passed = f"{listing.binary} not text, {listing.hidden} hidden, {listing.empty} empty"
    rows = {
        "tokenizer": f"{tokenizer.name}, {tokenizer.vocab_size:,} ids",
        "files": f"{len(listing.sources):,} (passed over: {passed})",
        "documents": f"{summary.documents:,}",
        "tokens": f"{summary.tokens:,} ({summary.labels:,} of them labels)",
        "bytes": f"{summary.text_bytes:,} of text, {summary.file_bytes:,} written",
        "time": f"{summary.seconds:.1f} s, {summary.tokens_per_second:,.0f} tokens/s, {summary.processes} process(es)",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


# ---- command line


def main(arguments: Sequence[str]) -> int:
    """`pyfast prepare PATH... --output FILE`: returns the exit code; an error is one paragraph on standard error."""
    options = _parser().parse_args(list(arguments))
    try:
        tokenizer = load_tokenizer(options.tokenizer, end_token=options.end_token)
        prepare(
            options.paths,
            options.output,
            tokenizer,
            processes=options.processes,
            mask_prompt=options.mask_prompt,
            overwrite=options.overwrite,
        )
    except (ValueError, ImportError, RuntimeError, OSError) as error:
        print(f"pyfast prepare: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("pyfast prepare: interrupted, nothing was written", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pyfast prepare",
        description="Tokenize text once, on all cores, into a file that `pyfast train` maps into memory.",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="text file, directory or .jsonl")
    parser.add_argument("--output", required=True, metavar="FILE", help="the token file to write")
    parser.add_argument(
        "--tokenizer", default="byte", metavar="byte|PATH", help="byte, or a tokenizer.json (default: byte)"
    )
    parser.add_argument("--end_token", metavar="TOKEN", help="ends a document (default: the tokenizer's own)")
    parser.add_argument("--processes", type=int, metavar="N", help="default: one for each core")
    parser.add_argument("--mask_prompt", action="store_true", help="no loss on prompts and on a chat's questions")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    return parser
