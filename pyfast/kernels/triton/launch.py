"""Which GPU kernels are launched on, and whether TMA can read a tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETED_AS = 90  # what the interpreter, which has no architecture, stands in for


def architecture() -> int:
    """Compute capability of the current GPU, e.g. 90."""
    if triton.knobs.runtime.interpret:
        return INTERPRETED_AS
    return triton.runtime.driver.active.get_current_target().arch


def on_its_device(function: Callable) -> Callable:
    """`function(tensor, ...)` with that tensor's GPU current: Triton launches on the current one."""

    @functools.wraps(function)
    def guarded(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        if first.device.type != "cuda" or first.device.index == torch.cuda.current_device():
            return function(first, *args, **kwargs)
        with torch.cuda.device(first.device):
            return function(first, *args, **kwargs)

    return guarded


def describable(*tensors: Tensor) -> bool:
    """Whether TMA can read them [T, N, D]: contiguous last dimension, all else aligned to 16 bytes, not empty.

    Each stride must be a multiple of the next.
    """
    return all(
        x.numel() > 0
        and x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and x.stride(0) % max(x.stride(1), 1) == 0
        and all(0 < s * x.element_size() < 1 << 40 and s * x.element_size() % 16 == 0 for s in x.stride()[:-1])
        for x in tensors
    )


def describe(x: Tensor, block: list[int]) -> TensorDescriptor:
    """A descriptor of x for blocks of this shape; what lies beyond x is read as 0."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)
