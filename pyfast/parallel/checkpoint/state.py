"""What a checkpoint holds: every tensor under its single-process name and shape, cut as its Layout says.

A rank's part of a tensor is a list of boxes of the unsharded tensor (several when blocks are stacked, as q, k and v of
a fused projection are), so any layout can load what any other saved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from pyfast.nn.layout import Layout, MeshLike, get_layout
from pyfast.parallel.checkpoint.metadata import TensorRecord, dtype_name
from pyfast.parallel.checkpoint.storage import STORABLE_DTYPES
from pyfast.parallel.compression import RESIDUAL
from pyfast.parallel.flat_part import FlatPart

# The optimizer's float32 copy of a low-precision parameter: stored as the parameter itself.
MASTER = "master"
MAX_DIFFERENCES = 5


@dataclass
class CheckpointState:
    """The state of a training run, as `save` writes it and `load` fills it in place.

    model_parameters: full parameter name -> this rank's tensor, cut as its Layout (`get_layout`) says.
    optimizer_state: kind ("exp_avg", "exp_avg_sq", "momentum", "master", ...) -> parameter name -> tensor of the
        parameter's local shape (cut alike) or without dimensions (the same on every rank). None: load the model only
        and pass over whatever optimizer state there is. The kind "master" is stored *as* the parameter: it is the
        truth, the parameter its rounding. When loading, a master is filled from the stored parameter whatever its
        dtype, and the parameter is the master rounded. Where data-parallel ranks share the state out (ZeRO) a tensor is
        a FlatPart, this rank's stretch of it; after `load` such a rank has the stretch of its parameters only.
    scalars: whatever is no tensor and equal on all ranks (step, data position, seeds, random state, loss scale):
        None, bool, int, float, str, list, tuple, dict and tensors of up to 1 MiB. `load` replaces the content.
    """

    model_parameters: dict[str, torch.Tensor | FlatPart]
    optimizer_state: dict[str, dict[str, torch.Tensor | FlatPart]] | None = None
    scalars: dict[str, Any] = field(default_factory=dict)

    def tensors(self, mesh: MeshLike) -> dict[str, LocalPart]:
        """Stored name -> this rank's part of it. ValueError for a tensor that does not fit its Layout."""
        cuts = {name: _Cut.of(_layout_of(p), mesh) for name, p in self.model_parameters.items()}
        masters = self._masters()
        result = {}
        for name, parameter in self.model_parameters.items():
            result[f"model.{name}"] = LocalPart(f"model.{name}", masters.get(name, parameter), cuts[name])
        for kind, tensors in (self.optimizer_state or {}).items():
            if "." in kind or not kind:
                raise ValueError(f"optimizer_state: kind {kind!r} must be a name without dots")
            for name, tensor in tensors.items():
                if name not in cuts:
                    raise ValueError(f"optimizer_state[{kind!r}]: {name!r} is not among model_parameters")
                if kind != MASTER:
                    stored = f"optimizer.{kind}.{name}"
                    scalar = isinstance(tensor, torch.Tensor) and tensor.dim() == 0
                    cut = _Cut.of(Layout(()), mesh) if scalar else cuts[name]
                    result[stored] = LocalPart(stored, tensor, cut)
        return result

    def _masters(self) -> dict[str, torch.Tensor | FlatPart]:
        return (self.optimizer_state or {}).get(MASTER, {})

    def _with_masters(self) -> Iterable[tuple[str, torch.Tensor, torch.Tensor]]:
        """(name, what this rank's master is the master of, master) of every parameter that has one."""
        for name, master in self._masters().items():
            parameter = self.model_parameters[name]
            if not isinstance(master, FlatPart):
                yield name, parameter.detach(), master.detach()
            elif isinstance(parameter, FlatPart):
                yield name, parameter.tensor, master.tensor
            else:
                yield name, master.of(parameter.detach()), master.tensor

    def check_masters(self) -> None:
        """ValueError unless each parameter is its master rounded: only the master is stored."""
        for name, parameter, master in self._with_masters():
            if not torch.allclose(parameter, master.to(parameter.dtype), rtol=0, atol=0, equal_nan=True):
                raise ValueError(
                    f"parameter {name!r} is not its master rounded to {dtype_name(parameter.dtype)}: the master alone "
                    "is stored. Update the master too when you change a parameter."
                )

    def finish_load(self, scalars: dict[str, Any]) -> None:
        """After the tensors were read: parameters from their masters, and the scalars."""
        with torch.no_grad():
            for _, parameter, master in self._with_masters():
                parameter.copy_(master)
        self.scalars.clear()
        self.scalars.update(scalars)


