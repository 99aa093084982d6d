"""The packed GEMM against torch.mm and the machine's FMA peak, one thread.

    python bench/bench_gemm.py [--dtypes float32 bfloat16] [--sizes 512 1024 2048]
"""

from __future__ import annotations

import argparse

import torch
from support import compare, fma_peak, tune_allocator

from pyfast import _C
from pyfast.kernels import cpu

# Smallest model of bench/train_step.py: 1024 rows; attention projections, ffn, head (output, input features).
MODEL = {"qkv": (512, 256), "output": (256, 256), "gate_up": (1536, 256), "down": (256, 768), "head": (1024, 256)}
ROWS = 1024
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float64: 1e-12}


def product(title: str, a: torch.Tensor, b: torch.Tensor, peak: float) -> None:
    """Time a @ b both ways into a given result."""
    ours = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype)
    theirs = torch.empty_like(ours)
    compare(
        f"{title}: [{a.shape[0]}, {a.shape[1]}] x [{b.shape[0]}, {b.shape[1]}] {str(a.dtype).removeprefix('torch.')}",
        {"pyfast": lambda: cpu.gemm(a, b, ours), "torch.mm": lambda: torch.mm(a, b, out=theirs)},
        tolerance=TOLERANCE[a.dtype], flop=2 * a.shape[0] * a.shape[1] * b.shape[1], peak=peak, rounds=31, seconds=2,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[512, 1024, 2048])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tune_allocator()
    peak = fma_peak()
    print(f"float32 FMA peak of one thread ({_C.isa()}): {peak / 1e9:.1f} GFLOP/s")
    for name in arguments.dtypes:
        dtype = getattr(torch, name)
        for size in arguments.sizes:
            product("cube", torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype), peak)
        for layer, (n, k) in MODEL.items():
            x, w, dy = (torch.randn(shape, dtype=dtype) for shape in ((ROWS, k), (n, k), (ROWS, n)))
            product(f"{layer} forward", x, w.t(), peak)
            product(f"{layer} dgrad", dy, w, peak)
            product(f"{layer} wgrad", dy.t(), x, peak)


if __name__ == "__main__":
    main()
