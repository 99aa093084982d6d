"""RMSNorm, rotary, SwiGLU and AdamW against torch's own, forward + backward, and the cost of a call itself.

    python bench/bench_elementwise.py [--threads 1 2] [--dtypes float32 bfloat16] [--only rms_norm ... call]

GB/s counts each value that must be read or written once; the copy is torch's, of 128 MiB that is already mapped.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from support import compare, measure, tune_allocator
from torch import Tensor

from pyfast import ops

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
CALLS = 500


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy that is larger than any cache."""
    source, target = torch.ones(32 * 2**20), torch.ones(32 * 2**20)
    seconds = measure({"copy": lambda: target.copy_(source)}, rounds=9)["copy"].median
    return 2 * source.nbytes / seconds


def gradients(function, inputs: tuple[Tensor, ...], dy: Tensor):
    """A candidate: one forward and backward, returning the result and the gradients."""
    return lambda: (y := function(*inputs), *torch.autograd.grad(y, inputs, dy))


def rms_norm(dtype: torch.dtype) -> None:
    for rows, width in ((1024, 256), (4096, 1024)):
        x = torch.randn(rows, width, dtype=dtype, requires_grad=True)
        weight = torch.randn(width, dtype=dtype, requires_grad=True)
        dy = torch.randn(rows, width, dtype=dtype)
        candidates = {
            "pyfast": gradients(lambda x, w: ops.rms_norm(x, w, eps=1e-5), (x, weight), dy),
            "F.rms_norm": gradients(lambda x, w: F.rms_norm(x, (x.shape[-1],), w, 1e-5), (x, weight), dy),
        }
        compare(f"rms_norm [{rows}, {width}] {dtype}", candidates, tolerance=TOLERANCE[dtype], rounds=41)


