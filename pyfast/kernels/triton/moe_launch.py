"""How the MoE kernels are launched: tile sizes, number of persistent programs, tensor descriptors where they fit."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pyfast.kernels.triton.gemm_config import GemmConfig, gemm_config


@dataclass(frozen=True)
class Launch:
    """One way to run a kernel.

    device: where. config: tile sizes. programs: how many persistent programs share the tiles. descriptors: whether
    operands may be read through tensor descriptors (TMA).
    """

    device: torch.device
    config: GemmConfig
    programs: int
    descriptors: bool

    def run(self, kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
        """Launch `programs` programs of `kernel` on the current stream of the device."""
        _start(kernel, self.device, (programs,), self.config.warps, self.config.stages, args, constants)


def run_simple(kernel: Any, grid: int | tuple[int, ...], warps: int, *args: Any, **constants: Any) -> None:
    """Launch a kernel that has no tile sizes to choose on the current stream of its first argument's device."""
    _start(kernel, args[0].device, (grid,) if isinstance(grid, int) else grid, warps, 2, args, constants)


def _start(
    kernel: Any, device: torch.device, grid: tuple[int, ...], warps: int, stages: int, args: tuple, constants: dict
) -> None:
    # enable_fp_fusion is named because Triton's default for it is about to change.
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](*args, **constants, **options)


@functools.cache
def processors(device: torch.device) -> tuple[int, tuple[int, int]]:
    """(number of multiprocessors, compute capability)."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, (properties.major, properties.minor)


def launch_for(kernel: str, rows: int, experts: int, *operands: Tensor) -> Launch:
    """The launch of `kernel` for `rows` sorted rows: as many programs as fit at once, descriptors from Hopper on."""
    x = operands[0]
    multiprocessors, capability = processors(x.device)
    config = gemm_config(kernel, x.dtype, rows, experts, capability, all(map(_aligned, operands)))
    return Launch(x.device, config, multiprocessors * config.resident, capability[0] >= 9)


def _aligned(x: Tensor) -> bool:
    """Whether Triton can copy x in pieces of 16 bytes: it knows multiples of 16 elements, and only those."""
    return (
        x.stride(-1) == 1
        and x.shape[-1] % 16 == 0
        and all(stride % 16 == 0 for stride in x.stride()[:-1])
        and x.data_ptr() % 16 == 0
    )


def descriptor(x: Tensor, block: list[int], launch: Launch) -> TensorDescriptor | None:
    """A descriptor that reads `block`-sized pieces of x, or None where the hardware's rules forbid one.

    They are: 16-byte aligned base and strides, inner dimension contiguous, nothing empty, 32-bit sizes.
    """
    item = x.element_size()
    if not launch.descriptors or x.numel() == 0 or x.stride(-1) != 1 or x.data_ptr() % 16:
        return None
    if any(stride * item % 16 or not 0 < stride * item < 2**40 for stride in x.stride()[:-1]):
        return None
    if any(size >= 2**31 for size in x.shape):
        return None
    return TensorDescriptor(base=x, shape=list(x.shape), strides=list(x.stride()), block_shape=block)
