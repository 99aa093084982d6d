"""The one JSON file of a checkpoint: which tensors it holds, where their pieces lie, and all that is no tensor."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

METADATA_FILE = "metadata.json"
FORMAT = "pyfast-checkpoint"
VERSION = 1
# A scalar tensor (a random generator's state) is stored inside the JSON file; anything bigger belongs to the tensors.
MAX_INLINE_BYTES = 1 << 20
HASH_BLOCK_BYTES = 1 << 20


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or what lies on disk is incomplete, damaged or foreign."""


@dataclass(frozen=True)
class FileRecord:
    """A data file of a checkpoint: its name inside the directory, bytes, and SHA-256 of its content."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Chunk:
    """One box of a tensor: offset and shape in the unsharded tensor, and the file and key that hold it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    key: str


@dataclass(frozen=True)
class TensorRecord:
    """One tensor: unsharded shape, dtype, chunks that cover it, and how it was cut (for information only)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    layout: list[dict[str, Any]]


@dataclass(frozen=True)
class CheckpointMetadata:
    """All that a checkpoint holds except the tensors' values.

    `mesh` gives the sizes of the layout it was written under (for information: any layout can load it), `scalars` and
    `config` what was given to `save`, `tensors` full single-process names.
    """

    path: Path
    step: int
    mesh: dict[str, int]
    scalars: dict[str, Any]
    config: dict[str, Any] | None
    tensors: dict[str, TensorRecord]
    files: tuple[FileRecord, ...]


# ---------------------------------------------------------------------------------------------------- writing


def write_metadata(metadata: CheckpointMetadata) -> None:
    """Write `metadata.json` into `metadata.path`, through to the disk."""
    content = {
        "step": metadata.step,
        "mesh": metadata.mesh,
        "scalars": encode(metadata.scalars, "scalars"),
        "config": encode(metadata.config, "config"),
        "tensors": {name: _tensor_to_json(record) for name, record in metadata.tensors.items()},
        "files": {file.name: {"size": file.size, "sha256": file.sha256} for file in metadata.files},
    }
    document = {"format": FORMAT, "version": VERSION, "sha256": _content_hash(content), "content": content}
    with open(metadata.path / METADATA_FILE, "w", encoding="ascii") as file:
        file.write(_one_line_each(document, depth=3) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _one_line_each(value: Any, depth: int) -> str:
    """JSON with one entry a line down to `depth` levels: a line a tensor, a line a file."""
    if depth == 0 or not isinstance(value, dict) or not value:
        return json.dumps(value, allow_nan=False)
    return "{\n" + ",\n".join(f"{json.dumps(k)}: {_one_line_each(v, depth - 1)}" for k, v in value.items()) + "\n}"


def _tensor_to_json(record: TensorRecord) -> dict[str, Any]:
    chunks = [{"offset": c.offset, "shape": c.shape, "file": c.file, "key": c.key} for c in record.chunks]
    return {"shape": record.shape, "dtype": dtype_name(record.dtype), "layout": record.layout, "chunks": chunks}


def _content_hash(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


# ---------------------------------------------------------------------------------------------------- reading


def read_metadata(path: str | os.PathLike[str]) -> CheckpointMetadata:
    """Read and check what the checkpoint in directory `path` says about itself; no tensor data is read.

    Raises FileNotFoundError when there is no `metadata.json` (the directory is no complete checkpoint) and
    CheckpointError, naming the file, when it is damaged, foreign, or of a newer format version, or when a data file is
    missing or has another size than recorded.
    """
    path = Path(path)
    file = path / METADATA_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{path} is not a complete checkpoint: there is no {METADATA_FILE} in it")
    document = _parse(file)
    _check_document(file, document)
    try:
        metadata = _from_json(path, document["content"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    _check_sizes(metadata)
    return metadata


def _parse(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except ValueError as error:  # covers JSONDecodeError and UnicodeDecodeError
        raise CheckpointError(f"{file} is damaged: it is not valid JSON ({error})") from error


def _check_document(file: Path, document: Any) -> None:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f'{file} is not the metadata of a pyfast checkpoint (no "format": "{FORMAT}")')
    if document.get("version") != VERSION:
        raise CheckpointError(
            f"{file} has format version {document.get('version')!r}; this version of pyfast reads version {VERSION}. "
            "Read it with the version of pyfast that wrote it."
        )
    if not isinstance(document.get("content"), dict) or _content_hash(document["content"]) != document.get("sha256"):
        raise CheckpointError(f"{file} is damaged: its content does not match its SHA-256")


def _from_json(path: Path, content: dict[str, Any]) -> CheckpointMetadata:
    files = tuple(FileRecord(name, int(f["size"]), str(f["sha256"])) for name, f in content["files"].items())
    names = {file.name for file in files}
    for name in names:
        # Names come from a file that somebody else may have written: nothing outside the directory is ever opened.
        if name != os.path.basename(name) or name in ("", ".", ".."):
            raise ValueError(f"file name {name!r} leads out of the checkpoint")
    tensors = {name: _tensor_from_json(name, t, names) for name, t in content["tensors"].items()}
    scalars, config = decode(content["scalars"]), decode(content["config"])
    return CheckpointMetadata(path, int(content["step"]), dict(content["mesh"]), scalars, config, tensors, files)


def _tensor_from_json(name: str, fields: dict[str, Any], files: set[str]) -> TensorRecord:
    chunks = tuple(Chunk(tuple(c["offset"]), tuple(c["shape"]), c["file"], c["key"]) for c in fields["chunks"])
    shape = tuple(fields["shape"])
    if sum(math.prod(chunk.shape) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"the chunks of tensor {name!r} do not cover its shape {shape}")
    missing = {chunk.file for chunk in chunks} - files
    if missing:
        raise ValueError(f"tensor {name!r} lies in files that are not listed: {sorted(missing)}")
    return TensorRecord(shape, dtype_from_name(fields["dtype"]), chunks, fields["layout"])


def _check_sizes(metadata: CheckpointMetadata) -> None:
    for record in metadata.files:
        file = metadata.path / record.name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: the checkpoint cannot be loaded")
        if file.stat().st_size != record.size:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes, {record.size} were written: it is damaged")


def check_hash(directory: Path, record: FileRecord) -> None:
    """Raise CheckpointError, naming the file, unless its content is what was written."""
    file = directory / record.name
    if hash_file(file) != record.sha256:
        raise CheckpointError(f"{file} is damaged: its SHA-256 is not that of what was written")


def hash_file(file: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while block := stream.read(HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------- values as JSON


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """ "float32" -> `torch.float32`; ValueError for a name this torch does not know."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return dtype


