"""How modules are spread over ranks: the mesh, parameter layouts, reductions and checkpoints derived from them."""

from __future__ import annotations

from typing import Any

from pyfast.nn.layout import Layout, Shard, get_layout, set_layout
from pyfast.parallel.buckets import Bucket, FlatBuckets, clip_coefficient
from pyfast.parallel.config import ParallelConfig
from pyfast.parallel.mesh import ParallelMesh, rank_groups
from pyfast.parallel.replicas import check_replicas

__all__ = [
    "Bucket",
    "FlatBuckets",
    "CheckpointError",
    "CheckpointState",
    "Layout",
    "ParallelConfig",
    "ParallelMesh",
    "Shard",
    "check_replicas",
    "clip_coefficient",
    "get_layout",
    "latest",
    "load",
    "rank_groups",
    "read_metadata",
    "save",
    "set_layout",
]

# torch.distributed.checkpoint takes a second to import: only who saves or loads pays for it.
_CHECKPOINT = ("CheckpointError", "CheckpointState", "latest", "load", "read_metadata", "save")


def __getattr__(name: str) -> Any:
    if name in _CHECKPOINT:
        from pyfast.parallel import checkpoint

        return getattr(checkpoint, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
