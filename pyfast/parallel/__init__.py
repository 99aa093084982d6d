"""How modules are spread over ranks: the mesh, parameter layouts, and reductions derived from them."""

from __future__ import annotations

from pyfast.nn.layout import Layout, Shard, get_layout, set_layout
from pyfast.parallel.buckets import Bucket, FlatBuckets, clip_coefficient
from pyfast.parallel.config import ParallelConfig
from pyfast.parallel.mesh import ParallelMesh, rank_groups
from pyfast.parallel.replicas import check_replicas

__all__ = [
    "Bucket",
    "FlatBuckets",
    "Layout",
    "ParallelConfig",
    "ParallelMesh",
    "Shard",
    "check_replicas",
    "clip_coefficient",
    "get_layout",
    "rank_groups",
    "set_layout",
]
