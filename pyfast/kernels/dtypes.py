"""The dtypes of the kernels: their codes in the C++ table, and which dtype sums are kept in."""

from __future__ import annotations

import torch

# DType in csrc/kernels.h
DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over values of `dtype` are kept in: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
