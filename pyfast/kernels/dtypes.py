"""Which dtype sums are kept in."""

from __future__ import annotations

import torch


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over values of `dtype` are kept in: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