def _layout_of(parameter: torch.Tensor | FlatPart) -> Layout:
    return parameter.layout if isinstance(parameter, FlatPart) else get_layout(parameter)


@dataclass(frozen=True)
class _Cut:
    """Where this rank's part of a tensor lies: pairs of slices of the local and of the unsharded tensor."""

    layout: Layout
    local_shape: tuple[int, ...]
    pieces: tuple[tuple[tuple[slice, ...], tuple[slice, ...]], ...]

    @staticmethod
    def of(layout: Layout, mesh: MeshLike) -> _Cut:
        dims = [shard.mesh_dim for shard in layout.shards]
        sizes = {dim: mesh.size(dim) for dim in dims}
        coordinates = {dim: mesh.coordinate(dim) for dim in dims}
        local_shape = tuple(layout.local_shape(sizes, coordinates))
        return _Cut(layout, local_shape, tuple(layout.slices(sizes, coordinates)))


class LocalPart:
    """One rank's part of a named tensor, in the form torch.distributed.checkpoint plans with (`_Checkpointable`)."""

    def __init__(self, name: str, tensor: torch.Tensor | FlatPart, cut: _Cut) -> None:
        part, tensor = (tensor, tensor.tensor) if isinstance(tensor, FlatPart) else (None, tensor)
        shape = tuple(tensor.shape) if part is None else part.shape
        if shape != cut.local_shape:
            raise ValueError(
                f"{name}: this rank's tensor has shape {shape}; its layout (unsharded "
                f"{tuple(cut.layout.shape)}) gives it {cut.local_shape}"
            )
        if tensor.layout != torch.strided or dtype_name(tensor.dtype) not in STORABLE_DTYPES:
            raise ValueError(
                f"{name}: a checkpoint cannot hold a {dtype_name(tensor.dtype)} tensor of layout {tensor.layout}; "
                f"it holds dense tensors of {', '.join(sorted(STORABLE_DTYPES))}"
            )
        self.tensor = tensor
        self.layout = cut.layout
        self.global_shape = torch.Size(cut.layout.shape)
        boxes = self._boxes(cut) if part is None else _boxes_of_part(part, cut)
        self._parts = {chunk.offsets: (chunk, part) for chunk, part in boxes}

    def _boxes(self, cut: _Cut) -> Iterable[tuple[ChunkStorageMetadata, torch.Tensor]]:
        if self.global_shape.numel() == 0:  # nothing to cut: one empty chunk stands for the tensor
            offsets = torch.Size([0] * len(self.global_shape))
            yield ChunkStorageMetadata(offsets, self.global_shape), self.tensor.detach().new_empty(self.global_shape)
            return
        for local, full in cut.pieces:
            part = self.tensor.detach()[local]
            if part.numel() > 0:  # a rank without a share of a block
                yield ChunkStorageMetadata(torch.Size([s.start for s in full]), part.shape), part

    def size(self) -> torch.Size:
        """The unsharded shape."""
        return self.global_shape

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.tensor.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.global_shape),
            )
            for chunk, _ in self._parts.values()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self._parts.values()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self._parts[index.offset][1]


