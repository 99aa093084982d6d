"""Public ops: argument checks, autograd, choice of kernel. One file an op."""

from __future__ import annotations

from pyfast.ops.adamw import adamw_
from pyfast.ops.attention import attention
from pyfast.ops.linear_cross_entropy import linear_cross_entropy
from pyfast.ops.merge_attention import merge_attention
from pyfast.ops.rms_norm import rms_norm
from pyfast.ops.rotary import rotary
from pyfast.ops.swiglu import swiglu

__all__ = ["adamw_", "attention", "linear_cross_entropy", "merge_attention", "rms_norm", "rotary", "swiglu"]
