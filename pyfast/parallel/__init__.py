"""How modules are spread over ranks: the mesh, parameter layouts, reductions and checkpoints derived from them."""

from __future__ import annotations

from pyfast.nn.layout import Layout, Shard, get_layout, set_layout
from pyfast.parallel.buckets import Bucket, FlatBuckets, clip_coefficient
from pyfast.parallel.checkpoint import CheckpointError, CheckpointState, latest, load, read_metadata, save
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