def _boxes_of_part(part: FlatPart, cut: _Cut) -> Iterable[tuple[ChunkStorageMetadata, torch.Tensor]]:
    """The boxes of the unsharded tensor that a stretch of the local one fills."""
    for box, values in part.boxes():
        for local, full in cut.pieces:
            low = [max(b.start, here.start) for b, here in zip(box, local, strict=True)]
            high = [min(b.stop, here.stop) for b, here in zip(box, local, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                inside = tuple(slice(a - b.start, c - b.start) for a, c, b in zip(low, high, box, strict=True))
                offsets = [there.start + a - here.start for there, a, here in zip(full, low, local, strict=True)]
                chunk = values[inside]
                yield ChunkStorageMetadata(torch.Size(offsets), chunk.shape), chunk


def layout_to_json(layout: Layout) -> list[dict[str, Any]]:
    """How a tensor was cut, for people and tools that read the metadata; loading never looks at it."""
    return [{"mesh_dim": s.mesh_dim, "dim": s.dim, "parts": list(s.parts)} for s in layout.shards]


# ----------------------------------------------------------------------------------------------------- planners


class SavePlanner(DefaultSavePlanner):
    """Plans over LocalPart objects; a piece that several ranks hold is written by the one with least to write."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        first: dict[str, tuple[int, TensorWriteData]] = {}
        volumes: dict[str, dict[torch.Size, int]] = defaultdict(dict)
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                mine = item.tensor_data
                other_rank, other = first.setdefault(item.index.fqn, (rank, mine))
                volumes[item.index.fqn][mine.chunk.offsets] = mine.chunk.sizes.numel()
                if (mine.size, mine.properties.dtype) != (other.size, other.properties.dtype):
                    raise ValueError(
                        f"{item.index.fqn} is {dtype_name(mine.properties.dtype)} {tuple(mine.size)} on rank {rank} "
                        f"and {dtype_name(other.properties.dtype)} {tuple(other.size)} on rank {other_rank}"
                    )
        for name, boxes in volumes.items():
            if sum(boxes.values()) != (elements := first[name][1].size.numel()):
                raise ValueError(f"{name}: the ranks hold {sum(boxes.values())} of its {elements} elements")
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class LoadPlanner(DefaultLoadPlanner):
    """Plans over LocalPart objects, which are filled in place."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The inherited method walks the values looking for tensors, and knows no others.
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


# ------------------------------------------------------------------------------------------ does it fit the model?


def is_residual(stored_name: str) -> bool:
    """Whether a tensor is what compression had not sent of one rank's gradients: read by that rank where both the
    checkpoint and the run have it, else passed over."""
    return stored_name.startswith(f"optimizer.{RESIDUAL}")


def describe(tensors: dict[str, LocalPart]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (unsharded shape, dtype), what `differences` compares."""
    return {name: (tuple(t.global_shape), dtype_name(t.tensor.dtype)) for name, t in tensors.items()}


def differences(
    stored: dict[str, TensorRecord], wanted: dict[str, tuple[tuple[int, ...], str]], *, ignore_optimizer: bool
) -> list[str]:
    """Lines saying where the model and a checkpoint differ in names, shapes, or kinds of dtype; [] when they fit."""
    if ignore_optimizer:
        stored = {name: record for name, record in stored.items() if not name.startswith("optimizer.")}
    missing = [f"missing in the checkpoint: {name}" for name in wanted if name not in stored]
    unexpected = [f"not in the model: {name}" for name in stored if name not in wanted and not is_residual(name)]
    other = []
    for name, (shape, dtype) in wanted.items():
        record = stored.get(name)
        if record is not None and record.shape != shape:
            other.append(f"{name}: shape {record.shape} in the checkpoint, {shape} in the model")
        elif record is not None and not _convertible(record.dtype, getattr(torch, dtype)):
            other.append(f"{name}: {dtype_name(record.dtype)} in the checkpoint, {dtype} in the model")
    return _shorten(missing, "missing") + _shorten(unexpected, "not in the model") + _shorten(other, "different")


def _convertible(stored: torch.dtype, wanted: torch.dtype) -> bool:
    return stored == wanted or (stored.is_floating_point and wanted.is_floating_point)


def _shorten(lines: list[str], what: str) -> list[str]:
    rest = len(lines) - MAX_DIFFERENCES
    return lines[:MAX_DIFFERENCES] + ([f"... and {rest} more {what}"] if rest > 0 else [])
