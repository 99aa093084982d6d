"""Token files: tokens of many documents in one memory-mapped file. The format is described in docs/data.md.

0      8 bytes  MAGIC
8      8 bytes  length of the JSON header, uint64
16     JSON header, then spaces up to byte 4096
4096   tokens   uint16 or uint32 [tokens]
...    offsets  uint64 [documents + 1]: document i is tokens[offsets[i] : offsets[i + 1]]
...    mask     uint8 [tokens], only if header["mask"]: 1 where the token may be a label
Everything little-endian; offsets and mask start at the next multiple of 64.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyfast.train.tokenizer import Tokenizer, token_dtype

MAGIC = b"PYFTOKEN"
VERSION = 1
HEADER_BYTES = 4096
ALIGNMENT = 64

_HEADER_TYPES = {
    "version": int, "dtype": str, "tokens": int, "documents": int, "labels": int, "mask": bool, "vocab": int,
    "end_token": int, "largest_token": int, "tokenizer": str, "fingerprint": str, "digest": str,
}  # fmt: skip


@dataclass(frozen=True)
class Tokens:
    """Documents as tokens, in memory or mapped from a file.

    `ids` uint16 or uint32 [tokens]; `offsets` [documents + 1], strictly increasing from 0 to tokens; `mask` uint8
    [tokens], 1 where the token may be a label, or None if all may; `labels` how many tokens are labels (masked ones
    and each document's first are not); `largest` the largest id; `digest` a hash of ids, offsets and mask.
    """

    ids: np.ndarray
    offsets: np.ndarray
    mask: np.ndarray | None
    labels: int
    largest: int
    digest: str


class TokenSummary:
    """What the header tells about the tokens, gathered block by block: counts, largest id, hash."""

    def __init__(self) -> None:
        self.tokens = 0
        self.documents = 0
        self.labels = 0
        self.masked = 0
        self.largest = -1
        self.document_open = False
        self._hashes = [hashlib.blake2b(digest_size=16) for _ in range(3)]  # ids, offsets, mask
        self._hashes[1].update(np.zeros(1, "<u8").tobytes())

    def add(self, ids: np.ndarray, ends: np.ndarray, mask: np.ndarray | None) -> None:
        """Count a block: `ids` [tokens]; `ends` [documents], where documents end in it; `mask` [tokens] or None."""
        if ids.size == 0:
            return
        firsts = ends[:-1] if ends.size and ends[-1] == ids.size else ends
        if not self.document_open:
            firsts = np.concatenate([[0], firsts])
        self.labels += ids.size - firsts.size if mask is None else int(mask.sum()) - int(mask[firsts].sum())
        self.largest = max(self.largest, int(ids.max()))
        self._hashes[0].update(ids.data)
        self._hashes[1].update((ends + self.tokens).astype("<u8").tobytes())
        if mask is not None:
            self._hashes[2].update(mask.data)
            self.masked += mask.size - int(mask.sum())
        self.document_open = not ends.size or int(ends[-1]) != ids.size
        self.tokens += ids.size
        self.documents += ends.size

    def digest(self) -> str:
        return hashlib.blake2b(b"".join(h.digest() for h in self._hashes), digest_size=16).hexdigest()


class TokenWriter:
    """Writes a token file, block by block; the file appears under its name only when it is complete.

    A context manager. `vocab` decides the dtype. `mask`: a label mask is stored. Raises ValueError when `path` exists
    (unless `overwrite`), when its directory does not, and at the end when there are no tokens or the last document
    has no end.
    """

    def __init__(self, path: str | Path, tokenizer: Tokenizer, *, mask: bool = False, overwrite: bool = False) -> None:
        self.path = Path(path)
        self.summary = TokenSummary()
        self._tokenizer = tokenizer
        self._overwrite = overwrite
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._check_free()
        if not self.path.parent.is_dir():
            raise ValueError(f"output {str(self.path)!r}: the directory does not exist; create it first")
        # Hidden and unlike any name a reader looks for: after a kill this is all that is left.
        self._partial = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.partial")
        self._file = open(self._partial, "xb")
        self._file.seek(HEADER_BYTES)
        # Nameless files: offsets and mask come after the tokens, whose number is not known yet.
        self._offsets = tempfile.TemporaryFile(dir=self.path.parent)
        self._offsets.write(np.zeros(1, "<u8").tobytes())
        self._mask = tempfile.TemporaryFile(dir=self.path.parent) if mask else None

    def add(self, ids: np.ndarray, ends: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Append a block: `ids` [tokens]; `ends` [documents] int, increasing: a document ends before ids[ends[i]].

        A document may go on in the next block. `mask` uint8 or bool [tokens] is needed if the file has one, and only
        then.
        """
        if (mask is None) != (self._mask is None):
            raise ValueError(
                f"mask is {'missing' if mask is None else 'given'}; the writer was made with mask={mask is None}"
            )
        ends = np.asarray(ends, dtype=np.int64)
        if ends.size and (ends[0] < 1 or ends[-1] > ids.size or np.any(ends[1:] <= ends[:-1])):
            raise ValueError(f"ends must increase within 1 .. {ids.size} (every document has a token)")
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self._tokenizer.vocab_size:
            raise ValueError(
                f"ids span {ids.min()} .. {ids.max()}; the vocabulary is 0 .. {self._tokenizer.vocab_size - 1}"
            )
        ids = np.ascontiguousarray(ids, dtype=self._dtype)
        mask = None if mask is None else np.ascontiguousarray(mask, dtype=np.uint8)
        if mask is not None and (mask.shape != ids.shape or (mask.size and mask.max() > 1)):
            raise ValueError(f"mask of shape {mask.shape} must hold 0 or 1 for each of the {ids.size} ids")
        self._offsets.write((ends + self.summary.tokens).astype("<u8").tobytes())
        self._file.write(ids.data)
        if mask is not None:
            self._mask.write(mask.data)
        self.summary.add(ids, ends, mask)

    def close(self) -> None:
        """Complete the file, write it through to the disk, and give it its name."""
        if not self.summary.tokens or self.summary.document_open:
            raise ValueError(
                "there are no tokens to write" if not self.summary.tokens else "the last document has no end"
            )
        for section in filter(None, (self._offsets, self._mask)):
            self._file.write(bytes(-self._file.tell() % ALIGNMENT))
            section.seek(0)
            shutil.copyfileobj(section, self._file, 1 << 20)
        header = json.dumps(self._header()).encode()
        if len(header) > HEADER_BYTES - 16:
            raise ValueError(
                f"the header takes {len(header)} bytes, more than {HEADER_BYTES - 16}: shorten the tokenizer's name"
            )
        self._file.seek(0)
        self._file.write(MAGIC + len(header).to_bytes(8, "little") + header.ljust(HEADER_BYTES - 16))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._check_free()
        os.replace(self._partial, self.path)
        self._close_files()

    def abandon(self) -> None:
        """Leave nothing behind."""
        self._close_files()
        self._partial.unlink(missing_ok=True)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            self.abandon()
            return
        try:
            self.close()
        except BaseException:
            self.abandon()
            raise

    def _check_free(self) -> None:
        if self.path.is_dir():
            raise ValueError(f"output {str(self.path)!r} is a directory; give the name of a file")
        if not self._overwrite and self.path.exists():
            raise ValueError(f"output {str(self.path)!r} exists; give another name, or ask to overwrite it")

    def _close_files(self) -> None:
        for file in filter(None, (self._file, self._offsets, self._mask)):
            file.close()

    def _header(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "dtype": "uint16" if self._dtype.itemsize == 2 else "uint32",
            "tokens": self.summary.tokens,
            "documents": self.summary.documents,
            "labels": self.summary.labels,
            "mask": self._mask is not None,
            "vocab": self._tokenizer.vocab_size,
            "end_token": self._tokenizer.end_token,
            "largest_token": self.summary.largest,
            "tokenizer": "/".join(
                Path(self._tokenizer.name).parts[-2:]
            ),  # for a reader's eye: machines differ in the rest
            "fingerprint": self._tokenizer.fingerprint,
            "digest": self.summary.digest(),
        }


@dataclass(frozen=True)
class TokenFile:
    """An open token file: its header, and its tokens mapped read-only."""

    path: Path
    header: dict[str, Any]
    tokens: Tokens


def open_token_file(path: str | Path) -> TokenFile:
    """Map a token file. Reads the header and the document offsets, not the tokens.

    Raises ValueError naming the file when it is missing, no token file, of another version, truncated, or inconsistent.
    """
    path = Path(path)
    header = _read_header(path)
    dtype = np.dtype({"uint16": "<u2", "uint32": "<u4"}[header["dtype"]])
    count, documents = header["tokens"], header["documents"]
    offsets_at = _align(HEADER_BYTES + count * dtype.itemsize)
    mask_at = _align(offsets_at + (documents + 1) * 8)
    expected = mask_at + count if header["mask"] else offsets_at + (documents + 1) * 8
    actual = path.stat().st_size
    if actual != expected:
        what = "truncated" if actual < expected else "longer than it should be"
        raise ValueError(
            f"token file {str(path)!r} is {what}: {actual} bytes, its header says {expected}; prepare it again"
        )
    # Plain arrays over the maps: np.memmap costs microseconds at each slice.
    ids = np.asarray(np.memmap(path, dtype, "r", HEADER_BYTES, (count,)))
    offsets = np.asarray(np.memmap(path, "<u8", "r", offsets_at, (documents + 1,))).view("<i8")
    mask = np.asarray(np.memmap(path, np.uint8, "r", mask_at, (count,))) if header["mask"] else None
    if offsets[0] != 0 or offsets[-1] != count or np.any(offsets[1:] <= offsets[:-1]):
        raise ValueError(f"token file {str(path)!r} is damaged: its document offsets do not increase from 0 to {count}")
    tokens = Tokens(ids, offsets, mask, header["labels"], header["largest_token"], header["digest"])
    return TokenFile(path, header, tokens)


def verify_token_file(path: str | Path) -> None:
    """Read the whole file and compare its hash with the header; raises ValueError if they differ."""
    file = open_token_file(path)
    summary = TokenSummary()
    summary.add(file.tokens.ids, file.tokens.offsets[1:], file.tokens.mask)
    found = (summary.digest(), summary.labels, summary.largest)
    if found != (file.tokens.digest, file.tokens.labels, file.tokens.largest):
        raise ValueError(
            f"token file {str(path)!r} is damaged: its content does not match its header; prepare it again"
        )


def _align(position: int) -> int:
    return position + -position % ALIGNMENT


def _read_header(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            head = file.read(HEADER_BYTES)
    except OSError as error:
        raise ValueError(f"token file {str(path)!r} cannot be read: {error.strerror}") from error
    if not head.startswith(MAGIC):
        raise ValueError(f"{str(path)!r} is not a token file of pyfast (make one with `pyfast prepare`)")
    if len(head) < HEADER_BYTES:
        raise ValueError(f"token file {str(path)!r} is truncated within its header; prepare it again")
    try:
        header = json.loads(head[16 : 16 + int.from_bytes(head[8:16], "little")])
        version = header["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"token file {str(path)!r} has a damaged header; prepare it again") from error
    if version != VERSION:
        raise ValueError(
            f"token file {str(path)!r} is of version {version!r}, this pyfast reads {VERSION}; prepare it again"
        )
    for key, kind in _HEADER_TYPES.items():
        if type(header.get(key)) is not kind or (kind is int and header[key] < 0):
            raise ValueError(f"token file {str(path)!r} has a damaged header: {key} is {header.get(key)!r}")
    if header["dtype"] not in ("uint16", "uint32") or not header["tokens"] or not header["documents"]:
        raise ValueError(f"token file {str(path)!r} has a damaged header: dtype {header['dtype']!r}, or nothing in it")
    return header
