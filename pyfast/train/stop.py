"""Stopping a run in good order: a signal asks once, the loop answers after its step; a second signal leaves at once."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_CODE = 130
SAME_REQUEST_SECONDS = 0.5


class Stop:
    """Whether somebody asked the run to stop."""

    def __init__(self) -> None:
        self.requested = False


@contextmanager
def on_signals(*numbers: signal.Signals, leave: Callable[[], None] = lambda: None) -> Iterator[Stop]:
    """A `Stop` that these signals request while the block runs. The second one calls `leave` and ends the process.

    Two signals within half a second are one request: a terminal and a launcher may both pass the same Ctrl-C on.
    """
    stop = Stop()
    first: float | None = None  # when the first signal came; others may have requested a stop before it

    def handle(number: int, frame: object) -> None:
        nonlocal first
        now = time.monotonic()
        if first is None:
            stop.requested, first = True, now
        elif now - first > SAME_REQUEST_SECONDS:
            leave()
            if sys.stderr.isatty():
                os.write(2, b"\x1b[?25h\n")
            os._exit(EXIT_CODE)

    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
