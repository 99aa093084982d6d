"""Symmetric memory: a buffer on every rank of a host that all of them read in place, and flags that say when they may.

Each rank has two slots of data. An *epoch* is one use of a slot by all ranks:

    epoch = memory.open(signature, length, nbytes)   what each rank brings is agreed upon: a disagreement is the same
                                                     ValueError on every rank, before anyone reads any data
    epoch.buffer(me, dtype, shape)[...] = ...        put: into one's own slot
    epoch.signal(chunk)                              a flag is raised to the epoch's number
    epoch.wait(rank, chunk)                          until a peer has raised its own
    epoch.buffer(rank, dtype, shape)                 get: the peer's slot, in place, no copy
    epoch.close()                                    this rank reads nothing of this epoch any more

Flags only rise and are never reset, so that no barrier is needed before or after. Slots alternate: epoch e opens once
every rank has closed epoch e - 2, so two may be open at a time. All ranks open the same epochs in the same order.

Flags and waiting are C++ (csrc/flags.h): polling, then yielding, then a futex. Waiting ends with an error that names
rank and chunk when the peer's process has ended, when it has given up, or after the timeout.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pyfast.comm.segments import Segments, close_all, share_segments

_LINE = 64  # bytes of a flag, csrc/flags.h
_NUMBERS, _TEXT = struct.Struct("qq"), struct.Struct("q400s")  # length, bytes wanted | bytes of the text, the text
_MOST_VIEWS = 512
_HEADER_BYTES = 448
_FLAGS = 2 * _HEADER_BYTES  # a control segment: two headers, then flags
_GRAIN = 1 << 21
_FIRST = 1  # flag 0: this rank has given up. Then for each slot: opened, closed, a flag for each chunk
_CODES = {1: "its process has ended", 2: "it has given up after a failure of its own"}


class SymmetricMemory:
    """Symmetric memory of the ranks of one process group on one host; see the file's head.

    Attributes:
        rank, size: this process's index in the group, and the number of ranks.
        timeout_s: seconds that a peer is waited for.
        peers: int64 [P, 2], what csrc/flags.h calls a Peer for each rank.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, ranks: Sequence[int], rank: int, control: Segments, timeout_s: float
    ) -> None:
        self.rank, self.size, self.timeout_s = rank, len(ranks), timeout_s
        self._ranks = tuple(ranks)
        self._process_group = process_group
        from pyfast.kernels.extension import _C  # not before ranks share memory: importing pyfast loads no kernels

        self._C = _C
        self._chunks = len(ranks) + 1
        self._control = control.maps
        # torch views: they keep the maps alive and know their addresses
        self._flags = [torch.frombuffer(segment, dtype=torch.uint8) for segment in control.maps]
        self._addresses = [view.data_ptr() for view in self._flags]
        failed = [address + _FLAGS for address in self._addresses]
        self.peers = torch.tensor(list(zip(failed, control.pidfds, strict=True)), dtype=torch.int64)
        self._slots: list[list[Tensor] | None] = [None, None]
        self._capacity = [0, 0]
        self._views: dict[tuple, Tensor] = {}  # making one costs more than reading a small buffer
        self._number = 0
        weakref.finalize(self, close_all, control.pidfds)

    @classmethod
    def connect(
        cls, process_group: dist.ProcessGroup, ranks: Sequence[int], rank: int, timeout_s: float
    ) -> SymmetricMemory | None:
        """A collective over `process_group`; None, alike on every rank, if they do not all share memory."""
        size = _FLAGS + _LINE * (_FIRST + 2 * (2 + len(ranks) + 1))
        control = share_segments(process_group, len(ranks), rank, size)
        return None if control is None else cls(process_group, ranks, rank, control, timeout_s)

    def announce(self, signature: str, length: int, nbytes: int) -> Epoch:
        """Begin the next epoch on this rank and say so; `Epoch.agree` must follow before a peer's data is read.

        In between this rank may fill its own slot, if `Epoch.has_room`: then the ranks wait for each other once, not
        twice.

        Args:
            signature: what must be equal on all ranks: operation, dtypes, shapes.
            length: what may differ: each rank's own, which `Epoch.lengths` tells.
            nbytes: bytes this rank will put into its slot.

        Raises:
            RuntimeError: a rank has ended, given up or not come within the timeout.
        """
        self._number += 1
        epoch = Epoch(self, self._number, nbytes <= self._capacity[self._number & 1])
        # Whoever still read this slot two epochs ago would read what is written now.
        for rank in range(self.size):
            epoch._wait_line(rank, epoch._line + 1, self._number - 2, "to close the epoch before the last")
        self._control[self.rank][epoch._header] = _NUMBERS.pack(length, nbytes) + _encoded(signature)
        self._C.flag_raise(self._addresses[self.rank] + epoch._line_offset(0), self._number)
        return epoch

    def open(self, signature: str, length: int, nbytes: int) -> Epoch:
        """`announce`, then `Epoch.agree`."""
        epoch = self.announce(signature, length, nbytes)
        epoch.agree()
        return epoch

    def abandon(self) -> None:
        """Tell the peers that this rank has given up, so that they need not wait for their timeout."""
        self._C.flag_raise(self._addresses[self.rank] + _FLAGS, 1)

    def _grow(self, slot: int, nbytes: int) -> None:
        """New segments for `slot`, on all ranks, which all come here in the same epoch."""
        capacity = max(nbytes, self._capacity[slot] * 3 // 2)
        capacity = (capacity + _GRAIN - 1) // _GRAIN * _GRAIN
        self._views.clear()
        self._slots[slot], self._capacity[slot] = None, 0  # free the old ones first
        shared = share_segments(self._process_group, self.size, self.rank, capacity, reserve=True)
        if shared is None:
            raise RuntimeError(f"There is no memory for a shared segment of {capacity} bytes on some rank of the host.")
        close_all(shared.pidfds)
        self._slots[slot] = [torch.frombuffer(segment, dtype=torch.uint8) for segment in shared.maps]
        self._capacity[slot] = capacity


class Epoch:
    """One use of a slot by all ranks; made by `SymmetricMemory.open`.

    Attributes:
        number: counts from 1; what the flags are raised to.
        slot: 0 or 1.
        lengths: what each rank gave as `length`; known once agreed.
        has_room: whether this rank's bytes fit into its slot when the epoch was announced.
        grown: whether the slots have become larger since, with nothing in them; the same on all ranks once agreed.
    """

    def __init__(self, memory: SymmetricMemory, number: int, has_room: bool) -> None:
        self._memory = memory
        self.number, self.slot, self.has_room = number, number & 1, has_room
        self._header = slice(self.slot * _HEADER_BYTES, self.slot * _HEADER_BYTES + _NUMBERS.size + _TEXT.size)
        self.lengths: tuple[int, ...] = ()
        self.grown = False
        self._line = _FIRST + self.slot * (2 + memory._chunks)

    def agree(self) -> None:
        """Wait for every rank's announcement and compare them.

        Slots too small for one rank's bytes grow on all ranks, and lose their contents: `grown` tells.

        Raises:
            ValueError: the signatures differ; the same on every rank.
            RuntimeError: a rank has ended, given up or not come within the timeout.
        """
        memory = self._memory
        headers = []
        for rank in range(memory.size):
            self._wait_line(rank, self._line, self.number, "to begin")
            headers.append(memory._control[rank][self._header])
        if any(other[_NUMBERS.size :] != headers[0][_NUMBERS.size :] for other in headers):
            self.close()
            raise ValueError(_disagreement(memory._ranks, headers))
        self.lengths, wanted = zip(*(_NUMBERS.unpack_from(other) for other in headers), strict=True)
        largest = max(wanted)
        self.grown = largest > memory._capacity[self.slot]
        if self.grown:
            memory._grow(self.slot, largest)

    def buffer(self, rank: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """The slot of `rank` as a contiguous tensor, in place; good until `close`."""
        memory, key = self._memory, (self.slot, rank, dtype, tuple(shape))
        view = memory._views.get(key)
        if view is None:
            if len(memory._views) >= _MOST_VIEWS:
                memory._views.clear()
            view = memory._views[key] = self._view(rank, dtype, tuple(shape))
        return view

    def _view(self, rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        slots, numel = self._memory._slots[self.slot], math.prod(shape)
        if slots is None or numel == 0:
            return torch.empty(shape, dtype=dtype)
        return slots[rank][: numel * dtype.itemsize].view(dtype).view(shape)

    def signal(self, chunk: int) -> None:
        """Say that this rank's part of the data called `chunk` (0 .. P) is in place."""
        self._memory._C.flag_raise(self.flag(self._memory.rank, chunk), self.number)

    def wait(self, rank: int, chunk: int) -> None:
        """Return once `rank` has signalled `chunk`; RuntimeError if it never will."""
        self._wait_line(rank, self._line + 2 + chunk, self.number, f"with chunk {chunk}")

    def flag(self, rank: int, chunk: int) -> int:
        """The address of the flag that `rank` raises for `chunk`."""
        return self._memory._addresses[rank] + self._line_offset(2 + chunk)

    def raise_for(self, code: int, what: str) -> None:
        """The error for a result of a kernel that waited: 4 * rank + how it failed."""
        self._fail(code // 4, code % 4, what)

    def close(self) -> None:
        """This rank reads no buffer of this epoch any more."""
        self._memory._C.flag_raise(self._memory._addresses[self._memory.rank] + self._line_offset(1), self.number)

    def _line_offset(self, line: int) -> int:
        return _FLAGS + _LINE * (self._line + line)

    def _wait_line(self, rank: int, line: int, number: int, what: str) -> None:
        memory = self._memory
        if rank == memory.rank or number <= 0:
            return
        address = memory._addresses[rank] + _FLAGS + _LINE * line
        code = memory._C.flag_wait(address, number, memory.peers.data_ptr() + 16 * rank, memory.timeout_s)
        if code:
            self._fail(rank, code, what)

    def _fail(self, rank: int, code: int, what: str) -> None:
        reason = _CODES.get(code, f"it did not come within {self._memory.timeout_s:g} s")
        raise RuntimeError(f"Waited for rank {self._memory._ranks[rank]} {what} (epoch {self.number}): {reason}.")


@functools.lru_cache(maxsize=512)
def _encoded(signature: str) -> bytes:
    """A signature as it stands in a header; of a long one the beginning and a hash."""
    text = signature.encode()
    text = text if len(text) <= 400 else text[:380] + hashlib.sha256(text).hexdigest()[:20].encode()
    return _TEXT.pack(len(text), text)


def _disagreement(ranks: Sequence[int], headers: Sequence[bytes]) -> str:
    texts = []
    for rank, header in zip(ranks, headers, strict=True):
        size, text = _TEXT.unpack_from(header, _NUMBERS.size)
        texts.append(f"rank {rank}: {text[:size].decode(errors='replace')}")
    return f"the ranks disagree on an operation's shapes or dtypes: {'; '.join(texts)}. Nothing was sent."
