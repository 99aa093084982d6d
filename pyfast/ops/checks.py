"""Checks that public ops share: errors name the argument, what it was, what is allowed, and what to do."""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_float(name: str, tensor: Tensor) -> None:
    """Raise TypeError unless `tensor` is a tensor of a dtype the kernels have."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; a torch.Tensor is needed")
    if tensor.dtype not in FLOAT_DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES)
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed are {allowed}: convert it with .to(...)")


def check_same(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise TypeError / ValueError unless both tensors have the same dtype and device."""
    check_float(name, tensor)
    if tensor.dtype != other.dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}, {other_name} has {other.dtype}; they must be the same")
    if tensor.device != other.device:
        raise ValueError(f"{name} is on {tensor.device}, {other_name} on {other.device}; move them to one device")
