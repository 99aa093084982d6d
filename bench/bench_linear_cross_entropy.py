"""ops.linear_cross_entropy against F.cross_entropy after F.linear, forward + backward: time and peak memory.

Peak memory is what the process grew by beyond the arguments, each candidate in a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from memory import peak_growth
from support import dtype_name
from torch import Tensor

from pyfast import ops

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
SIZES = ((1024, 256, 1024), (1024, 512, 8192), (2048, 512, 16384))
TINY = (8, 16, 16)
pytestmark = pytest.mark.benchmark(group="linear_cross_entropy, forward + backward, against F.cross_entropy(F.linear)")


def dense(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w).float(), target, reduction="sum")


LOSSES = {"pyfast": ops.linear_cross_entropy, "torch": dense}


def make_step(name: str, dtype: torch.dtype, tokens: int, width: int, vocab: int) -> Callable[[], list[Tensor]]:
    """(loss, dh, dw) of one of LOSSES; the upstream gradient is 1 / tokens, as in training."""
    torch.manual_seed(0)
    h = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    w = torch.randn(vocab, width, dtype=dtype).mul_(width**-0.5).requires_grad_()
    target = torch.randint(0, vocab, (tokens,))

    def step() -> list[Tensor]:
        value = LOSSES[name](h, w, target)
        return [value, *torch.autograd.grad(value, (h, w), torch.tensor(1 / tokens))]

    return step


def peak_memory(dtype: torch.dtype, size: tuple[int, int, int]) -> dict[str, str]:
    """A column for the table."""
    if not sys.platform.startswith("linux"):
        return {}
    grown = {name: peak_growth(make_step, (name, dtype, *TINY), (name, dtype, *size)) for name in LOSSES}
    return {"MiB: " + ", ".join(grown): " / ".join(f"{value / 2**20:.0f}" for value in grown.values())}


def cases():
    for dtype in TOLERANCE:
        for size in SIZES:
            name = f"T{size[0]}-H{size[1]}-V{size[2]}-{dtype_name(dtype)}"
            quick = size == SIZES[0] or (size == SIZES[1] and dtype == torch.float32)
            yield pytest.param(dtype, size, id=name, marks=() if quick else pytest.mark.full)


@pytest.mark.parametrize(("dtype", "size"), list(cases()))
def bench_linear_cross_entropy(race, dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    tokens, width, vocab = size
    race(
        {name: make_step(name, dtype, *size) for name in LOSSES},
        tolerance=TOLERANCE[dtype], flop=6 * tokens * width * vocab, notes=lambda: peak_memory(dtype, size),
    )  # fmt: skip
