"""How modules are spread over ranks: the mesh, parameter layouts, reductions and checkpoints derived from them."""

from __future__ import annotations

from typing import Any

from pyfast.nn.layout import Layout, Shard, get_layout, set_layout
from pyfast.parallel.buckets import Bucket, FlatBuckets, clip_coefficient
from pyfast.parallel.config import ParallelConfig
from pyfast.parallel.mesh import ParallelMesh, rank_groups
from pyfast.parallel.replicas import check_replicas
from pyfast.parallel.zero import make_buckets

__all__ = [
    "Bucket",
    "FlatBuckets",
    "CheckpointError",
    "CheckpointState",
    "Layout",
    "ParallelConfig",
    "ParallelMesh",
    "Shard",
    "ZeroOptimizer",
    "check_replicas",
    "clip_coefficient",
    "get_layout",
    "latest",
    "load",
    "make_buckets",
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
    if name == "ZeroOptimizer":  # saves and loads, too
        from pyfast.parallel.zero_optimizer import ZeroOptimizer

        return ZeroOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
