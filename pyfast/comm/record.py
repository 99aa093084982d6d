"""Counting collectives: what was sent, over which group, under which name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """One collective as one rank called it.

    `bytes` is the size of the tensor handed in (0 for barriers and objects), not what a transport puts on the wire.
    """

    operation: str
    name: str
    group: str
    bytes: int
    dtype: str
    shape: tuple[int, ...]


# Process-wide on purpose: a recorder observes every group, also from autograd's own threads, which a context variable
# would not reach. Empty outside a `record()` block, so the hot path pays one truth test.
_listeners: list[list[Event]] = []


@contextmanager
def record() -> Iterator[list[Event]]:
    """Collect an `Event` for every collective of this process (groups of size 1 send nothing and record nothing).

    >>> with record() as events:
    ...     model(ids)
    >>> assert [event.name for event in events] == ["layer 0 attention.output", "layer 0 ffn.down"]
    """
    events: list[Event] = []
    _listeners.append(events)
    try:
        yield events
    finally:
        # by identity: two equal lists are two recorders
        _listeners[:] = [listener for listener in _listeners if listener is not events]


def recording() -> bool:
    """Whether any `record()` block is open."""
    return bool(_listeners)


def emit(event: Event) -> None:
    """Hand `event` to every open recorder."""
    for listener in _listeners:
        listener.append(event)
