"""Checks that public ops share: errors name the argument, what it was, what is allowed, and what to do."""

from __future__ import annotations

import math
import numbers

import numpy as np
import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FLOAT32_MAX = torch.finfo(torch.float32).max


def check_float(name: str, tensor: Tensor) -> None:
    """Raise TypeError unless `tensor` is a tensor of a dtype the kernels have."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; a torch.Tensor is needed")
    if tensor.dtype not in FLOAT_DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES)
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed are {allowed}: convert it with .to(...)")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} has layout {tensor.layout}; a dense tensor is needed: convert it with .to_dense()")


def check_number(name: str, value: object, *, least: float = -math.inf, most: float = math.inf) -> float:
    """`value` as a float; TypeError unless it is a real number (numpy's too; no bool, string or tensor), ValueError
    unless it is finite, at least `least` and at most `most`."""
    if type(value) is float and least <= value <= most and -math.inf < value < math.inf:  # what it nearly always is
        return value
    # float() alone would take "0.5", True, and a tensor with its gradient.
    if isinstance(value, bool) or not isinstance(value, (int, float, numbers.Real, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} is {_described(value)}; a number is needed")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not least <= number <= most or math.isinf(number):
        bound = "" if least == -math.inf else f" of at least {least:g}"
        bound += "" if most == math.inf else f" and at most {most:g}"
        raise ValueError(f"{name} is {value}; a finite number{bound} is needed")
    return number


def check_bool(name: str, value: object) -> bool:
    """`value` as a bool; TypeError unless it is True or False (numpy's too): "no" and [0] are true in Python."""
    if isinstance(value, bool):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{name} is {_described(value)}; True or False is needed")


def _described(value: object) -> str:
    """The value for an error; of a tensor, and of what is long, the kind only."""
    text = "" if isinstance(value, Tensor) else repr(value)
    return text if 0 < len(text) <= 60 else f"a {type(value).__name__}"


def check_same(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise TypeError / ValueError unless both tensors have the same dtype and device."""
    check_float(name, tensor)
    if tensor.dtype != other.dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}, {other_name} has {other.dtype}; they must be the same")
    if tensor.device != other.device:
        raise ValueError(f"{name} is on {tensor.device}, {other_name} on {other.device}; move them to one device")


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors in the dtype that torch.autocast asks of a matrix product; float64 and None as they are.

    For the ops whose torch counterparts (linear, scaled_dot_product_attention) autocast runs in half precision.
    """
    first = tensors[0] if isinstance(tensors[0], Tensor) else next((x for x in tensors if isinstance(x, Tensor)), None)
    device = "cpu" if first is None else first.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Tensor | None) -> Tensor | None:
        plain = not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64
        return x if plain else x.to(dtype)

    return tuple(cast(x) for x in tensors)
