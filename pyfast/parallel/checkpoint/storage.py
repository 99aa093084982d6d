"""torch.distributed.checkpoint storage on safetensors files and one JSON file; nothing is pickled.

Each rank writes the pieces the plan gives it into its own `rank-RRRRR-NNNNN.safetensors` files; the coordinator then
writes `metadata.json`, which says where each piece lies. Reading maps the files and touches only the slices asked for.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from pyfast.parallel.checkpoint.metadata import (
    METADATA_FILE,
    CheckpointError,
    CheckpointMetadata,
    Chunk,
    FileRecord,
    TensorRecord,
    dtype_name,
    hash_file,
    write_metadata,
)

# A file's tensors are gathered in host memory before they are written (one copy where they are not contiguous).
MAX_FILE_BYTES = 2 << 30
# What safetensors can both write and read. Narrower ones (float4, float8_e8m0fnu) it writes but cannot read back.
STORABLE_DTYPES = frozenset(
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz complex64 "
    "int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool".split()
)


def chunk_key(name: str, offset: tuple[int, ...], shape: tuple[int, ...], full_shape: tuple[int, ...]) -> str:
    """The key of a chunk in its file: the tensor's name, followed by the ranges when it is only a part of it.

    Injective for any names: a plain key contains no "[", a key with ranges ends in the only "[...]" that matters.
    """
    # safetensors stores UTF-8 and reserves one name; the escape is the identity on ordinary names.
    escaped = name.encode("unicode_escape").decode("ascii")
    if shape == full_shape and "[" not in escaped and escaped not in ("", "__metadata__"):
        return escaped
    ranges = ",".join(f"{start}:{start + length}" for start, length in zip(offset, shape, strict=True))
    return f"{escaped}[{ranges}]"


def sync_directory(path: Path) -> None:
    """Make the entries of a directory (new files, renames) survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _done(value: Any) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


class SafetensorsWriter(StorageWriter):
    """Writes one rank's part of a checkpoint into the existing directory `path`.

    `rank` names the rank's files. `description` is what the coordinator records beside the tensors: the values of
    CheckpointMetadata's step, mesh, scalars and config, and `layouts`, a dict of tensor name to its cut.
    """

    def __init__(
        self, path: Path, *, rank: int, description: dict[str, Any], max_file_bytes: int = MAX_FILE_BYTES
    ) -> None:
        self.path = path
        self.rank = rank
        self.description = description
        self.max_file_bytes = max_file_bytes

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # never chosen by path alone

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path} was made by rank 0 but is not there on rank {self.rank}: "
                "the checkpoint directory must lie on a file system that all ranks share"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for number, items in enumerate(self._split(plan.items)):
            name = f"rank-{self.rank:05d}-{number:05d}.safetensors"
            keys = {item.index: _key_of(item) for item in items}
            self._write_file(name, {keys[item.index]: planner.resolve_data(item) for item in items})
            record = FileRecord(name, (self.path / name).stat().st_size, hash_file(self.path / name))
            results.extend(WriteResult(item.index, _item_bytes(item), (record, keys[item.index])) for item in items)
        return _done(results)

    def _split(self, items: list[WriteItem]) -> Iterator[list[WriteItem]]:
        """Cut the items into files of about max_file_bytes, each with at least one item."""
        batch: list[WriteItem] = []
        size = 0
        for item in items:
            if batch and size + _item_bytes(item) > self.max_file_bytes:
                yield batch
                batch, size = [], 0
            batch.append(item)
            size += _item_bytes(item)
        if batch:
            yield batch

    def _write_file(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        path = self.path / name
        path.touch()
        mode = path.stat().st_mode  # what the umask allows; safetensors puts a file of mode 0600 in its place
        try:
            save_file(_dense(tensors), path)
        except SafetensorError as error:
            raise CheckpointError(f"writing {path} failed: {error}") from error
        path.chmod(mode)
        with open(path, "rb") as file:
            os.fsync(file.fileno())

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata file: after it, and not before, the directory is a complete checkpoint."""
        description = dict(self.description)
        layouts = description.pop("layouts")
        places = {result.index: result.storage_data for rank_results in results for result in rank_results}
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            chunks = []
            for chunk in tensor.chunks:
                record, key = places[dcp.MetadataIndex(name, chunk.offsets)]
                chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), record.name, key))
            dtype = tensor.properties.dtype
            tensors[name] = TensorRecord(tuple(tensor.size), dtype, tuple(chunks), layouts.get(name, []))
        files = sorted({record for record, _ in places.values()}, key=lambda record: record.name)
        write_metadata(CheckpointMetadata(path=self.path, tensors=tensors, files=tuple(files), **description))
        sync_directory(self.path)


def _key_of(item: WriteItem) -> str:
    data = item.tensor_data
    return chunk_key(item.index.fqn, tuple(data.chunk.offsets), tuple(data.chunk.sizes), tuple(data.size))


def _item_bytes(item: WriteItem) -> int:
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _dense(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values as contiguous host tensors, no two of which are one memory (safetensors refuses those)."""
    dense: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for key, tensor in tensors.items():
        # A conjugate or negative view is contiguous, but its bytes are not its values.
        value = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        dense[key] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    return dense


class SafetensorsReader(StorageReader):
    """Reads tensors, or any slices of them, of the checkpoint that `metadata` describes."""

    def __init__(self, metadata: CheckpointMetadata) -> None:
        self.metadata = metadata
        self.places = {
            dcp.MetadataIndex(name, chunk.offset): chunk
            for name, record in metadata.tensors.items()
            for chunk in record.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # never chosen by path alone

    def read_metadata(self) -> dcp.Metadata:
        return dcp.Metadata({name: _dcp_tensor(record) for name, record in self.metadata.tensors.items()})

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self.places[item.storage_index].file].append(item)
        for name, items in by_file.items():
            path = self.metadata.path / name
            try:
                with safe_open(path, framework="pt") as file:
                    for item in items:
                        self._read(file, item, planner)
            except SafetensorError as error:
                raise CheckpointError(f"{path} is damaged: {error}") from error
        return _done(None)

    def _read(self, file: Any, item: ReadItem, planner: LoadPlanner) -> None:
        chunk = self.places[item.storage_index]
        dtype = self.metadata.tensors[item.storage_index.fqn].dtype
        ranges = zip(item.storage_offsets, item.lengths, strict=True)
        # The empty tuple of a 0-dimensional tensor selects all of it.
        value = file.get_slice(chunk.key)[tuple(slice(start, start + length) for start, length in ranges)]
        target = planner.resolve_tensor(item).detach()
        if value.shape != target.shape or value.dtype != dtype:
            raise CheckpointError(
                f"{self.metadata.path / chunk.file} does not hold what {METADATA_FILE} says: {chunk.key!r} is "
                f"{dtype_name(value.dtype)} {tuple(value.shape)}, not {dtype_name(dtype)} {tuple(target.shape)}"
            )
        target.copy_(value)
        planner.commit_tensor(item, target)


def _dcp_tensor(record: TensorRecord) -> dcp.TensorStorageMetadata:
    chunks = [dcp.ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.shape)) for c in record.chunks]
    properties = dcp.TensorProperties(dtype=record.dtype)
    return dcp.TensorStorageMetadata(properties=properties, size=torch.Size(record.shape), chunks=chunks)