def rotary(dtype: torch.dtype) -> None:
    for tokens, heads, width in ((1024, 6, 64), (2048, 16, 64)):
        qkv = torch.randn(1, tokens, heads + 2, width, dtype=dtype)
        x = qkv[:, :, :heads].detach().requires_grad_()
        dy = torch.randn(1, tokens, heads, width, dtype=dtype)
        angle = torch.arange(tokens)[:, None] * 10000.0 ** (-torch.arange(width // 2) / (width // 2))
        cos, sin = angle.cos(), angle.sin()
        full_cos, full_sin = (torch.cat([t, t], -1)[:, None, :].to(dtype) for t in (cos, sin))

        def rotate_half(x: Tensor, cos: Tensor = full_cos, sin: Tensor = full_sin) -> Tensor:
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat([-second, first], -1) * sin

        candidates = {
            "pyfast": gradients(lambda x, cos=cos, sin=sin: ops.rotary(x, cos, sin), (x,), dy),
            "x cos + rotate_half sin": gradients(rotate_half, (x,), dy),
        }
        compare(f"rotary [{tokens}, {heads}, {width}] {dtype}", candidates, tolerance=TOLERANCE[dtype], rounds=41)


def swiglu(dtype: torch.dtype) -> None:
    for rows, width in ((1024, 768), (2048, 2816)):
        x, dy = torch.randn(rows, 2 * width, dtype=dtype, requires_grad=True), torch.randn(rows, width, dtype=dtype)

        def eager(x: Tensor) -> Tensor:
            gate, up = x.chunk(2, -1)
            return F.silu(gate) * up

        candidates = {"pyfast": gradients(ops.swiglu, (x,), dy), "F.silu(gate) * up": gradients(eager, (x,), dy)}
        compare(f"swiglu [{rows}, 2 x {width}] {dtype}", candidates, tolerance=TOLERANCE[dtype], rounds=41)


def adamw(dtype: torch.dtype, copy: float) -> None:
    for millions in (4, 32):
        size = millions * 2**20
        start, grad = torch.randn(size).to(dtype), torch.randn(size).to(dtype)
        ours = start.clone(), torch.zeros(size), torch.zeros(size)
        master = start.float() if dtype != torch.float32 else None
        parameter = torch.nn.Parameter(start.clone())
        parameter.grad = grad
        optimizer = torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        steps = iter(range(1, 10**9))

        def pyfast(ours=ours, grad=grad, master=master, steps=steps) -> Tensor:
            param, *moments = ours
            ops.adamw_(
                param, grad, *moments, step=next(steps), learning_rate=1e-3, weight_decay=0.1, master=master
            )  # fmt: skip
            return param

        def fused(parameter=parameter, optimizer=optimizer) -> Tensor:
            optimizer.step()
            return parameter

        # torch's moments have the parameter's dtype and there is no master: for bfloat16 it moves fewer bytes.
        candidates = {"pyfast": pyfast, "torch.optim.AdamW(fused)": fused}
        title = f"adamw_ {millions} Mi elements {dtype}" + ("" if master is None else " with float32 master, moments")
        timing = compare(title, candidates, tolerance=TOLERANCE[dtype], rounds=21, seconds=6)["pyfast"]
        values = (ours[0], ours[1], ours[2], *(() if master is None else (master,)))
        read = sum(t.nbytes for t in values) + grad.nbytes - (0 if master is None else ours[0].nbytes)
        speed = (read + sum(t.nbytes for t in values)) / timing.median
        print(f"  {'':24s} pyfast {speed / 1e9:.1f} GB/s, {speed / copy:.0%} of a copy")


def calls() -> None:
    """Microseconds of one call on tensors so small that the arithmetic does not count."""
    x, weight = torch.randn(1, 16), torch.randn(16)
    x_grad, weight_grad = x.clone().requires_grad_(), weight.clone().requires_grad_()
    heads, table = torch.randn(1, 1, 16), torch.ones(1, 8)

    def repeated(function):
        def run() -> Tensor:
            for _ in range(CALLS):
                result = function()
            return result

        return run

    def report(title: str, candidates: dict) -> None:
        timings = compare(f"{CALLS} calls of {title}", {k: repeated(f) for k, f in candidates.items()}, tolerance=1e-5)
        print("  " + ", ".join(f"{name} {t.median / CALLS * 1e6:.1f} us a call" for name, t in timings.items()))

    for title, a, b in (("rms_norm", x, weight), ("rms_norm, recording", x_grad, weight_grad)):
        report(
            title,
            {
                "pyfast": lambda a=a, b=b: ops.rms_norm(a, b, eps=1e-5),
                "torch": lambda a=a, b=b: F.rms_norm(a, (16,), b, 1e-5),
            },
        )
    upstream = torch.ones(1, 16)
    report(
        "rms_norm, forward and backward",
        {
            "pyfast": lambda: torch.autograd.grad(ops.rms_norm(x_grad, weight_grad, eps=1e-5), x_grad, upstream)[0],
            "torch": lambda: torch.autograd.grad(F.rms_norm(x_grad, (16,), weight_grad, 1e-5), x_grad, upstream)[0],
        },
    )
    report("swiglu", {"pyfast": lambda: ops.swiglu(x), "torch": lambda: F.silu(x[:, :8]) * x[:, 8:]})
    report("rotary", {"pyfast": lambda: ops.rotary(heads, table, table)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    suites = ["rms_norm", "rotary", "swiglu", "adamw", "call"]
    parser.add_argument("--only", nargs="+", default=suites, choices=suites)
    arguments = parser.parse_args()
    tune_allocator()
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        copy = copy_bandwidth()
        print(f"== {threads} thread(s); a copy moves {copy / 1e9:.1f} GB/s")
        for dtype in (getattr(torch, name) for name in arguments.dtypes):
            for suite in (rms_norm, rotary, swiglu):
                if suite.__name__ in arguments.only:
                    suite(dtype)
            if "adamw" in arguments.only:
                adamw(dtype, copy)
    if "call" in arguments.only:
        torch.set_num_threads(1)
        calls()


if __name__ == "__main__":
    main()
