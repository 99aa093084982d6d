"""Drop-in modules built from `pyfast.ops`; every parameter carries a Layout."""

from __future__ import annotations

from pyfast.nn.attention import Attention
from pyfast.nn.embedding import VocabParallelEmbedding
from pyfast.nn.feed_forward import FeedForward
from pyfast.nn.linear import ColumnParallelLinear, RowParallelLinear
from pyfast.nn.moe import MoE, MoEOutput
from pyfast.nn.norm import RMSNorm

__all__ = [
    "Attention",
    "ColumnParallelLinear",
    "FeedForward",
    "MoE",
    "MoEOutput",
    "RMSNorm",
    "RowParallelLinear",
    "VocabParallelEmbedding",
]
