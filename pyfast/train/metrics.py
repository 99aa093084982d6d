"""`metrics.jsonl`: one JSON object a step, written whole and flushed, never overwritten."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

FILE_NAME = "metrics.jsonl"


@dataclass(frozen=True)
class StepMetrics:
    """What one optimizer step did."""

    step: int  # from 1
    loss: float  # mean cross entropy in nats over all valid tokens of the global batch
    grad_norm: float  # of the global gradient, before clipping
    learning_rate: float
    tokens: int  # tokens of the global batch of this step
    tokens_per_second: float  # of this step, over all ranks
    seconds: float  # wall time of this step
    memory_bytes: int  # largest resident memory of the writing rank so far
    loss_scale: float | None = None  # of this step's backward; None: the loss was not scaled
    skipped: bool | None = None  # float16: a gradient overflowed and no weight moved


class Recent:
    """Means over the last steps: a quarter of those taken so far, at most `LONGEST`. One batch alone says little."""

    LONGEST = 50

    def __init__(self) -> None:
        self._taken = 0
        self._steps: deque[StepMetrics] = deque()

    def add(self, metrics: StepMetrics) -> None:
        """Take in the next step."""
        self._taken += 1
        self._steps.append(metrics)
        while len(self._steps) > min(self.LONGEST, max(1, self._taken // 4)):
            self._steps.popleft()

    @property
    def steps(self) -> int:
        """How many steps the means are over; 0 before the first."""
        return len(self._steps)

    @property
    def loss(self) -> float:
        """Mean of the steps' losses."""
        return sum(metrics.loss for metrics in self._steps) / len(self._steps)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the steps over their time."""
        return sum(metrics.tokens for metrics in self._steps) / sum(metrics.seconds for metrics in self._steps)


class MetricsWriter:
    """Appends to `directory/metrics.jsonl`. Lines of steps beyond `last_step` are moved to another file first."""

    def __init__(self, directory: str | Path, *, last_step: int = 0):
        self.path = Path(directory) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.moved_to = set_aside(self.path, last_step)
        self._file: TextIO = self.path.open("a", encoding="utf-8")

    def write(self, metrics: StepMetrics) -> None:
        """Append one line; after the call it is with the operating system."""
        self._file.write(json.dumps(_line(metrics), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _line(metrics: StepMetrics) -> dict:
    """The keys of a line; None stands for one that does not concern the run. JSON knows no infinity: null instead."""
    line = {name: value for name, value in asdict(metrics).items() if value is not None}
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in line.items()}


def set_aside(path: Path, last_step: int) -> Path | None:
    """Move the lines of steps > `last_step` (and a torn last line) from `path` to `metrics-replaced-N.jsonl` beside it.

    They belong to steps that a resumed run does again. Returns the new file, None when there was nothing to move.
    """
    if not path.exists():
        return None
    kept, moved = [], []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        (kept if _step_of(line) <= last_step else moved).append(line)
    if not moved:
        return None
    number = 1
    while (aside := path.with_name(f"metrics-replaced-{number}.jsonl")).exists():
        number += 1
    aside.write_text("".join(moved), encoding="utf-8")
    # The kept lines replace the file in one rename: a crash here leaves every line in at least one of the two files.
    temporary = path.with_name(path.name + ".new")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)
    return aside


def read(path: str | Path) -> list[dict]:
    """All lines of a metrics file."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def memory_bytes() -> int:
    """Largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _step_of(line: str) -> float:
    """The step of a line; infinity for a line that was cut short by a crash."""
    try:
        return json.loads(line)["step"] if line.endswith("\n") else float("inf")
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")
