"""What `pyfast.ops` call: C++ on CPU (cpu.py), Triton on NVIDIA GPUs (cuda.py), plain torch elsewhere (plain.py).

The oracle of all of them is reference.py.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch


@functools.cache  # the import statement alone costs more than a small kernel
def for_device(device: torch.device) -> ModuleType:
    """The module whose functions compute on `device`."""
    if device.type == "cpu":
        from pyfast.kernels import cpu

        return cpu
    if device.type == "cuda" and torch.version.hip is None:
        from pyfast.kernels import cuda

        return cuda
    from pyfast.kernels import plain

    return plain
