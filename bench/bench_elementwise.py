"""RMSNorm, rotary and SwiGLU against torch's own, forward + backward, and the cost of a call itself.

Bytes counted: what must be read or written once. Forward reads x and writes y, backward reads dy (and x) and writes dx.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support import dtype_name
from torch import Tensor

from pyfast import ops

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
CALLS = 500
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=dtype_name)


def shapes(*values: tuple[int, ...]):
    """A parameter `shape`."""
    return pytest.mark.parametrize("shape", values, ids=lambda shape: "x".join(map(str, shape)))


def step(function, inputs: tuple[Tensor, ...], dy: Tensor):
    """A candidate: one forward and backward, returning the result and the gradients."""
    return lambda: (y := function(*inputs), *torch.autograd.grad(y, inputs, dy))


@pytest.mark.benchmark(group="rms_norm, forward + backward, against F.rms_norm")
@shapes((1024, 256), (4096, 1024))
@dtypes
def bench_rms_norm(race, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    weight = torch.randn(shape[1], dtype=dtype, requires_grad=True)
    dy = torch.randn(shape, dtype=dtype)
    race(
        {
            "pyfast": step(lambda x, w: ops.rms_norm(x, w, eps=1e-5), (x, weight), dy),
            "torch": step(lambda x, w: F.rms_norm(x, (x.shape[-1],), w, 1e-5), (x, weight), dy),
        },
        tolerance=TOLERANCE[dtype], moved_bytes=5 * x.nbytes,
    )  # fmt: skip


@pytest.mark.benchmark(group="rotary, forward + backward, against x cos + rotate_half(x) sin")
@shapes((1024, 6, 64), (2048, 16, 64))
@dtypes
def bench_rotary(race, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Tokens x heads x head size; x is a slice of a fused qkv."""
    tokens, heads, width = shape
    qkv = torch.randn(1, tokens, heads + 2, width, dtype=dtype)
    x = qkv[:, :, :heads].detach().requires_grad_()
    dy = torch.randn(1, tokens, heads, width, dtype=dtype)
    angle = torch.arange(tokens)[:, None] * 10000.0 ** (-torch.arange(width // 2) / (width // 2))
    cos, sin = angle.cos(), angle.sin()
    full_cos, full_sin = (torch.cat([t, t], -1)[:, None, :].to(dtype) for t in (cos, sin))

    def rotate_half(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * full_cos + torch.cat([-second, first], -1) * full_sin

    race(
        {"pyfast": step(lambda x: ops.rotary(x, cos, sin), (x,), dy), "torch": step(rotate_half, (x,), dy)},
        tolerance=TOLERANCE[dtype], moved_bytes=4 * dy.nbytes,
    )  # fmt: skip


@pytest.mark.benchmark(group="swiglu, forward + backward, against F.silu(gate) * up")
@shapes((1024, 768), (2048, 2816))
@dtypes
def bench_swiglu(race, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Tokens x ffn width."""
    x = torch.randn(shape[0], 2 * shape[1], dtype=dtype, requires_grad=True)
    dy = torch.randn(shape, dtype=dtype)

    def eager(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    race(
        {"pyfast": step(ops.swiglu, (x,), dy), "torch": step(eager, (x,), dy)},
        tolerance=TOLERANCE[dtype], moved_bytes=8 * dy.nbytes,
    )  # fmt: skip


def call_candidates(title: str):
    """Ours and theirs on tensors so small that the arithmetic does not count."""
    recorded = "recording" in title
    x, weight = torch.randn(1, 16, requires_grad=recorded), torch.randn(16, requires_grad=recorded)
    upstream = torch.ones(1, 16)
    if title == "swiglu":
        return lambda: ops.swiglu(x), lambda: F.silu(x[:, :8]) * x[:, 8:]

    def ours() -> Tensor:
        return ops.rms_norm(x, weight, eps=1e-5)

    def theirs() -> Tensor:
        return F.rms_norm(x, (16,), weight, 1e-5)

    if "backward" not in title:
        return ours, theirs
    return tuple(lambda f=f: torch.autograd.grad(f(), x, upstream)[0] for f in (ours, theirs))


@pytest.mark.benchmark(group=f"{CALLS} calls on 16 numbers")
@pytest.mark.parametrize("title", ["rms_norm", "rms_norm-recording", "rms_norm-recording-backward", "swiglu"])
def bench_calls(race, title: str) -> None:
    def repeated(function):
        def run() -> Tensor:
            for _ in range(CALLS):
                result = function()
            return result

        return run

    ours, theirs = map(repeated, call_candidates(title))
    race({"pyfast": ours, "torch": theirs}, tolerance=1e-5)
