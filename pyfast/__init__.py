"""pyfast: fused kernels and a thin parallel layer for training large transformers, on CPUs and GPUs."""

from __future__ import annotations

__version__ = "0.1.0"
