"""The packed GEMM against torch.mm, both into a given result: cubes, then the products of a small model's layers.

The model is that of bench/train_step.py: forward, and the gradients by input (dgrad) and weight (wgrad).
"""

from __future__ import annotations

import pytest
import torch
from support import dtype_name
from torch import Tensor

from pyfast.kernels import cpu

ROWS = 1024
# output and input features
LAYERS = {"qkv": (512, 256), "output": (256, 256), "gate_up": (1536, 256), "down": (256, 768), "head": (1024, 256)}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-12}
pytestmark = pytest.mark.benchmark(group="gemm against torch.mm")


def product(race, a: Tensor, b: Tensor) -> None:
    ours, theirs = (torch.empty(a.shape[0], b.shape[1], dtype=a.dtype) for _ in range(2))
    race(
        {"pyfast": lambda: cpu.gemm(a, b, ours), "torch": lambda: torch.mm(a, b, out=theirs)},
        tolerance=TOLERANCE[a.dtype], flop=2 * a.shape[0] * a.shape[1] * b.shape[1],
    )  # fmt: skip


def cubes():
    for dtype in TOLERANCE:
        for size in (512, 1024, 2048):
            marks = () if dtype == torch.float32 else pytest.mark.full
            yield pytest.param(dtype, size, id=f"{size}-{dtype_name(dtype)}", marks=marks)


@pytest.mark.parametrize(("dtype", "size"), list(cubes()))
def bench_cube(race, dtype: torch.dtype, size: int) -> None:
    a, b = torch.randn(2, size, size).to(dtype)
    product(race, a, b)


def layer_products():
    for layer in LAYERS:
        for which in ("forward", "dgrad", "wgrad"):
            marks = () if layer == "gate_up" else pytest.mark.full
            yield pytest.param(layer, which, id=f"{layer}-{which}", marks=marks)


@pytest.mark.parametrize(("layer", "which"), list(layer_products()))
def bench_layer(race, layer: str, which: str) -> None:
    n, k = LAYERS[layer]
    x, w, dy = torch.randn(ROWS, k), torch.randn(n, k), torch.randn(ROWS, n)
    product(race, *{"forward": (x, w.t()), "dgrad": (dy, w), "wgrad": (dy.t(), x)}[which])
