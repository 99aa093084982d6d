"""Where a parameter lives: how its unsharded tensor is cut over mesh dimensions, and where its gradient must be summed.

A layout names mesh dimensions ("tp", "cp", "dp", ...) but holds no mesh and no ranks, so the same value describes a
parameter on one process and on a thousand. Gradient reduction, global norm, checkpoints and replica checks all read
it; nothing else is stuck on a tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

_ATTRIBUTE = "pyfast_layout"  # `Tensor.layout` is taken: strided or sparse

Slices = tuple[slice, ...]


class MeshLike(Protocol):
    """What a layout asks of a mesh. `pyfast.parallel.ParallelMesh` is one."""

    def size(self, name: str) -> int: ...

    def coordinate(self, name: str) -> int: ...

    def group(self, name: str) -> Any: ...


def split_bounds(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """Start and end of `rank`'s share of `length` items over `ranks`: as even as possible, larger shares first.

    The rule of `numpy.array_split`, so any length works: 50257 on 2 ranks gives 25129 and 25128.
    """
    base, extra = divmod(length, ranks)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


@dataclass(frozen=True)
class Shard:
    """One dimension of a tensor, cut over one mesh dimension.

    Args:
        mesh_dim: the mesh dimension whose ranks share the cut, such as "tp".
        dim: the tensor dimension that is cut, >= 0.
        parts: sizes of the blocks stacked along `dim`, such as (Nq*D, Nk*D, Nk*D) for a fused qkv weight. Each block
            is cut over the ranks by itself, and a rank holds its slice of every block, one after the other.
    """

    mesh_dim: str
    dim: int
    parts: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(int(part) for part in self.parts))
        if self.dim < 0:
            raise ValueError(f"dim: is {self.dim}, must be >= 0 (count from the front)")
        if not self.parts or min(self.parts) < 0:
            raise ValueError(f"parts: is {self.parts}, must be one or more sizes >= 0")

    def pieces(self, ranks: int, rank: int) -> list[tuple[slice, slice]]:
        """(local slice, global slice) along `dim` of every block of which `rank` of `ranks` holds something."""
        pieces, offset, local = [], 0, 0
        for part in self.parts:
            start, end = split_bounds(part, ranks, rank)
            if end > start:
                pieces.append((slice(local, local + end - start), slice(offset + start, offset + end)))
            local += end - start
            offset += part
        return pieces

    def local_length(self, ranks: int, rank: int) -> int:
        """Length of `rank`'s local tensor along `dim`."""
        bounds = (split_bounds(part, ranks, rank) for part in self.parts)
        return sum(end - start for start, end in bounds)


