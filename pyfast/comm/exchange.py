"""Collectives of CPU tensors as direct exchanges between pairs of ranks (gloo send and receive).

gloo's own collectives copy through a temporary, its reduce_scatter sends twice the bytes, and its sums run in ring
order, rounding low precision at every hop. Here every receive is posted before the first send (posting sends first
halves the bandwidth: the "ready" message queues behind one's own data), and sums run in rank order in float32.

Every method starts the exchange and returns `finish`, which waits for it and completes the result. A send does not
copy: the input must stay as it is until `finish` has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

Finish = Callable[[], None]

# Below this a message costs latency, not bytes: with more than two ranks, exchange whole tensors in one round.
_ONE_ROUND_BYTES = 1 << 16
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_LOW_PRECISION = (torch.bfloat16, torch.float16)


def combine(pieces: Sequence[Tensor], out: Tensor, op: str) -> None:
    """out = pieces[0] op pieces[1] op ..., in this order, accumulated in float32 for half precision.

    `out` may be one of the pieces.
    """
    if len(pieces) == 1:
        out.copy_(pieces[0])
    elif op == "max":
        accumulated = torch.maximum(pieces[0], pieces[1], out=out if len(pieces) == 2 else None)
        for index, piece in enumerate(pieces[2:], start=3):
            accumulated = torch.maximum(accumulated, piece, out=out if index == len(pieces) else None)
    elif len(pieces) == 2:
        torch.add(pieces[0], pieces[1], out=out)  # half precision: added in float32 and rounded once
    elif out.dtype in _LOW_PRECISION:
        accumulated = pieces[0].float()
        for piece in pieces[1:]:
            accumulated += piece
        out.copy_(accumulated)
    else:
        accumulated = pieces[0] + pieces[1]
        for piece in pieces[2:-1]:
            accumulated += piece
        torch.add(accumulated, pieces[-1], out=out)


def even_chunks(flat: Tensor, count: int) -> list[Tensor]:
    """`flat` cut into `count` views, as even as possible, larger first; some may be empty."""
    return list(torch.tensor_split(flat, count))


class Exchange:
    """The pairwise transport of one process group. Rank arguments are indices in the group."""

    def __init__(self, process_group: dist.ProcessGroup, rank: int, size: int, timeout_s: float) -> None:
        self._process_group = process_group
        self._rank = rank
        self._peers = [peer for peer in range(size) if peer != rank]
        self._size = size
        self._timeout = timedelta(seconds=timeout_s)
        self._sequence = 0

    def all_reduce(self, tensor: Tensor, out: Tensor, op: str) -> Finish:
        """out = sum (or max) over the ranks of `tensor`; contiguous, equal shapes; `out` may be `tensor`."""
        if self._size == 2:
            return self._all_reduce_by_backend(tensor, out, op)
        if tensor.nbytes > _ONE_ROUND_BYTES:
            return self._all_reduce_in_two_rounds(tensor.view(-1), out.view(-1), op)
        received = {peer: torch.empty_like(tensor) for peer in self._peers}
        works = self._post(received, {peer: tensor for peer in self._peers}, self._next_tag())

        def finish() -> None:
            self._wait(works)
            received[self._rank] = tensor
            combine([received[rank] for rank in range(self._size)], out, op)

        return finish

    def _all_reduce_by_backend(self, tensor: Tensor, out: Tensor, op: str) -> Finish:
        """gloo's own, at two ranks the faster one; two numbers add to the same bits in either order."""
        if out.data_ptr() != tensor.data_ptr():
            out.copy_(tensor)
        work = dist.all_reduce(out, op=_OPERATIONS[op], group=self._process_group, async_op=True)
        return lambda: self._wait([work])

    def _all_reduce_in_two_rounds(self, flat: Tensor, out: Tensor, op: str) -> Finish:
        """Reduce-scatter, then all-gather: 2 (P-1)/P of the tensor sent by each rank instead of P-1 of it."""
        chunks, results = even_chunks(flat, self._size), even_chunks(out, self._size)
        mine = chunks[self._rank]
        received = {peer: torch.empty_like(mine) for peer in self._peers}
        tag, second_tag = self._next_tag(), self._next_tag()
        works = self._post(received, {peer: chunks[peer] for peer in self._peers}, tag)
        # In place, a peer's result lands where its chunk is sent from: it comes only after that peer has the chunk.
        results_works = self._post({peer: results[peer] for peer in self._peers}, {}, second_tag)

        def finish() -> None:
            self._wait(works)
            received[self._rank] = mine
            combine([received[rank] for rank in range(self._size)], results[self._rank], op)
            sends = self._post({}, {peer: results[self._rank] for peer in self._peers}, second_tag)
            self._wait(results_works + sends)

        return finish

    def all_gather(self, tensor: Tensor, out: Tensor) -> Finish:
        """out[p] = rank p's `tensor`; contiguous, equal shapes."""
        receives = {peer: out[peer] for peer in self._peers}
        works = self._post(receives, {peer: tensor for peer in self._peers}, self._next_tag())
        out[self._rank].copy_(tensor)
        return lambda: self._wait(works)

    def reduce_scatter(self, tensor: Tensor, out: Tensor) -> Finish:
        """out = sum over the ranks, in rank order, of their tensor[own rank]; contiguous."""
        received = {peer: torch.empty_like(out) for peer in self._peers}
        works = self._post(received, {peer: tensor[peer] for peer in self._peers}, self._next_tag())

        def finish() -> None:
            self._wait(works)
            received[self._rank] = tensor[self._rank]
            combine([received[rank] for rank in range(self._size)], out, "sum")

        return finish

    def all_to_all(self, tensor: Tensor, out: Tensor) -> Finish:
        """out[p] = rank p's tensor[own rank]; contiguous, equal shapes, not the same memory."""
        receives = {peer: out[peer] for peer in self._peers}
        works = self._post(receives, {peer: tensor[peer] for peer in self._peers}, self._next_tag())
        out[self._rank].copy_(tensor[self._rank])
        return lambda: self._wait(works)

    def broadcast(self, tensor: Tensor, src: int) -> Finish:
        """tensor = rank `src`'s tensor, in place; contiguous."""
        tag = self._next_tag()
        if self._rank == src:
            works = self._post({}, {peer: tensor for peer in self._peers}, tag)
        else:
            works = self._post({src: tensor}, {}, tag)
        return lambda: self._wait(works)

    def _next_tag(self) -> int:
        """A tag of its own for each round, so that exchanges in flight at once cannot take each other's messages."""
        self._sequence += 1
        return self._sequence & 0x3FFFFFFF

    def _post(self, receives: dict[int, Tensor], sends: dict[int, Tensor], tag: int) -> list[dist.Work]:
        group = self._process_group
        works = [dist.irecv(t, group=group, group_src=p, tag=tag) for p, t in receives.items() if t.numel()]
        # start with the next rank, so that not all of a large group send to rank 0 first
        for peer in sorted(sends, key=lambda p: (p - self._rank) % self._size):
            if sends[peer].numel():
                works.append(dist.isend(sends[peer], group=group, group_dst=peer, tag=tag))
        return works

    def _wait(self, works: list[dist.Work]) -> None:
        for work in works:
            work.wait(self._timeout)
