"""Where text comes from: files, directories, .jsonl and prepared token files, read as a stream of documents.
 Listing comes first and is cheap (`find_sources`): every path is checked before anything is tokenized. Large files
are then cut into pieces of some MiB (`cut_pieces`), which can be read on any process, in any order, with the same
result.
"""

from __future__ import annotations

import codecs
import os
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from json import JSONDecodeError, loads

from pyfast.train.token_file import MAGIC

PIECE_BYTES = 4 << 20  # a longer text file is read and tokenized in pieces of about this size
SNIFF_BYTES = 1 << 20  # the beginning that decides whether a file is text
STANDARD_LIBRARY_BYTES = 4 << 20

# Not program text a model could learn from: tables, generated files, other people's packages, megabytes of tests.
_NOT_DEFAULT_DATA = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3"
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """One file to read: `kind` is "text", "jsonl" or "tokens"; `size` in bytes."""

    path: str
    kind: str
    size: int


@dataclass(frozen=True)
class Listing:
    """The files found, in reading order, and how many were passed over in directories, by reason."""

    sources: tuple[Source, ...]
    binary: int = 0
    hidden: int = 0
    empty: int = 0

    @property
    def bytes(self) -> int:
        return sum(source.size for source in self.sources)


@dataclass(frozen=True)
class Piece:
    """Bytes `start` .. `stop` of a text or jsonl file; `last`: the file ends here."""

    path: str
    kind: str
    start: int
    stop: int
    last: bool


@dataclass(frozen=True)
class Document:
    """One document, or one piece of a document too long to be handled whole.

    `parts` are (UTF-8 bytes, learn): the loss ignores tokens of parts with learn=False. `ends`: no piece of it follows.
    """

    parts: tuple[tuple[bytes, bool], ...]
    ends: bool = True


# ---- listing


def find_sources(paths: Sequence[str | os.PathLike[str]]) -> Listing:
    """List the files behind `paths`, in the order given; directories recursively, sorted by name.

    In directories, hidden entries (".git"), files that are not text and empty files are passed over and counted, and
    linked directories are not entered. Raises ValueError for a path that is missing, unreadable, empty, or not text,
    and for a directory without text.
    """
    if isinstance(paths, (str, os.PathLike)):
        raise ValueError(f"data.paths is {str(paths)!r}, one path; give a list of paths")
    found: list[Source] = []
    passed = {"binary": 0, "hidden": 0, "empty": 0}
    for path in map(os.fspath, paths):
        if not os.path.exists(path):
            raise ValueError(f"data path {path!r} does not exist; give a text file, directory, .jsonl or prepared file")
        before = len(found)
        if not os.path.isdir(path):
            found.append(_require_source(path))
            continue
        for file in _walk(path, passed):
            source = _classify(file)
            if isinstance(source, Source):
                found.append(source)
            else:
                passed[source] += 1
        if len(found) == before:
            raise ValueError(f"data path {path!r} is a directory without text files ({_counts(passed)} passed over)")
    if not found:
        raise ValueError("data.paths is empty; give at least one text file, directory, .jsonl or prepared file")
    return Listing(tuple(found), **passed)


def standard_library_files(max_bytes: int = STANDARD_LIBRARY_BYTES) -> list[str]:
    """Source files of the running Python's standard library, sorted by name, until `max_bytes` are reached.

    Text that every machine has: the data of a run that names none. Tests, tables and installed packages are left out.
    Raises ValueError when this Python carries no sources (a zipped or frozen one).
    """
    root = sysconfig.get_paths()["stdlib"]
    names: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_DEFAULT_DATA]
        names += (os.path.relpath(os.path.join(folder, name), root) for name in files if name.endswith(".py"))
    chosen: list[str] = []
    total = 0
    for path in (os.path.join(root, name) for name in sorted(names)):
        if total >= max_bytes:
            break
        source = _classify(path)
        if isinstance(source, Source):
            chosen.append(path)
            total += source.size
    if not chosen:
        raise ValueError(f"this Python has no source files in {root!r}; name your own text with data.paths")
    return chosen


def _walk(directory: str, passed: dict[str, int]) -> Iterator[str]:
    def stop(error: OSError) -> None:
        raise ValueError(f"data path {error.filename!r} cannot be read: {error.strerror}") from error

    for folder, folders, files in os.walk(directory, onerror=stop):
        passed["hidden"] += sum(name.startswith(".") for name in folders + files)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (os.path.join(folder, name) for name in sorted(files) if not name.startswith("."))


def _classify(path: str) -> Source | str:
    """The Source at `path`, or why it is none: "binary" or "empty"."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # a pipe would block, a device never end
            return "binary"
        with open(path, "rb") as file:
            head = file.read(SNIFF_BYTES)
    except OSError as error:
        raise ValueError(f"data path {path!r} cannot be read: {error.strerror}") from error
    if head.startswith(MAGIC):
        return Source(path, "tokens", status.st_size)
    if not head:
        return "empty"
    if not _is_text(head, whole=len(head) < SNIFF_BYTES):
        return "binary"
    return Source(path, "jsonl" if path.endswith(".jsonl") else "text", status.st_size)


def _require_source(path: str) -> Source:
    source = _classify(path)
    if source == "empty":
        raise ValueError(f"data path {path!r} is empty; give a file with text")
    if source == "binary":
        raise ValueError(f"data path {path!r} is not UTF-8 text, .jsonl or a prepared token file")
    return source


def _is_text(head: bytes, *, whole: bool) -> bool:
    if b"\0" in head:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=whole)
    except UnicodeDecodeError:
        return False
    return True


def _counts(passed: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in passed.items())


# ---- pieces


def cut_pieces(source: Source, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Cut a text or jsonl file into ranges of about `piece_bytes`, which depend on nothing but its content.

    A .jsonl is cut between lines. Text is cut before the first line that starts with no space, so that tokenizers which
    never join a line break with the word after it see no difference; failing that within 64 KiB, between characters.
    """
    start = 0
    with _open(source.path) as file:
        while start < source.size:
            stop = start + piece_bytes
            if stop < source.size:
                stop = _line_cut(file, stop) if source.kind == "jsonl" else _text_cut(file, stop)
            stop = min(stop, source.size)
            yield Piece(source.path, source.kind, start, stop, stop == source.size)
            start = stop


