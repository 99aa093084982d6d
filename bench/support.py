"""What every benchmark needs, free of pytest: equal allocator settings, the limits of the machine, equal results.

A candidate is a function without arguments that returns what it computed, a tensor or a sequence of them.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Candidate = Callable[[], "Tensor | Sequence[Tensor]"]


class Disagreement(Exception):
    """Two candidates computed different things: their times must not be compared."""


def tune_allocator() -> None:
    """Keep freed memory in the process (glibc), so that no candidate pays page faults for each fresh result."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return
    m_trim_threshold, m_mmap_threshold, limit = -1, -3, 2**30
    mallopt(m_mmap_threshold, limit)
    mallopt(m_trim_threshold, limit)


def fma_peak(seconds: float = 0.3) -> float:
    """FLOP/s of one thread of this machine doing nothing but float32 fused multiply-adds on registers."""
    from pyfast import _C
    from pyfast.kernels import cpu

    assert cpu.DTYPE_CODES  # importing it loads the kernels
    return _C.fma_peak(seconds)


def copy_of(total_bytes: float) -> Callable[[], Tensor]:
    """A copy that reads and writes `total_bytes` in all: the limit of an op that must move as many."""
    source = torch.ones(max(1, round(total_bytes / 8)))
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def sweep_of(total_bytes: float) -> Callable[[], Tensor]:
    """The same in place, for an op that updates its arguments: memory is read before it is written in any case, which a
    copy's target is not, and half as much of it is touched."""
    values = torch.ones(max(1, round(total_bytes / 8)))
    return values.neg_


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" """
    return str(dtype).removeprefix("torch.")


def check_agreement(candidates: dict[str, Candidate], tolerance: float) -> float:
    """The largest relative difference (in norm) between any candidate's results and the first's.

    Raises:
        Disagreement: it exceeds `tolerance`, is not a number, or the results do not have the same number and shapes.
    """
    names = list(candidates)
    expected = _tensors(candidates[names[0]]())
    largest = 0.0
    for name in names[1:]:
        actual = _tensors(candidates[name]())
        if len(actual) != len(expected):
            raise Disagreement(f"{names[0]} returns {len(expected)} results, {name} returns {len(actual)}")
        for index, (a, b) in enumerate(zip(expected, actual, strict=True)):
            what = f"result {index} of {names[0]} and {name}"
            if a.shape != b.shape:
                raise Disagreement(f"{what} have shapes {tuple(a.shape)} and {tuple(b.shape)}; no ratio is printed")
            error = _relative_difference(a, b)
            if not error <= tolerance:
                raise Disagreement(
                    f"{what} disagree: relative difference {error:.2e}, allowed {tolerance:.0e}; no ratio is printed"
                )
            largest = max(largest, error)
    return largest


def _relative_difference(a: Tensor, b: Tensor) -> float:
    difference, size = (a - b).norm().item(), b.norm().item()
    if difference == 0.0:
        return 0.0
    return difference / size if size else math.inf


def _tensors(result: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().double().clone() for t in ([result] if isinstance(result, Tensor) else result)]
