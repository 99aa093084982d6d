"""Attention against torch's F.scaled_dot_product_attention, one thread, interleaved.

    python bench/bench_attention.py [--dtypes float32 bfloat16] [--sizes 1024 2048 4096] [--heads 64 128]
                                    [--passes forward both] [--masks causal full] [--seconds 3] [--no-training]

FLOPs counted: 2 products forward, 5 backward, half of them when causal. The training shape is that of
bench/train_step.py: 1024 tokens in 4 packed documents, 4 query and 2 kv heads of 64.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from support import compare, fma_peak, tune_allocator

from pyfast import _C, ops

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float64: 1e-12}


def run(function, inputs, gradient: torch.Tensor | None):
    """The call's result, or with `gradient` the gradients of its inputs."""
    if gradient is None:
        with torch.no_grad():
            return function()
    for x in inputs:
        x.grad = None
    function().backward(gradient)
    return [x.grad for x in inputs]


def torch_attention(q, k, v, causal: bool) -> torch.Tensor:
    """torch's op on [B, S, N, D]."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, enable_gqa=q.shape[2] != k.shape[2]
    )  # fmt: skip
    return out.transpose(1, 2)


def square(dtype, size: int, head: int, causal: bool, backward: bool, peak: float, seconds: float) -> float:
    """B1 N8 S `size` D `head`; returns torch's time over ours."""
    inputs = [torch.randn(1, size, 8, head, dtype=dtype, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(1, size, 8, head, dtype=dtype) if backward else None
    flop = (7 if backward else 2) * 2 * 8 * size * size * head / (2 if causal else 1)
    name = f"{str(dtype).removeprefix('torch.')} {'causal' if causal else 'full'} S{size} D{head}"
    timings = compare(
        f"{name} {'forward + backward' if backward else 'forward'}",
        {
            "pyfast": lambda: run(lambda: ops.attention(*inputs, causal=causal), inputs, gradient),
            "torch": lambda: run(lambda: torch_attention(*inputs, causal), inputs, gradient),
        },
        tolerance=TOLERANCE[dtype], flop=flop, peak=peak, seconds=seconds,
    )  # fmt: skip
    return timings["torch"].median / timings["pyfast"].median


def training_shape(dtype, backward: bool, peak: float, seconds: float) -> None:
    """4 documents of 256 tokens: packed for us, a batch of 4 for torch."""
    q, k, v = (torch.randn(1024, heads, 64, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    gradient = torch.randn(1024, 4, 64, dtype=dtype) if backward else None
    documents = torch.arange(0, 1025, 256, dtype=torch.int32)

    def theirs():
        return torch_attention(*(x.view(4, 256, *x.shape[1:]) for x in (q, k, v)), True).reshape(1024, 4, 64)

    compare(
        f"{str(dtype).removeprefix('torch.')} training shape {'forward + backward' if backward else 'forward'}",
        {
            "pyfast": lambda: run(
                lambda: ops.attention(q, k, v, causal=True, cu_seqlens_q=documents), (q, k, v), gradient
            ),
            "torch": lambda: run(theirs, (q, k, v), gradient),
        },
        tolerance=TOLERANCE[dtype], flop=(7 if backward else 2) * 4 * 4 * 256 * 256 * 64, peak=peak, rounds=101,
        seconds=seconds,
    )  # fmt: skip


def call_overhead(seconds: float) -> None:
    """The smallest call: what Python and dispatch cost."""
    q = torch.randn(1, 1, 1, 16, requires_grad=True)
    documents = torch.tensor([0, 1], dtype=torch.int32)
    many = range(100)
    compare(
        "100 calls on one token, forward",
        {
            "pyfast": lambda: [ops.attention(q, q, q, causal=True) for _ in many],
            "pyfast packed": lambda: [ops.attention(q[0], q[0], q[0], cu_seqlens_q=documents)[None] for _ in many],
            "torch": lambda: [F.scaled_dot_product_attention(q, q, q, is_causal=True) for _ in many],
        },
        tolerance=1e-6, rounds=51, seconds=seconds,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[1024, 2048, 4096])
    parser.add_argument("--heads", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--masks", nargs="+", default=["causal", "full"])
    parser.add_argument("--passes", nargs="+", default=["forward", "both"])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--no-training", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tune_allocator()
    peak = fma_peak()
    print(f"float32 FMA peak of one thread ({_C.isa()}): {peak / 1e9:.1f} GFLOP/s")
    for dtype in (getattr(torch, name) for name in arguments.dtypes):
        if not arguments.no_training:
            for backward in (False, True):
                training_shape(dtype, backward, peak, arguments.seconds)
        for backward in (name == "both" for name in arguments.passes):
            for mask in arguments.masks:
                ratios = [
                    square(dtype, size, head, mask == "causal", backward, peak, arguments.seconds)
                    for size in arguments.sizes for head in arguments.heads
                ]  # fmt: skip
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                what = "forward + backward" if backward else "forward"
                print(f"== {dtype} {mask} {what}: geometric mean {mean:.2f}x torch, least {min(ratios):.2f}x\n", flush=True)
    if not arguments.no_training:
        call_overhead(arguments.seconds)


if __name__ == "__main__":
    main()
