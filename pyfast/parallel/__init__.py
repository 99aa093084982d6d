"""How modules are spread over ranks: the mesh, parameter layouts, and reductions derived from them."""

from __future__ import annotations

from pyfast.nn.layout import Layout, Shard, get_layout, set_layout
from pyfast.parallel.config import ParallelConfig
from pyfast.parallel.mesh import ParallelMesh, rank_groups

__all__ = [
    "Layout",
    "ParallelConfig",
    "ParallelMesh",
    "Shard",
    "get_layout",
    "rank_groups",
    "set_layout",
]
