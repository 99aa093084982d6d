"""ops.linear_cross_entropy against F.cross_entropy after F.linear: forward + backward, time and peak memory.

    python bench/bench_linear_cross_entropy.py [--threads 1] [--dtypes float32] [--sizes T,H,V ...] [--clock cpu]

Peak memory is what the process grew by beyond its arguments, each candidate in a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
from pathlib import Path

import torch
import torch.nn.functional as F
from support import compare, tune_allocator
from torch import Tensor

from pyfast import ops

SIZES = ("1024,256,1024", "2048,512,16384")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def fused(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return ops.linear_cross_entropy(h, w, target)


def dense(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w).float(), target, reduction="sum")


LOSSES = {"pyfast": fused, "torch": dense}


def arguments(size: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    tokens, width, vocab = size
    torch.manual_seed(0)
    h = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    w = torch.randn(vocab, width, dtype=dtype).mul_(width**-0.5).requires_grad_()
    return h, w, torch.randint(0, vocab, (tokens,))


def step(loss, h: Tensor, w: Tensor, target: Tensor) -> list[Tensor]:
    """(loss, dh, dw); the upstream gradient is 1 / tokens, as in training."""
    value = loss(h, w, target)
    return [value, *torch.autograd.grad(value, (h, w), torch.tensor(1 / target.numel()))]


def grown_bytes(name: str, size: tuple[int, int, int], dtype: torch.dtype, threads: int) -> int:
    """How far the resident size rises above the arguments during one step."""
    torch.set_num_threads(threads)
    tiny = arguments((8, 16, 16), dtype)
    step(LOSSES[name], *tiny)  # what is loaded and allocated on a first call does not count
    given = arguments(size, dtype)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = peak_resident_bytes()
    step(LOSSES[name], *given)
    return peak_resident_bytes() - before


def peak_resident_bytes() -> int:
    """The largest resident size so far (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tune_allocator()
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name in options.dtypes:
            dtype = getattr(torch, name)
            for size in (tuple(map(int, text.split(","))) for text in options.sizes):
                given = arguments(size, dtype)
                tokens, width, vocab = size
                compare(
                    f"T={tokens} H={width} V={vocab} {name}, forward + backward, {options.threads} thread(s)",
                    {key: functools.partial(step, loss, *given) for key, loss in LOSSES.items()},
                    tolerance=TOLERANCE[dtype], flop=6 * tokens * width * vocab, rounds=15, seconds=20,
                    clock=options.clock,
                )  # fmt: skip
                for key in LOSSES:
                    grown = pool.apply(grown_bytes, (key, size, dtype, options.threads))
                    print(f"  {key:24s} peak memory above the arguments {grown / 2**20:7.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
