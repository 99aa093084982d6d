"""Batches: documents packed into rows, rows shuffled, shared out over data-parallel ranks and micro-batches.

Letters: S sequence length, T = micro_batch * S packed tokens of a batch, N tokens of the whole data.
 Row r is tokens r*S .. (r+1)*S - 1 of all documents laid end to end; the label of its last token is the next row's
first. What a step sees is rows step*G .. (step+1)*G - 1 of one endless order (see row_order.py): a pure function of
seed, step and global batch G, whatever the layout.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from pyfast.train.documents import Source, find_sources, read_piece, standard_library_files, text_pieces
from pyfast.train.prepare import check_prompts, tokenize
from pyfast.train.row_order import row_at
from pyfast.train.token_file import Tokens, TokenSummary, open_token_file
from pyfast.train.tokenizer import Tokenizer

IGNORE = -100  # the label that no loss counts


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank, packed.

    `ids` int64 [T]; `labels` int64 [T], the next token of the same document, or -100; `cu_seqlens` int32 [documents +
    1], where each piece of a document begins, 0 first and T last; `positions` int64 [T], from 0 in each piece;
    `valid` how many labels are not -100.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    cu_seqlens: torch.Tensor
    positions: torch.Tensor
    valid: int

    @property
    def max_seqlen(self) -> int:
        """The longest piece of a document."""
        return int(self.cu_seqlens.diff().max())

    def to(self, device: torch.device | str) -> Batch:
        """This batch on `device`."""
        moved = (t.to(device) for t in (self.ids, self.labels, self.cu_seqlens, self.positions))
        return Batch(*moved, valid=self.valid)


class Dataset:
    """Rows of `sequence_length` tokens over one or more token sources.

    `global_batch` rows make a step, `micro_batch` of them a Batch. `vocab` is the model's vocabulary; ids beyond it
    are an error. Raises ValueError for sizes below 1, for data shorter than a row, without a label, or with ids >=
    `vocab`.
    """

    def __init__(
        self,
        sources: Sequence[Tokens],
        *,
        sequence_length: int,
        micro_batch: int,
        global_batch: int,
        seed: int = 0,
        vocab: int | None = None,
    ) -> None:
        for name, value in (
            ("sequence_length", sequence_length),
            ("micro_batch", micro_batch),
            ("global_batch", global_batch),
        ):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"train.{name} is {value!r}; it must be a whole number from 1")
        self.sources = tuple(sources)
        self.sequence_length, self.micro_batch, self.global_batch = sequence_length, micro_batch, global_batch
        self.seed, self.vocab = seed, vocab
        self._starts = np.cumsum([0] + [source.ids.size for source in self.sources])
        self.tokens = int(self._starts[-1])
        self.documents = sum(source.offsets.size - 1 for source in self.sources)
        self.labels = sum(source.labels for source in self.sources)
        self._check_content()
        # The last token of all ends a document and so has no label: alone in a row it would be a row without any.
        self.rows = max(1, -(-(self.tokens - 1) // sequence_length))
        self._padding = int(self.sources[-1].ids[-1])

    @property
    def fingerprint(self) -> str:
        """A hash of the data and its cut into rows: equal on ranks, and before and after a resume, if the data are."""
        parts = [str(self.sequence_length)] + [source.digest for source in self.sources]
        return hashlib.blake2b(" ".join(parts).encode(), digest_size=16).hexdigest()

    def micro_batches(self, dp_size: int) -> int:
        """Micro-batches of one rank in a step; raises ValueError when dp_size * micro_batch does not divide
        global_batch.
        """
        if dp_size < 1 or self.global_batch % (dp_size * self.micro_batch):
            raise ValueError(
                f"train.global_batch is {self.global_batch}, which is no multiple of {dp_size} data-parallel ranks x "
                f"train.micro_batch {self.micro_batch} = {dp_size * self.micro_batch}; change one of the three"
            )
        return self.global_batch // (dp_size * self.micro_batch)

    def batch(self, step: int, micro_index: int, dp_rank: int = 0, dp_size: int = 1) -> Batch:
        """Micro-batch `micro_index` of rank `dp_rank` in step `step`, both from 0 (steps that were done before =
        step).
        """
        count = self.micro_batches(dp_size)
        for name, value, limit in (
            ("micro_index", micro_index, count),
            ("dp_rank", dp_rank, dp_size),
            ("step", step, 2**62),
        ):
            if not 0 <= value < limit:
                raise ValueError(f"{name} is {value}; it must be 0 .. {limit - 1}")
        first = (micro_index * dp_size + dp_rank) * self.micro_batch
        return self._pack(self._rows_at(step * self.global_batch + first, self.micro_batch))

    def step_rows(self, step: int) -> np.ndarray:
        """The rows of step `step` (int64 [global_batch])."""
        return self._rows_at(step * self.global_batch, self.global_batch)

    def _rows_at(self, place: int, count: int) -> np.ndarray:
        return row_at(np.arange(place, place + count), self.rows, self.seed)

    def valid_tokens(self, step: int) -> int:
        """Labels of the whole step, over all ranks. 0 if all of it is masked prompt: such a step learns nothing."""
        rows = self.step_rows(step)
        return sum(self._pack(part).valid for part in np.array_split(rows, -(-rows.size // 64)))

    def epoch(self, step: int) -> float:
        """How often the data has been seen when `step` steps are done."""
        return step * self.global_batch / self.rows

    def _check_content(self) -> None:
        if self.tokens < self.sequence_length:
            raise ValueError(
                f"the data has {self.tokens} tokens, fewer than one row of train.sequence_length "
                f"{self.sequence_length}; give more text, or a shorter sequence_length"
            )
        largest = max(source.largest for source in self.sources)
        if self.vocab is not None and largest >= self.vocab:
            raise ValueError(
                f"model.vocab {self.vocab} is too small for the data, which has the token id {largest}; "
                f"set model.vocab to at least {largest + 1}"
            )
        if self.labels == 0:
            raise ValueError(
                f"none of the {self.tokens} tokens of the data is a label: documents have one token each, "
                "or all is prompt"
            )

    def _pack(self, rows: np.ndarray) -> Batch:
        size = self.sequence_length
        window = np.full((len(rows), size + 1), self._padding, dtype=np.int64)
        learn = np.ones((len(rows), size + 1), dtype=bool)
        cuts = [np.zeros(1, dtype=np.int64)]
        for i, row in enumerate(rows):
            ends = self._read_row(int(row) * size, window[i], learn[i])
            cuts.append(ends[ends < size] + i * size)
            cuts.append(np.array([(i + 1) * size]))
        cu_seqlens = np.concatenate(cuts)
        lengths = np.diff(cu_seqlens)
        positions = np.arange(len(rows) * size) - np.repeat(cu_seqlens[:-1], lengths)
        ids = window[:, :-1].reshape(-1)
        labels = np.where(learn[:, 1:], window[:, 1:], IGNORE).reshape(-1)
        if self.vocab is not None and ids.max() >= self.vocab:
            raise ValueError(
                f"the data holds the token id {ids.max()}, beyond model.vocab {self.vocab}: a damaged token file?"
            )
        return Batch(
            torch.from_numpy(np.ascontiguousarray(ids)),
            torch.from_numpy(labels),
            torch.from_numpy(cu_seqlens.astype(np.int32)),
            torch.from_numpy(positions),
            int(np.count_nonzero(labels != IGNORE)),
        )

    def _read_row(self, start: int, window: np.ndarray, learn: np.ndarray) -> np.ndarray:
        """Fill `window` and `learn` [S + 1] from token `start` on; return where documents end in it, each in 1 .. S,
        once.

        learn[j]: token j may be the label of token j - 1, that is, it is no document's first, no padding, and not
        masked.
        """
        stop = min(start + window.size, self.tokens)
        learn[stop - start :] = False
        ends = []
        source = int(np.searchsorted(self._starts, start, side="right")) - 1
        while source < len(self.sources) and self._starts[source] < stop:
            base = int(self._starts[source])
            low, high = max(start - base, 0), min(stop, int(self._starts[source + 1])) - base
            part = slice(base + low - start, base + high - start)
            tokens = self.sources[source]
            window[part] = tokens.ids[low:high]
            if tokens.mask is not None:
                learn[part] = tokens.mask[low:high]
            # Ends in low+1 .. high: the end at `high` matters when the source ends there.
            first, last = np.searchsorted(tokens.offsets, (low, high), side="right")
            ends.append(tokens.offsets[first:last] + (base - start))
            source += 1
        result = np.concatenate(ends)
        result = result[result < window.size]
        learn[result] = False
        return result


def load_tokens(
    paths: Sequence[str | os.PathLike[str]] | None,
    tokenizer: Tokenizer,
    *,
    mask_prompt: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> list[Tokens]:
    """Tokens of text files, directories, .jsonl files (tokenized here, in memory) and token files (mapped), in that
    order.

    `paths` None or empty: the standard library's sources. `progress(done, total)` in bytes of text. Raises ValueError
    for bad paths or text, for a token file made with another tokenizer, and for `mask_prompt` with no prompt
    anywhere.
    """
    listing = find_sources(paths or standard_library_files())
    total = sum(source.size for source in listing.sources if source.kind != "tokens")
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, total)

    result = []
    for prepared, group in groupby(listing.sources, key=lambda source: source.kind == "tokens"):
        if prepared:
            result += [_open_prepared(source.path, tokenizer) for source in group]
        else:
            result.append(_tokenize_here(group, tokenizer, mask_prompt, advance))
    check_prompts(mask_prompt, any(source.mask is not None for source in result))
    return result


def load_dataset(
    paths: Sequence[str | os.PathLike[str]] | None,
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    micro_batch: int,
    global_batch: int,
    seed: int = 0,
    vocab: int | None = None,
    mask_prompt: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Dataset:
    """`load_tokens` and a `Dataset` over them; arguments and errors are theirs."""
    sources = load_tokens(paths, tokenizer, mask_prompt=mask_prompt, progress=progress)
    return Dataset(
        sources,
        sequence_length=sequence_length,
        micro_batch=micro_batch,
        global_batch=global_batch,
        seed=seed,
        vocab=vocab,
    )


def _tokenize_here(
    sources: Iterator[Source], tokenizer: Tokenizer, mask_prompt: bool, advance: Callable[[int], None]
) -> Tokens:
    summary = TokenSummary()
    blocks, offsets = [], [np.zeros(1, dtype=np.int64)]
    for piece in text_pieces(sources):
        block = tokenize(read_piece(piece, mask_prompt=mask_prompt), tokenizer, mask=mask_prompt)
        offsets.append(block.ends + summary.tokens)
        summary.add(block.ids, block.ends, block.mask)
        blocks.append(block)
        advance(piece.stop - piece.start)
    if summary.tokens == 0:
        raise ValueError("the data has no text: every record of its .jsonl files is empty")
    return Tokens(
        np.concatenate([block.ids for block in blocks]),
        np.concatenate(offsets),
        np.concatenate([block.mask for block in blocks]) if summary.masked else None,
        summary.labels,
        summary.largest,
        summary.digest(),
    )


def _open_prepared(path: str, tokenizer: Tokenizer) -> Tokens:
    file = open_token_file(path)
    if file.header["fingerprint"] != tokenizer.fingerprint:
        raise ValueError(
            f"token file {path!r} was prepared with the tokenizer {file.header['tokenizer']!r}, but data.tokenizer is "
            f"{tokenizer.name!r}, which is another (or has another end token); name the one it was prepared with"
        )
    return file.tokens
