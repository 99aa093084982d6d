"""Runs the Triton MoE kernels' own launch code where there is no GPU: as if on a small or an absent one."""

from __future__ import annotations

from types import ModuleType

import pytest

from pyfast import kernels
from pyfast.kernels.triton import moe_launch as launch
from pyfast.kernels.triton.gemm_config import GemmConfig

# The smallest tiles of a tensor-core product: the most tiles and borders for the fewest rows.
SMALL = GemmConfig(16, 16, 16, 4, 2)
WIDE = GemmConfig(16, 32, 16, 4, 2)


def pretend(monkeypatch: pytest.MonkeyPatch, *, processors: int, capability: tuple[int, int]) -> None:
    """CPU tensors are launched as if on a GPU with so many multiprocessors and this compute capability."""
    monkeypatch.setattr(launch, "processors", lambda device: (processors, capability))


def pretend_small(
    monkeypatch: pytest.MonkeyPatch, *, config: GemmConfig = SMALL, processors: int = 3, descriptors: bool = True
) -> None:
    """The same with tiles of `config` in every kernel. descriptors: whether the GPU has them (Hopper)."""
    pretend(monkeypatch, processors=processors, capability=(9, 0) if descriptors else (8, 0))
    monkeypatch.setattr(launch, "gemm_config", lambda *args: config)


def use_for_cpu(monkeypatch: pytest.MonkeyPatch, backend: ModuleType) -> None:
    """`pyfast.ops` compute CPU tensors with the kernels of `backend`."""
    monkeypatch.setattr(kernels, "for_device", lambda device: backend)
