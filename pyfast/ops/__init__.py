"""Public ops: argument checks, autograd, choice of kernel. One file an op."""

from __future__ import annotations

from pyfast.ops.adamw import adamw_
from pyfast.ops.all_gather_matmul import all_gather_matmul
from pyfast.ops.attention import attention
from pyfast.ops.balance import balance_loss, update_bias
from pyfast.ops.grouped_gemm import grouped_gemm
from pyfast.ops.linear import linear
from pyfast.ops.linear_cross_entropy import linear_cross_entropy
from pyfast.ops.matmul_all_reduce import matmul_all_reduce
from pyfast.ops.matmul_reduce_scatter import matmul_reduce_scatter
from pyfast.ops.merge_attention import merge_attention
from pyfast.ops.moe_mlp import moe_mlp
from pyfast.ops.permute import permute, unpermute
from pyfast.ops.rms_norm import rms_norm
from pyfast.ops.rotary import rotary
from pyfast.ops.route import Routing, route
from pyfast.ops.row_map import RowMap, row_map
from pyfast.ops.scaled_dot_product_attention import scaled_dot_product_attention
from pyfast.ops.swiglu import swiglu

__all__ = [
    "Routing",
    "RowMap",
    "adamw_",
    "all_gather_matmul",
    "attention",
    "balance_loss",
    "grouped_gemm",
    "linear",
    "linear_cross_entropy",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "merge_attention",
    "moe_mlp",
    "permute",
    "rms_norm",
    "rotary",
    "route",
    "row_map",
    "scaled_dot_product_attention",
    "swiglu",
    "unpermute",
    "update_bias",
]
