"""Public ops: argument checks, autograd, choice of kernel. One file an op."""

from __future__ import annotations

from pyfast.ops.linear_cross_entropy import linear_cross_entropy
from pyfast.ops.rms_norm import rms_norm

__all__ = ["linear_cross_entropy", "rms_norm"]
