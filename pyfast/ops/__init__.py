"""Public ops: argument checks, autograd, choice of kernel. One file an op."""

from __future__ import annotations

from pyfast.ops.adamw import adamw_
from pyfast.ops.rms_norm import rms_norm
from pyfast.ops.rotary import rotary
from pyfast.ops.swiglu import swiglu

__all__ = ["adamw_", "rms_norm", "rotary", "swiglu"]