def _line_cut(file, near: int) -> int:
    file.seek(near - 1)
    return near - 1 + len(file.readline())


def _text_cut(file, near: int) -> int:
    file.seek(near)
    window = file.read(64 << 10)
    at = window.find(b"\n")
    while 0 <= at < len(window) - 1:
        if not window[at + 1 : at + 2].isspace():
            return near + at + 1
        at = window.find(b"\n", at + 1)
    # No such line: cut where a character starts (UTF-8 continuation bytes are 10xxxxxx).
    return near + next((i for i, byte in enumerate(window) if byte & 0xC0 != 0x80), len(window))


def read_piece(piece: Piece, *, mask_prompt: bool = False) -> list[Document]:
    """The documents of one piece, in order; empty ones are left out. Raises ValueError naming the file (and line)."""
    with _open(piece.path) as file:
        file.seek(piece.start)
        data = file.read(piece.stop - piece.start)
    if len(data) != piece.stop - piece.start:
        raise ValueError(f"data path {piece.path!r} became shorter while it was read")
    if piece.start == 0:  # the mark says how the file is encoded, it is no text
        data = data.removeprefix(codecs.BOM_UTF8)
    if piece.kind == "jsonl":
        return _read_lines(piece, data, mask_prompt)
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = piece.start + error.start
        raise ValueError(
            f"data path {piece.path!r} is not UTF-8 text at byte {at}; convert it, or leave it out"
        ) from error
    return [Document(((data, True),), ends=piece.last)]


def read_documents(
    paths: Sequence[str | os.PathLike[str]],
    *,
    mask_prompt: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Document]:
    """Stream the documents of text files, directories and .jsonl files.

    `progress(done, total)` is called in bytes after each piece. A text file longer than PIECE_BYTES comes as several
    Documents, all but the last with ends=False. Raises ValueError as `find_sources` and `read_piece` do.
    """
    listing = find_sources(paths)
    done = 0
    for piece in text_pieces(listing.sources):
        yield from read_piece(piece, mask_prompt=mask_prompt)
        done += piece.stop - piece.start
        if progress is not None:
            progress(done, listing.bytes)


def text_pieces(sources: Iterable[Source]) -> Iterator[Piece]:
    """The pieces of all `sources`; raises ValueError for a token file, which holds no text."""
    for source in sources:
        if source.kind == "tokens":
            raise ValueError(f"{source.path!r} is a prepared token file, not text; name it in data.paths as it is")
        yield from cut_pieces(source)


def _open(path: str):
    try:
        return open(path, "rb")
    except OSError as error:
        raise ValueError(f"data path {path!r} cannot be read: {error.strerror}") from error


# ---- .jsonl


def _read_lines(piece: Piece, data: bytes, mask_prompt: bool) -> list[Document]:
    documents = []
    for index, line in enumerate(data.split(b"\n")):
        if not line.strip():
            continue
        try:
            parts = tuple((text.encode("utf-8"), learn) for text, learn in _record_parts(loads(line)) if text)
        except RecursionError as error:
            raise ValueError(f"{_line_name(piece, index)} is nested too deeply") from error
        except (JSONDecodeError, UnicodeError) as error:
            raise ValueError(f"{_line_name(piece, index)} is not valid JSON in UTF-8: {error}") from error
        except _BadRecord as error:
            raise ValueError(f"{_line_name(piece, index)} {error}") from error
        if parts:
            documents.append(Document(parts if mask_prompt else tuple((text, True) for text, _ in parts)))
    return documents


def _line_name(piece: Piece, index: int) -> str:
    """`file:line` of the line `index` lines into the piece. Lines before the piece are counted only now: errors are
    rare.
    """
    with _open(piece.path) as file:
        before = file.read(piece.start).count(b"\n")
    return f"{piece.path}:{before + index + 1}"


class _BadRecord(Exception):
    """What is wrong with one JSON record; becomes a ValueError that names file and line."""


def _record_parts(record: object) -> list[tuple[str, bool]]:
    """(text, learn) of a {"text"}, {"prompt", "completion"} or {"messages"} record."""
    if isinstance(record, dict) and "text" in record:
        return [(_string(record, "text"), True)]
    if isinstance(record, dict) and "prompt" in record and "completion" in record:
        return [(_string(record, "prompt"), False), (_string(record, "completion"), True)]
    if isinstance(record, dict) and "messages" in record:
        return _message_parts(record["messages"])
    raise _BadRecord('must be {"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [...]}')


def _message_parts(messages: object) -> list[tuple[str, bool]]:
    """A chat in one plain form for every tokenizer: a line `<|role|>`, the content, a line break. Only answers are
    learnt.
    """
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise _BadRecord('has "messages" that are not a list of {"role": ..., "content": ...}')
    parts: list[tuple[str, bool]] = []
    for message in messages:
        role = _string(message, "role")
        parts.append((f"<|{role}|>\n", False))
        parts.append((_string(message, "content") + "\n", role == "assistant"))
    if not any(learn for _, learn in parts):
        raise _BadRecord('has "messages" without one of the role "assistant": there is nothing to learn')
    return parts


def _string(record: dict, key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise _BadRecord(f'needs a string under "{key}", not {type(value).__name__}')
    return value
