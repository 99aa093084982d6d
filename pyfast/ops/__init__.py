"""Public ops: argument checks, autograd, choice of kernel. One file an op."""

from __future__ import annotations

from pyfast.ops.attention import attention
from pyfast.ops.merge_attention import merge_attention
from pyfast.ops.rms_norm import rms_norm

__all__ = ["attention", "merge_attention", "rms_norm"]
