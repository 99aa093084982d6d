"""Timing that can be trusted on a shared machine: candidates in turn, medians, ratios, and no ratio for wrong results.

    tune_allocator()
    compare("mm 512", {"pyfast": ours, "torch": theirs}, flop=2 * 512**3, tolerance=1e-5)

Every candidate is a function without arguments that returns what it computed (a tensor or a sequence of them); the
first is ours. All candidates run in one process, under the same allocator settings and number of threads.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Candidate = Callable[[], "Tensor | Sequence[Tensor]"]


class Disagreement(Exception):
    """Two candidates computed different things: their times must not be compared."""


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median and the best of all rounds."""

    median: float
    best: float


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


def measure(candidates: dict[str, Candidate], *, rounds: int = 11, seconds: float = 3.0) -> dict[str, Timing]:
    """Time the candidates in turn, round after round, for at least 3 rounds and then until `seconds` are spent."""
    for function in candidates.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    gc.collect()
    gc.disable()
    try:
        end = time.perf_counter() + seconds
        for count in range(rounds):
            if count >= 3 and time.perf_counter() > end:
                break
            for name, function in candidates.items():
                start = time.perf_counter()
                function()
                times[name].append(time.perf_counter() - start)
    finally:
        gc.enable()
    return {name: Timing(statistics.median(values), min(values)) for name, values in times.items()}


def check_agreement(candidates: dict[str, Candidate], tolerance: float) -> None:
    """Raise Disagreement unless every candidate's results are the first's within `tolerance` (relative, in norm)."""
    names = list(candidates)
    expected = _tensors(candidates[names[0]]())
    for name in names[1:]:
        actual = _tensors(candidates[name]())
        if len(actual) != len(expected):
            raise Disagreement(f"{names[0]} returns {len(expected)} results, {name} returns {len(actual)}")
        for index, (a, b) in enumerate(zip(expected, actual, strict=True)):
            error = ((a - b).norm() / b.norm().clamp_min(1e-300)).item() if b.numel() else 0.0
            if a.shape != b.shape or not error <= tolerance:
                raise Disagreement(
                    f"result {index} of {names[0]} and {name} disagree: relative difference {error:.2e}, allowed "
                    f"{tolerance:.0e}; no ratio is printed"
                )


def _tensors(result: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().double().clone() for t in ([result] if isinstance(result, Tensor) else result)]


def compare(
    title: str,
    candidates: dict[str, Candidate],
    *,
    tolerance: float,
    flop: float | None = None,
    peak: float | None = None,
    rounds: int = 11,
    seconds: float = 3.0,
) -> dict[str, Timing]:
    """Check that the candidates agree, time them, and print one line a candidate with its ratio to the first.

    Args:
        title: what is computed.
        candidates: name -> function; the first is ours.
        tolerance: largest relative difference (in norm) between their results.
        flop: operations of one call, to print GFLOP/s.
        peak: FLOP/s of the machine, to print the share of it.
        rounds, seconds: as in `measure`.

    Raises:
        Disagreement: the results differ; nothing was timed.
    """
    check_agreement(candidates, tolerance)
    timings = measure(candidates, rounds=rounds, seconds=seconds)
    ours = next(iter(timings.values())).median
    print(title)
    for name, timing in timings.items():
        line = f"  {name:24s} {timing.median * 1e3:9.3f} ms (best {timing.best * 1e3:9.3f})"
        if flop:
            line += f"  {flop / timing.median / 1e9:7.1f} GFLOP/s"
            if peak:
                line += f" {flop / timing.median / peak:4.0%} of the peak"
        print(line + f"  {timing.median / ours:5.2f} x", flush=True)
    return timings
