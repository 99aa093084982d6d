"""Keeps torch.autocast out of kernels that are written in plain torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def full_precision(function: Callable) -> Callable:
    """`function(tensor, ...)` with autocast off: it would run the products inside in half precision, sums and all."""

    @functools.wraps(function)
    def kernel(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        device = first.device.type
        if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
            return function(first, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(first, *args, **kwargs)

    return kernel