def encode(value: Any, where: str) -> Any:
    """Turn a value into plain JSON such that `decode` gives back an equal value of the same type.

    Takes None, bool, int, float (inf and nan too), str, list, tuple, dict and small tensors. TypeError names the place
    (`where`) of anything else. What JSON has no notation for becomes an object with a single key beginning with "$".
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, list):
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
        return {"$dict": [[encode(k, f"{where} key"), encode(v, f"{where}[{k!r}]")] for k, v in value.items()]}
    if isinstance(value, torch.Tensor):
        return {"$tensor": _encode_tensor(value, where)}
    raise TypeError(
        f"{where} is {type(value).__name__}, which a checkpoint cannot hold as a scalar: allowed are None, bool, int, "
        "float, str, list, tuple, dict and small tensors"
    )


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: decode(item) for key, item in value.items()}
    ((tag, content),) = value.items()
    if tag == "$float":
        return float(content)
    if tag == "$tuple":
        return tuple(decode(item) for item in content)
    if tag == "$dict":
        return {decode(key): decode(item) for key, item in content}
    if tag == "$tensor":
        return _decode_tensor(content)
    raise ValueError(f"unknown kind of value {tag!r}")


def _encode_tensor(tensor: torch.Tensor, where: str) -> dict[str, Any]:
    size = tensor.numel() * tensor.element_size()
    if size > MAX_INLINE_BYTES:
        raise ValueError(
            f"{where} is a tensor of {size} bytes; up to {MAX_INLINE_BYTES} can be stored among the scalars. "
            "Give it as a parameter or as optimizer state."
        )
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    data = base64.b64encode(flat.numpy().tobytes()).decode("ascii")
    return {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "base64": data}


def _decode_tensor(fields: dict[str, Any]) -> torch.Tensor:
    dtype, data = dtype_from_name(fields["dtype"]), bytearray(base64.b64decode(fields["base64"]))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(fields["shape"])
