"""One race: candidates checked against each other, then timed in turn, on pytest-benchmark's `pedantic` runner.

pytest-benchmark times ours. Before each of its rounds its `setup` runs every other candidate once, timed with the
same clock, so a change in the machine's speed meets all of them alike. What the others took, the ratio and the share
of the limit go into `extra_info`, and so into the JSON that `--benchmark-json` and `--benchmark-save` write.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from support import Candidate, check_agreement, copy_of, sweep_of

LIMIT = "limit"
MOST_ROUNDS = 500


@dataclass(frozen=True)
class Row:
    """A line of a table; times are medians in seconds, of one call."""

    case: str
    times: dict[str, float]  # the first is ours
    difference: float  # between the results, relative
    rate: str = ""  # "97.5 GFLOP/s"
    share: float | None = None  # of the FMA peak, or of what moving as many bytes reaches
    notes: dict[str, str] = field(default_factory=dict)  # heading -> text

    @property
    def ratio(self) -> float:
        """The second candidate's time over ours: above 1, we are faster."""
        ours, other = list(self.times.values())[:2]
        return other / ours


def timed_rounds(
    benchmark: Any, candidates: dict[str, Candidate], *, clock: Callable[[], float], seconds: float, least: int
) -> dict[str, float]:
    """Median seconds of each candidate over rounds in turn, for about `seconds` and at least `least` rounds."""
    first, *others = candidates.values()
    start = time.perf_counter()
    for function in candidates.values():  # warms up, and tells how many rounds there is time for
        function()
    once = time.perf_counter() - start
    rounds = min(MOST_ROUNDS, max(least, int(seconds / once)))
    times: list[list[float]] = [[] for _ in others]

    def run_the_others() -> None:
        for function, values in zip(others, times, strict=True):
            start = clock()
            function()
            values.append(clock() - start)

    with no_collection():
        benchmark.pedantic(first, setup=run_the_others, rounds=rounds)
    medians = [benchmark.stats["median"], *map(statistics.median, times)]
    return dict(zip(candidates, medians, strict=True))


@contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage is collected before, not during."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True)
class Race:
    """What the `race` fixture gives a benchmark: call it once with the candidates."""

    benchmark: Any  # pytest-benchmark's fixture
    case: str
    clock: Callable[[], float]
    seconds: float
    least_rounds: int
    peak: float  # FLOP/s of all threads that the clock counts as one
    rows: dict[str, list[Row]]  # table -> its rows, for the end of the session

    def __call__(
        self,
        candidates: dict[str, Candidate],
        *,
        tolerance: float,
        flop: float | None = None,
        moved_bytes: float | None = None,
        in_place: bool = False,
        notes: Callable[[], dict[str, str]] | None = None,
    ) -> Row | None:
        """Check that the candidates agree, time them in turn, and note a line for the table of this benchmark's group.

        Args:
            candidates: name -> function; the first is ours, the ratio is the second's time over ours.
            tolerance: largest relative difference (in norm) between their results.
            flop: operations of one call: gives GFLOP/s and the share of the FMA peak.
            moved_bytes: bytes that one call must read and write: gives GB/s, and the share of what a copy of as many
                bytes, timed in turn with the candidates, reaches.
            in_place: compare with a change of sign in place instead of a copy.
            notes: more columns, asked for only when times are taken.

        Returns:
            The row; None under --benchmark-disable, when agreement is all that is checked.

        Raises:
            Disagreement: the results differ; nothing was timed and nothing will be printed.
        """
        difference = check_agreement(candidates, tolerance)
        if not self.benchmark.enabled:
            self.benchmark.pedantic(next(iter(candidates.values())))
            return None
        move = sweep_of if in_place else copy_of
        limit = {} if moved_bytes is None else {LIMIT: move(moved_bytes)}
        times = timed_rounds(
            self.benchmark, candidates | limit, clock=self.clock, seconds=self.seconds, least=self.least_rounds
        )
        fastest, ours = times.pop(LIMIT, None), next(iter(times.values()))
        rate, share = "", None
        if flop is not None:
            rate, share = f"{flop / ours / 1e9:.1f} GFLOP/s", flop / ours / self.peak
        elif fastest is not None:
            rate, share = f"{moved_bytes / ours / 1e9:.1f} GB/s", fastest / ours
        row = Row(self.case, times, difference, rate, share, notes() if notes else {})
        self.benchmark.extra_info.update(
            seconds=times, ratio=row.ratio, difference=difference, rate=rate, share=share, **row.notes
        )  # fmt: skip
        self.rows.setdefault(self.benchmark.group or "", []).append(row)
        return row