@dataclass(frozen=True)
class Layout:
    """How one parameter is spread over a mesh.

    Args:
        shape: shape of the unsharded tensor, as in a single process.
        shards: the dimensions that are cut; a tensor dimension and a mesh dimension each appear at most once.
        partial: mesh dimensions over which a rank's gradient is only its share of a sum, though the parameter itself is
            replicated there (a QK norm under tensor parallelism sees this rank's heads only).
        reduce: mesh dimensions over which gradients are summed because the ranks see different data.
    """

    shape: tuple[int, ...]
    shards: tuple[Shard, ...] = ()
    partial: tuple[str, ...] = ()
    reduce: tuple[str, ...] = ("dp", "cp")

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(length) for length in self.shape))
        for field in ("shards", "partial", "reduce"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        cut_dims = [shard.dim for shard in self.shards]
        cut_over = [shard.mesh_dim for shard in self.shards]
        if len(set(cut_dims)) < len(cut_dims) or len(set(cut_over)) < len(cut_over):
            raise ValueError(f"shards: {self.shards} cuts a dimension twice; cut each at most once")
        for shard in self.shards:
            if shard.dim >= len(self.shape) or sum(shard.parts) != self.shape[shard.dim]:
                raise ValueError(
                    f"shards: parts {shard.parts} along dimension {shard.dim} must add up to that dimension of the "
                    f"unsharded shape {self.shape}"
                )
        both = set(cut_over) & set(self.partial)
        if both or set(self.partial) & set(self.reduce):
            raise ValueError(
                f"partial: {self.partial} overlaps shards {tuple(cut_over)} or reduce {self.reduce}; a mesh dimension "
                "is summed for one reason only"
            )

    def local_shape(self, sizes: Mapping[str, int], coords: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the local tensor at mesh coordinates `coords` of a mesh with `sizes`; absent names are size 1."""
        shape = list(self.shape)
        for shard in self.shards:
            shape[shard.dim] = shard.local_length(sizes.get(shard.mesh_dim, 1), coords.get(shard.mesh_dim, 0))
        return tuple(shape)

    def slices(self, sizes: Mapping[str, int], coords: Mapping[str, int]) -> list[tuple[Slices, Slices]]:
        """(slices of the local tensor, slices of the unsharded tensor) pairs that tile the local tensor exactly.

        Empty when the local tensor is empty. Args as in `local_shape`.
        """
        if 0 in self.local_shape(sizes, coords):
            return []
        choices = [[(slice(0, length), slice(0, length))] for length in self.shape]
        for shard in self.shards:
            choices[shard.dim] = shard.pieces(sizes.get(shard.mesh_dim, 1), coords.get(shard.mesh_dim, 0))
        return [
            (tuple(local for local, _ in choice), tuple(whole for _, whole in choice))
            for choice in itertools.product(*choices)
        ]

    def shard(self, full: Tensor, mesh: MeshLike) -> Tensor:
        """This rank's local tensor, a contiguous copy, cut from the unsharded `full`. No communication."""
        if tuple(full.shape) != self.shape:
            raise ValueError(f"full: has shape {tuple(full.shape)}, must be the unsharded shape {self.shape}")
        sizes, coords = self._place(mesh)
        local = full.new_empty(self.local_shape(sizes, coords))
        for here, there in self.slices(sizes, coords):
            local[here] = full[there]
        return local

    def unshard(self, local: Tensor, mesh: MeshLike) -> Tensor:
        """The unsharded tensor from every rank's `local`: a collective over each mesh dimension in `shards`."""
        sizes, coords = self._place(mesh)
        if tuple(local.shape) != self.local_shape(sizes, coords):
            raise ValueError(
                f"local: has shape {tuple(local.shape)}, must be this rank's {self.local_shape(sizes, coords)} "
                f"(unsharded {self.shape}, mesh coordinates {coords})"
            )
        for shard in self.shards:
            if sizes[shard.mesh_dim] > 1:
                local = _gather_shard(local, shard, mesh.group(shard.mesh_dim))
        return local if self.shards else local.clone()

    def counted(self, mesh: MeshLike) -> bool:
        """Whether this rank counts its local tensor in a global sum, so that each element is counted exactly once.

        Ranks that hold the same elements are those that differ only in mesh dimensions that do not cut the tensor; of
        them the one at coordinate 0 counts. Pipeline stages hold different parameters, so "pp" does not replicate.
        """
        return all(mesh.coordinate(name) == 0 for name in self.replicated_over())

    def replicated_over(self) -> tuple[str, ...]:
        """Mesh dimensions whose ranks hold bitwise equal copies of the parameter."""
        cut = {shard.mesh_dim for shard in self.shards}
        return tuple(name for name in dict.fromkeys(("tp", *self.partial, *self.reduce)) if name not in cut)

    def _place(self, mesh: MeshLike) -> tuple[dict[str, int], dict[str, int]]:
        names = [shard.mesh_dim for shard in self.shards]
        return {name: mesh.size(name) for name in names}, {name: mesh.coordinate(name) for name in names}


def _gather_shard(local: Tensor, shard: Shard, group: Any) -> Tensor:
    """Undo one cut: gather over `group`, padded to the longest share since collectives want equal shapes."""
    longest = shard.local_length(group.size, 0)
    padded = local.new_zeros([longest if d == shard.dim else n for d, n in enumerate(local.shape)])
    padded.narrow(shard.dim, 0, local.shape[shard.dim]).copy_(local.detach())
    gathered = group.all_gather(padded, name=f"unshard dimension {shard.dim}")
    full = local.new_empty([sum(shard.parts) if d == shard.dim else n for d, n in enumerate(local.shape)])
    for rank in range(group.size):
        for here, there in shard.pieces(group.size, rank):
            source = gathered[rank].narrow(shard.dim, here.start, here.stop - here.start)
            full.narrow(shard.dim, there.start, there.stop - there.start).copy_(source)
    return full


def set_layout(parameter: Tensor, layout: Layout) -> None:
    """Attach `layout` to `parameter`. `copy.deepcopy` of a bare parameter loses it; the modules of
    `pyfast.nn` put it back."""
    if parameter.dim() != len(layout.shape) or parameter.numel() > math.prod(layout.shape):
        raise ValueError(
            f"layout: unsharded shape {layout.shape} cannot hold this rank's parameter of shape "
            f"{tuple(parameter.shape)}"
        )
    setattr(parameter, _ATTRIBUTE, layout)


def get_layout(parameter: Tensor) -> Layout:
    """The layout attached to `parameter`; a parameter without one is replicated on every rank."""
    layout = getattr(parameter, _ATTRIBUTE, None)
    return Layout(tuple(parameter.shape)) if layout is None else layout


def has_layout(parameter: Tensor) -> bool:
    """Whether a layout was attached by `set_layout`."""
    return hasattr(parameter, _ATTRIBUTE)


__all__ = ["Layout", "MeshLike", "Shard", "get_layout", "has_layout", "set_layout", "split_bounds"]
