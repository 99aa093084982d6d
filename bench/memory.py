"""How much memory a function needs, measured in a process of its own (Linux)."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any


def peak_growth(make: Callable[..., Callable[[], Any]], tiny: tuple, size: tuple) -> int:
    """Bytes by which a new process grows while `make(*size)()` runs, beyond what `make` had allocated.

    `make` is a function of a module, called in the new process; `make(*tiny)()` runs first, so that what is loaded and
    allocated by a first call does not count.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_growth, (make, tiny, size))


def _growth(make: Callable[..., Callable[[], Any]], tiny: tuple, size: tuple) -> int:
    import torch

    torch.set_num_threads(1)
    make(*tiny)()
    function = make(*size)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = _peak_resident_bytes()
    function()
    return _peak_resident_bytes() - before


def _peak_resident_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
