"""Collectives of CPU tensors between ranks on one host, through memory that all of them map.

Each rank owns one segment: a header of counters and two slots of data. An exchange is a copy into one's own slot, a
counter raised, and reads straight from the others' slots as their counters rise: no system call, no second copy.

    all_reduce, 2 ranks     copy in | raise `published` | wait for the other's | out = own + other's slot
    all_reduce, P > 2       ... | wait for all | sum one P-th of all slots | raise `reduced` | collect the other parts

Slots alternate. Writing the slot of exchange e is safe once exchange e-1 is complete: it waited for every rank's
`published` >= e-1, which a rank raises only after it has read everything of exchange e-2. So every exchange waits for
every rank, and no barrier is needed.

Counters are plain 8-byte stores, which x86 makes visible in program order; elsewhere this transport is not used.
"""

from __future__ import annotations

import mmap
import os
import select
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyfast.comm.exchange import combine
from pyfast.comm.segments import close_all, share_segments

Finish = Callable[[], None]

_HEADER_BYTES = 4096
_SLOT_BYTES = 1 << 22
_SEGMENT_BYTES = _HEADER_BYTES + 2 * _SLOT_BYTES
# Counters in the header, as indices of 8-byte words, each in a cache line of its own.
_PUBLISHED, _REDUCED, _FAILED = 0, 16, 32
_LENGTH = 8  # and 9: bytes published in slot 0 and 1, beside the counter that announces them

# Waiting: poll, then yield the core (ranks may outnumber cores: a pure spin costs a scheduler slice), then sleep.
_SPINS = 200
_YIELD_S = 2e-3
_SLEEP_S = 1e-4
_CHECK_S = 0.05


