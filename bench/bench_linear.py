"""ops.linear against F.linear, forward + backward, as training calls them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support import dtype_name

from pyfast import ops

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# rows, input and output features: a layer of bench/train_step.py's model, a wide one, a few rows as in generation
SHAPES = ((1024, 256, 1536), (1024, 2048, 2048), (16, 1024, 1024))
pytestmark = pytest.mark.benchmark(group="linear, forward + backward, against F.linear")


def cases():
    for dtype in TOLERANCE:
        for shape in SHAPES:
            quick = dtype == torch.float32 and shape[1] < 2048
            name = f"{shape[0]}x{shape[1]}-to-{shape[2]}-{dtype_name(dtype)}"
            yield pytest.param(dtype, shape, id=name, marks=() if quick else pytest.mark.full)


@pytest.mark.parametrize(("dtype", "shape"), list(cases()))
def bench_linear(race, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    rows, features_in, features_out = shape
    x = torch.randn(rows, features_in, dtype=dtype, requires_grad=True)
    w = torch.randn(features_out, features_in, dtype=dtype, requires_grad=True)
    dy = torch.randn(rows, features_out, dtype=dtype)

    def step(linear):
        return lambda: (y := linear(x, w), *torch.autograd.grad(y, (x, w), dy))

    race(
        {"pyfast": step(ops.linear), "torch": step(F.linear)},
        tolerance=TOLERANCE[dtype], flop=6 * rows * features_in * features_out,
    )  # fmt: skip
