"""Tokenizers: bytes, built in, and Hugging Face `tokenizer.json` files. Both look alike to the rest of pyfast."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

# Names that published tokenizers give their end-of-document token, tried when no config beside the file names one.
_KNOWN_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>")


class Tokenizer(Protocol):
    """What pyfast asks of a tokenizer.

    `name` is what a user wrote to get it, `vocab_size` is one more than the largest id, `end_token` the id that ends
    each document, `fingerprint` a hash of everything that decides the ids; it is recorded in token files and
    checkpoints.
    """

    name: str
    vocab_size: int
    end_token: int
    fingerprint: str

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of `text` [tokens], uint16 or uint32, without an end token. Bytes are UTF-8."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; end tokens are left out, bytes that are no character become U+FFFD."""
        ...


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds the ids 0 .. vocab_size - 1, little-endian."""
    if vocab_size < 1 or vocab_size > 2**32:
        raise ValueError(f"vocab_size is {vocab_size}; token ids are 16 or 32 bits, so it must be 1 .. {2**32}")
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


class ByteTokenizer:
    """Each byte of the UTF-8 text is a token (0 .. 255); token 256 ends a document."""

    name = "byte"
    vocab_size = 257
    end_token = 256
    fingerprint = hashlib.sha256(b"pyfast byte tokenizer: 256 bytes, end 256").hexdigest()

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of `text` [bytes], uint16. Bytes need not be UTF-8 here: every one is a token."""
        data = text.encode("utf-8") if isinstance(text, str) else text
        return np.frombuffer(data, dtype=np.uint8).astype("<u2")

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; raises ValueError for an id that is not 0 .. 256."""
        array = _as_ids(ids, self.vocab_size)
        return array[array < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class FileTokenizer:
    """A Hugging Face `tokenizer.json`, run by the `tokenizers` library.

    `path` is the file, or a directory that holds one. `end_token` is the token (text or id) that ends a document;
    without it, the `eos_token` of the configs beside the file is taken. Text that spells a special token is encoded
    as plain text: a document cannot smuggle one in. Truncation and padding that the file may ask for are switched
    off.
    """

    def __init__(self, path: str | Path, *, end_token: str | int | None = None) -> None:
        file = _find_tokenizer_json(Path(path))
        content = _read(file)
        library = _import_tokenizers()
        try:
            self._tokenizer = library.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(
                f"tokenizer {str(file)!r} is not a tokenizer.json that `tokenizers` can read: {error}"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name = str(path)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self._dtype = token_dtype(self.vocab_size)
        self.end_token = _resolve_end_token(end_token, vocab, file)
        self.fingerprint = hashlib.sha256(content + f"\nend {self.end_token}".encode()).hexdigest()

    def __reduce__(self) -> tuple:
        # The library forgets encode_special_tokens when it is pickled: other processes read the file again.
        return _reload, (self.name, self.end_token)

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of `text` [tokens]; raises ValueError if `text` is bytes that are not UTF-8."""
        string = text if isinstance(text, str) else text.decode("utf-8")
        return np.array(self._tokenizer.encode(string, add_special_tokens=False).ids, dtype=self._dtype)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; raises ValueError for an id beyond the vocabulary."""
        array = _as_ids(ids, self.vocab_size)
        return self._tokenizer.decode(array[array != self.end_token].tolist(), skip_special_tokens=False)


def load_tokenizer(spec: str, *, end_token: str | int | None = None) -> Tokenizer:
    """The tokenizer that `spec` names: "byte", or the path of a `tokenizer.json` or of a directory that holds one.

    `end_token` (text or id) overrides the end-of-document token of a file. Raises ValueError when the file is missing,
    cannot be read, or has no end token, and ImportError when the `tokenizers` package is not installed.
    """
    if not isinstance(spec, str) or not spec:
        raise ValueError(f'tokenizer is {spec!r}; give "byte", or the path of a tokenizer.json')
    if spec != "byte":
        return FileTokenizer(spec, end_token=end_token)
    if end_token not in (None, ByteTokenizer.end_token):
        raise ValueError(f"end_token is {end_token!r}; the byte tokenizer's is always {ByteTokenizer.end_token}")
    return ByteTokenizer()


def _reload(path: str, end_token: int) -> FileTokenizer:
    return FileTokenizer(path, end_token=end_token)


def _import_tokenizers():
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            "tokenizer.json files need the `tokenizers` package: pip install 'pyfast[tokenizers]' "
            '(or use tokenizer "byte", which needs nothing)'
        ) from error
    return tokenizers


def _find_tokenizer_json(path: Path) -> Path:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f'tokenizer {str(file)!r} does not exist; give "byte", or the path of a tokenizer.json')
    return file


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"{str(file)!r} cannot be read: {error.strerror}") from error


def _resolve_end_token(given: str | int | None, vocab: dict[str, int], file: Path) -> int:
    """Id of the end token: as given, else from the configs beside `file`, else a well-known name."""
    if given is not None:
        return _token_id(given, vocab, "end_token")
    for name, key in (
        ("tokenizer_config.json", "eos_token"),
        ("special_tokens_map.json", "eos_token"),
        ("generation_config.json", "eos_token_id"),
        ("config.json", "eos_token_id"),
    ):
        found = _config_value(file.with_name(name), key)
        if found is not None:
            return _token_id(found, vocab, f"{key} of {str(file.with_name(name))!r}")
    for token in _KNOWN_END_TOKENS:
        if token in vocab:
            return vocab[token]
    raise ValueError(
        f"tokenizer {str(file)!r} has no end-of-document token: no tokenizer_config.json beside it names an eos_token; "
        "add one, or give end_token (text or id)"
    )


def _config_value(file: Path, key: str) -> str | int | None:
    if not file.is_file():
        return None
    try:
        value = json.loads(_read(file)).get(key)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{str(file)!r} is not a JSON object: {error}") from error
    if isinstance(value, dict):  # an added token written out with its options
        value = value.get("content")
    if isinstance(value, list):  # generation configs list every token that stops; the first is the usual one
        value = value[0] if value else None
    return value


def _token_id(token: str | int, vocab: dict[str, int], where: str) -> int:
    known = token in vocab if isinstance(token, str) else token in vocab.values()
    if not known:
        raise ValueError(f"{where} is {token!r}, which is not in the tokenizer's vocabulary of {len(vocab)} tokens")
    return vocab[token] if isinstance(token, str) else int(token)


def _as_ids(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    array = np.asarray(ids if hasattr(ids, "__array__") else list(ids), dtype=np.int64).reshape(-1)
    if array.size and not 0 <= array.min() <= array.max() < vocab_size:
        raise ValueError(
            f"ids span {array.min()} .. {array.max()}; the tokenizer's vocabulary is 0 .. {vocab_size - 1}"
        )
    return array
