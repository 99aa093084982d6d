"""Public ops: argument checks, autograd, choice of kernel. One file an op."""

from __future__ import annotations

from pyfast.ops.rms_norm import rms_norm

__all__ = ["rms_norm"]
