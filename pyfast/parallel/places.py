"""What each value of a flat bucket is, whatever the layout: a number from its parameter's name and its place in the
unsharded tensor.

Random rounding draws by this number (`pyfast.kernels.stochastic`), so that a value is rounded alike on one process and
under any cut of the parameters, the buckets and the optimizer's state.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pyfast.nn.layout import Layout, get_layout
from pyfast.parallel.buckets import Bucket
from pyfast.parallel.mesh import ParallelMesh


def bucket_places(bucket: Bucket, mesh: ParallelMesh) -> Tensor:
    """int64 [n, 2], rows (start in the bucket's buffers, number of the value there): from one start to the next both
    count up by ones. What lies between parameters counts on from the one before."""
    rows = []
    for name, parameter, offset in zip(bucket.names, bucket.parameters, bucket.offsets, strict=True):
        layout = get_layout(parameter)
        cut_over = [shard.mesh_dim for shard in layout.shards]
        sizes = {mesh_dim: mesh.size(mesh_dim) for mesh_dim in cut_over}
        coords = {mesh_dim: mesh.coordinate(mesh_dim) for mesh_dim in cut_over}
        # 62 bits: numbers stay below 2^63, and those of two parameters do not meet
        first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 2
        rows.append(_runs(layout, sizes, coords) + torch.tensor([offset, first]))
    return torch.cat(rows)


def _runs(layout: Layout, sizes: Mapping[str, int], coords: Mapping[str, int]) -> Tensor:
    """int64 [n, 2], rows (index in the local tensor, index in the unsharded one) where a run of both begins."""
    local_shape = layout.local_shape(sizes, coords)
    local_strides, strides = _strides(local_shape), _strides(layout.shape)
    found = [torch.zeros(0, 2, dtype=torch.int64)]
    for here, there in layout.slices(sizes, coords):
        cut = max(len(here) - 1, 0)  # dimensions after this one are whole on both sides
        while cut > 0 and _length(here[cut]) == local_shape[cut] == layout.shape[cut]:
            cut -= 1
        local = whole = torch.zeros(1, dtype=torch.int64)
        for dim in range(len(here)):
            steps = torch.arange(_length(here[dim]) if dim < cut else 1)
            local = (local[:, None] + (here[dim].start + steps) * local_strides[dim]).flatten()
            whole = (whole[:, None] + (there[dim].start + steps) * strides[dim]).flatten()
        found.append(torch.stack([local, whole], dim=1))
    runs = torch.cat(found)
    runs = runs[runs[:, 0].argsort()]
    shift = runs[:, 1] - runs[:, 0]
    begins = torch.ones(len(runs), dtype=torch.bool)
    begins[1:] = shift[1:] != shift[:-1]
    return runs[begins]


def _length(stretch: slice) -> int:
    return stretch.stop - stretch.start


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


__all__ = ["bucket_places"]