class SharedMemory:
    """The same-host transport of one process group; the same methods as `Exchange`.

    An operation runs as a whole when its `finish` is called: with a core per rank there is nobody to run it earlier.
    """

    def __init__(self, ranks: Sequence[int], rank: int, segments: list[mmap.mmap], pidfds: list[int], timeout_s: float):
        self._ranks = tuple(ranks)
        self._rank = rank
        self._size = len(ranks)
        self._timeout_s = timeout_s
        self._words = [memoryview(segment)[:_HEADER_BYTES].cast("q") for segment in segments]
        self._slots = [
            [torch.frombuffer(s, dtype=torch.uint8, count=_SLOT_BYTES, offset=_HEADER_BYTES + i * _SLOT_BYTES)
             for i in range(2)]
            for s in segments
        ]  # fmt: skip
        self._pidfds = pidfds
        self._epoch = 0
        weakref.finalize(self, close_all, pidfds)

    @classmethod
    def connect(
        cls, process_group: dist.ProcessGroup, ranks: Sequence[int], rank: int, timeout_s: float
    ) -> SharedMemory | None:
        """Map the segments of all ranks; None, alike on every rank, if they cannot all reach each other's memory.

        A collective over `process_group`.
        """
        shared = share_segments(process_group, len(ranks), rank, _SEGMENT_BYTES)
        return None if shared is None else cls(ranks, rank, shared.maps, shared.pidfds, timeout_s)

    def all_reduce(self, tensor: Tensor, out: Tensor, op: str) -> Finish:
        """out = sum (or max) over the ranks of `tensor`; contiguous, equal shapes; `out` may be `tensor`."""
        reduce_piece = self._reduce_pair if self._size == 2 else self._reduce_parts

        def finish() -> None:
            for piece, result in _pieces(tensor.view(-1), out.view(-1)):
                reduce_piece(piece, result, op)

        return finish

    def all_gather(self, tensor: Tensor, out: Tensor) -> Finish:
        """out[p] = rank p's `tensor`; contiguous, equal shapes."""

        def finish() -> None:
            start = 0
            rows = out.view(self._size, -1)
            for (piece,) in _pieces(tensor.view(-1)):
                self._publish([piece], piece.nbytes)
                for rank, slot in enumerate(self._arrived(piece)):
                    rows[rank, start : start + piece.numel()].copy_(slot)
                start += piece.numel()

        return finish

    def reduce_scatter(self, tensor: Tensor, out: Tensor) -> Finish:
        """out = sum over the ranks, in rank order, of their tensor[own rank]; contiguous."""

        def finish() -> None:
            flat = out.view(-1)
            blocks = [tensor[rank].view(-1) for rank in range(self._size)]
            for result, *pieces in _pieces(flat, *blocks, limit=_SLOT_BYTES // self._size):
                self._publish(pieces, result.nbytes * self._size)
                slots = self._arrived(result, offset=self._rank * result.numel())
                combine(slots, result, "sum")

        return finish

    def all_to_all(self, tensor: Tensor, out: Tensor) -> Finish:
        """out[p] = rank p's tensor[own rank]; contiguous, equal shapes, not the same memory."""

        def finish() -> None:
            blocks = [tensor[rank].view(-1) for rank in range(self._size)]
            targets = [out[rank].view(-1) for rank in range(self._size)]
            for parts in _pieces(*blocks, *targets, limit=_SLOT_BYTES // self._size):
                pieces, results = parts[: self._size], parts[self._size :]
                self._publish(pieces, pieces[0].nbytes * self._size)
                slots = self._arrived(pieces[0], offset=self._rank * pieces[0].numel())
                for result, slot in zip(results, slots, strict=True):
                    result.copy_(slot)

        return finish

    def broadcast(self, tensor: Tensor, src: int) -> Finish:
        """tensor = rank `src`'s tensor, in place; contiguous."""

        def finish() -> None:
            for (piece,) in _pieces(tensor.view(-1)):
                self._publish([piece] if self._rank == src else [], piece.nbytes)
                slots = self._arrived(piece)
                if self._rank != src:
                    piece.copy_(slots[src])

        return finish

    def abandon(self) -> None:
        """Tell the peers that this rank has given up, so that they need not wait for their timeout."""
        self._words[self._rank][_FAILED] = 1

    # --- one piece, at most a slot ------------------------------------------------------------------------------------

    def _reduce_pair(self, piece: Tensor, result: Tensor, op: str) -> None:
        self._publish([piece], piece.nbytes)
        theirs = self._arrived(piece)[1 - self._rank]
        combine([piece, theirs], result, op)  # two numbers add to the same bits in either order

    def _reduce_parts(self, piece: Tensor, result: Tensor, op: str) -> None:
        self._publish([piece], piece.nbytes)
        parts = [torch.tensor_split(slot, self._size) for slot in self._arrived(piece)]
        # in place: of this rank's slot the others read every part but this one
        combine([parts[rank][self._rank] for rank in range(self._size)], parts[self._rank][self._rank], op)
        self._words[self._rank][_REDUCED] = self._epoch
        for rank, target in enumerate(torch.tensor_split(result, self._size)):
            self._wait(rank, _REDUCED)
            target.copy_(parts[rank][rank])

    def _publish(self, pieces: Sequence[Tensor], length: int) -> None:
        """Put `pieces`, one after the other, into this rank's next slot, and raise its counter.

        `length` is the number of bytes this rank takes part with, which must be every rank's.
        """
        self._epoch += 1
        slot, start = self._slots[self._rank][self._epoch & 1], 0
        for piece in pieces:
            slot[start : start + piece.nbytes].view(piece.dtype).copy_(piece)
            start += piece.nbytes
        self._words[self._rank][_LENGTH + (self._epoch & 1)] = length
        self._words[self._rank][_PUBLISHED] = self._epoch

    def _arrived(self, like: Tensor, offset: int = 0) -> list[Tensor]:
        """Wait for every rank, then view `like.numel()` elements of each slot, from element `offset`."""
        length = _LENGTH + (self._epoch & 1)
        for rank, words in enumerate(self._words):
            self._wait(rank, _PUBLISHED)
            if words[length] != self._words[self._rank][length]:
                raise ValueError(
                    f"rank {self._ranks[rank]} brought {words[length]} bytes, rank {self._ranks[self._rank]} "
                    f"{self._words[self._rank][length]}: the ranks disagree on a collective's shape or dtype; groups "
                    "made with checked=True say which"
                )
        place = slice(offset * like.itemsize, offset * like.itemsize + like.nbytes)
        return [slots[self._epoch & 1][place].view(like.dtype) for slots in self._slots]

    def _wait(self, rank: int, word: int) -> None:
        words, epoch = self._words[rank], self._epoch
        for _ in range(_SPINS):
            if words[word] >= epoch:
                return
        start = time.monotonic()
        next_check = start + _CHECK_S
        while words[word] < epoch:
            now = time.monotonic()
            if now - start < _YIELD_S:
                os.sched_yield()
                continue
            time.sleep(_SLEEP_S)
            if now >= next_check:
                self._check_alive(rank, word, now - start)
                next_check = now + _CHECK_S

    def _check_alive(self, rank: int, word: int, waited_s: float) -> None:
        gone = bool(self._poll(rank))
        gave_up = bool(self._words[rank][_FAILED])
        if self._words[rank][word] >= self._epoch:
            return  # it had done its part before it ended
        if gone:
            raise RuntimeError(f"The process of rank {self._ranks[rank]} has ended.")
        if gave_up:
            raise RuntimeError(f"Rank {self._ranks[rank]} has given up after a failure of its own.")
        if waited_s > self._timeout_s:
            raise RuntimeError(f"Rank {self._ranks[rank]} did not arrive within {self._timeout_s:g} s.")

    def _poll(self, rank: int) -> list[tuple[int, int]]:
        """Not empty once the process of `rank` has ended, reaped or not."""
        poller = select.poll()
        poller.register(self._pidfds[rank], select.POLLIN)
        return poller.poll(0)


def _pieces(*tensors: Tensor, limit: int = _SLOT_BYTES) -> Any:
    """Flat tensors of equal length, cut alike into pieces of at most `limit` bytes; one empty piece for empty ones."""
    length = max(1, limit // tensors[0].itemsize)
    if tensors[0].numel() <= length:
        return (tensors,)
    return zip(*(tensor.split(length) for tensor in tensors), strict=True)
