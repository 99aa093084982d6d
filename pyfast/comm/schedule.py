"""Who reads which rows when: plans of overlapped collectives as plain data, made without any process.

A tensor [*outer, L, *inner, width] is cut over P ranks along L, into `lengths`. Seen as rows of `width`, a rank's shard
is `outer` runs of `lengths[rank] * inner` rows, each run somewhere in the whole. A panel is one such run:

    (rank, row in the rank's shard, row in the whole, rows)

Gathering, a rank begins with its own shard, then takes those of the ranks after it, so that no two ranks read from the
same one at first. Scattering, it begins with what the rank after it waits for, and does its own rows last.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

Panel = tuple[int, int, int, int]


@dataclass(frozen=True)
class Cut:
    """A tensor's rows, cut over ranks along one dimension.

    Args:
        outer, inner: product of the sizes before and after the dimension that is cut (the last, the width, apart).
        lengths: length of each rank's shard along it; any may be 0.
    """

    outer: int
    lengths: tuple[int, ...]
    inner: int

    @classmethod
    def of(cls, shape: Sequence[int], dim: int, lengths: Sequence[int]) -> Cut:
        """The cut of a tensor of `shape` [*outer, any, *inner, width] along `dim`."""
        return cls(math.prod(shape[:dim]), tuple(lengths), math.prod(shape[dim + 1 : -1]))

    @property
    def length(self) -> int:
        """L of the whole."""
        return sum(self.lengths)

    @property
    def rows(self) -> int:
        """Rows of the whole."""
        return self.outer * self.length * self.inner

    def start(self, rank: int) -> int:
        """Where `rank`'s shard begins along L."""
        return sum(self.lengths[:rank])

    def shard_rows(self, rank: int) -> int:
        """Rows of `rank`'s shard."""
        return self.outer * self.lengths[rank] * self.inner

    def panels(self, rank: int) -> list[Panel]:
        """Where the shard of `rank` lies, run after run; no empty ones."""
        rows, first, step = self.lengths[rank] * self.inner, self.start(rank) * self.inner, self.length * self.inner
        return [(rank, o * rows, o * step + first, rows) for o in range(self.outer)] if rows else []


@functools.lru_cache(maxsize=256)
def gather_order(cut: Cut, rank: int) -> tuple[Panel, ...]:
    """The panels in the order in which `rank` takes them when it gathers: its own first, then rank + 1, ..."""
    size = len(cut.lengths)
    return tuple(panel for step in range(size) for panel in cut.panels((rank + step) % size))


@functools.lru_cache(maxsize=256)
def scatter_order(cut: Cut, rank: int) -> tuple[Panel, ...]:
    """The panels in the order in which `rank` makes them for their owners: for rank + 1 first, its own last."""
    size = len(cut.lengths)
    return tuple(panel for step in range(1, size + 1) for panel in cut.panels((rank + step) % size))


def even_lengths(length: int, ranks: int) -> tuple[int, ...]:
    """`length` over `ranks`, as even as possible, longer shards first."""
    base, extra = divmod(length, ranks)
    return tuple(base + (rank < extra) for rank in range(ranks))
