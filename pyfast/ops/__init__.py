"""Public ops: argument checks, autograd, choice of kernel. One file an op."""

from __future__ import annotations

from pyfast.ops.adamw import adamw_
from pyfast.ops.attention import attention
from pyfast.ops.grouped_gemm import grouped_gemm
from pyfast.ops.linear import linear
from pyfast.ops.linear_cross_entropy import linear_cross_entropy
from pyfast.ops.merge_attention import merge_attention
from pyfast.ops.moe_mlp import moe_mlp
from pyfast.ops.permute import permute, unpermute
from pyfast.ops.rms_norm import rms_norm
from pyfast.ops.rotary import rotary
from pyfast.ops.row_map import RowMap, row_map
from pyfast.ops.scaled_dot_product_attention import scaled_dot_product_attention
from pyfast.ops.swiglu import swiglu

__all__ = [
    "RowMap",
    "adamw_",
    "attention",
    "grouped_gemm",
    "linear",
    "linear_cross_entropy",
    "merge_attention",
    "permute",
    "moe_mlp",
    "rms_norm",
    "rotary",
    "scaled_dot_product_attention",
    "row_map",
    "swiglu",
    "unpermute",
]
