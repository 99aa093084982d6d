"""ops.attention against F.scaled_dot_product_attention.

FLOPs counted: 2 products forward, 5 backward, half of them when causal. The training shape is that of
bench/train_step.py: 1024 tokens in 4 packed documents, 4 query and 2 kv heads of 64.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from support import dtype_name
from torch import Tensor

from pyfast import ops

HEADS = 8
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
CALLS = 100
pytestmark = pytest.mark.benchmark(group="attention against F.scaled_dot_product_attention")


def run(function, inputs: list[Tensor], dout: Tensor | None):
    """The call's result, or with the result's gradient `dout` the gradients of its inputs."""
    if dout is None:
        with torch.no_grad():
            return function(*inputs)
    return torch.autograd.grad(function(*inputs), inputs, dout)


def torch_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """torch's op on [B, S, N, D]."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, enable_gqa=q.shape[2] != k.shape[2]
    )  # fmt: skip
    return out.transpose(1, 2)


def square_cases():
    for dtype, size, head, causal, backward in itertools.product(
        TOLERANCE, (256, 512, 1024, 2048, 4096), (64, 128), (True, False), (False, True)
    ):
        # Quick: S 1024 at every dtype, head size and pass, causal; and one full mask.
        quick = size == 1024 and (causal or (dtype == torch.float32 and head == 64 and not backward))
        mask, which = "causal" if causal else "full", "fwd+bwd" if backward else "fwd"
        name = f"{dtype_name(dtype)}-{mask}-S{size}-D{head}-{which}"
        marks = () if quick else pytest.mark.full
        yield pytest.param(dtype, size, head, causal, backward, id=name, marks=marks)


@pytest.mark.parametrize(("dtype", "size", "head", "causal", "backward"), list(square_cases()))
def bench_square(race, dtype: torch.dtype, size: int, head: int, causal: bool, backward: bool) -> None:
    inputs = [torch.randn(1, size, HEADS, head, dtype=dtype, requires_grad=True) for _ in range(3)]
    dout = torch.randn(1, size, HEADS, head, dtype=dtype) if backward else None
    race(
        {
            "pyfast": lambda: run(lambda *qkv: ops.attention(*qkv, causal=causal), inputs, dout),
            "torch": lambda: run(lambda *qkv: torch_attention(*qkv, causal), inputs, dout),
        },
        tolerance=TOLERANCE[dtype],
        flop=(7 if backward else 2) * 2 * HEADS * size * size * head / (2 if causal else 1),
    )


@pytest.mark.parametrize("backward", [False, True], ids=["fwd", "fwd+bwd"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=dtype_name)
def bench_training_shape(race, dtype: torch.dtype, backward: bool) -> None:
    """4 documents of 256 tokens: packed for us, a batch of 4 for torch."""
    inputs = [torch.randn(1024, heads, 64, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]
    dout = torch.randn(1024, 4, 64, dtype=dtype) if backward else None
    documents = torch.arange(0, 1025, 256, dtype=torch.int32)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.attention(q, k, v, causal=True, cu_seqlens_q=documents)

    def theirs(*qkv: Tensor) -> Tensor:
        return torch_attention(*(x.view(4, 256, *x.shape[1:]) for x in qkv), True).reshape(1024, 4, 64)

    race(
        {"pyfast": lambda: run(ours, inputs, dout), "torch": lambda: run(theirs, inputs, dout)},
        tolerance=TOLERANCE[dtype], flop=(7 if backward else 2) * 4 * 4 * 256 * 256 * 64,
    )  # fmt: skip


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def bench_100_calls_on_one_token(race, packed: bool) -> None:
    """What Python and dispatch cost."""
    q = torch.randn(1, 1, 1, 16, requires_grad=True)
    documents = torch.tensor([0, 1], dtype=torch.int32)

    def ours() -> Tensor:
        if packed:
            return ops.attention(q[0], q[0], q[0], causal=True, cu_seqlens_q=documents)[None]
        return ops.attention(q, q, q, causal=True)

    def repeated(function):
        return lambda: [function() for _ in range(CALLS)]

    theirs = repeated(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    race({"pyfast": repeated(ours), "torch": theirs}, tolerance=1e-6)
