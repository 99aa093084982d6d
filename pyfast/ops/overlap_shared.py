"""Collective matmuls of ranks on one host, through symmetric memory: nothing is sent, peers' rows are read in place.

Gathering, each rank puts its shard into its slot and multiplies every shard where it lies, its own first. Scattering,
each rank leaves its partial product in its slot, in the order in which the owners need it, and an owner adds the P
partials, in rank order, in the precision of sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyfast import kernels
from pyfast.comm import Group
from pyfast.comm.schedule import Cut, even_lengths, gather_order, scatter_order
from pyfast.comm.symmetric import Epoch, SymmetricMemory
from pyfast.kernels.dtypes import sum_dtype
from pyfast.kernels.matmul_choice import packed_gemm_is_faster
from pyfast.kernels.panels import Flags
from pyfast.ops.overlap_sums import Pairs, add_in_order, gather_signature, sum_signature

# With more than two ranks a small sum is made by all of them at once, a large one in parts that they exchange.
_SMALL_SUM_BYTES = 1 << 17
# Flags of a gather: the shard is in its slot; or, where the slots have grown meanwhile, in its new slot.
_IN_PLACE, _IN_NEW_PLACE = 0, 1


class SharedTransport:
    """The transport of one group whose ranks share memory; the same methods as `CollectiveTransport`."""

    name = "shared_memory"

    def __init__(self, group: Group, memory: SymmetricMemory) -> None:
        self._group, self._memory, self._rank = group, memory, group.rank

    def gather_matmul(
        self, operation: str, name: str, x: Tensor, dim: int, factors: Sequence[Tensor],
        biases: Sequence[Tensor | None], keep: bool,
    ) -> tuple[list[Tensor], Tensor | None, tuple[int, ...]]:  # fmt: skip
        """x gathered along `dim`, times each of factors [K, n], plus biases; the gathered x if `keep`; the lengths."""
        epoch, cut, guard = self._publish(operation, name, x, dim)
        rows, depth = cut.rows, x.shape[-1]
        outs, whole = [], None
        if keep or not all(_in_place(x.dtype, rows, b.shape[1], depth) for b in factors):
            whole = guard(lambda: self._collect(epoch, cut, x, dim))
        for b, bias in zip(factors, biases, strict=True):
            out = x.new_empty(_with(x.shape, dim, cut.length, b.shape[1]))
            if _in_place(x.dtype, rows, b.shape[1], depth):
                guard(lambda b=b, bias=bias, out=out: self._multiply_in_place(epoch, cut, x, b, bias, out))
            elif bias is None:
                torch.mm(whole.view(rows, depth), b, out=out.view(rows, b.shape[1]))
            else:
                torch.addmm(bias, whole.view(rows, depth), b, out=out.view(rows, b.shape[1]))
            outs.append(out)
        epoch.close()
        return outs, whole if keep else None, cut.lengths

    def gather(self, operation: str, name: str, x: Tensor, dim: int) -> Callable[[], Tensor]:
        """Begin to gather x along `dim`; the function returned waits and returns the whole."""
        epoch, cut, guard = self._publish(operation, name, x, dim)

        def finish() -> Tensor:
            whole = guard(lambda: self._collect(epoch, cut, x, dim))
            epoch.close()
            return whole

        return finish

    def matmul_scatter(
        self, operation: str, name: str, pairs: Pairs, dim: int, lengths: tuple[int, ...],
        bias: Tensor | None = None, addend: Tensor | None = None,
    ) -> Callable[[], Tensor]:  # fmt: skip
        """Begin sum over ranks of (sum of a @ b over `pairs`, + addend), cut along `dim` into `lengths`.

        The function returned waits for the peers' partials and returns this rank's part, plus bias.
        """
        x, width = pairs[0][0], pairs[0][1].shape[1]
        cut = Cut.of(x.shape, dim, lengths)
        signature = sum_signature(operation, x.dtype, x.shape, width, dim, lengths)
        epoch, part, guard = self._open_for_sum(operation, name, signature, x, cut.rows, width)
        flags = [epoch.flag(self._rank, rank) for rank in range(self._memory.size)]
        self._partials(epoch, scatter_panels(cut, self._rank), pairs, part, None if addend is not None else flags)
        if addend is not None:
            part += addend.reshape(part.shape)
            self._signal_all(epoch)
        if epoch.has_room:
            guard(epoch.agree)
        start, length = cut.start(self._rank), cut.lengths[self._rank]

        def finish() -> Tensor:
            out = x.new_empty(_with(x.shape, dim, length, width))
            guard(lambda: [epoch.wait(rank, self._rank) for rank in range(self._memory.size)])
            shape = (cut.outer, cut.length, cut.inner, width)
            wholes = [epoch.buffer(rank, part.dtype, shape) for rank in range(self._memory.size)]
            pieces = [whole[:, start : start + length] for whole in wholes]
            add_in_order(pieces, bias, out.view(cut.outer, length, cut.inner, width))
            epoch.close()
            return out

        return finish

    def matmul_all_reduce(self, operation: str, name: str, x: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        """sum over ranks of x @ b, + bias, on every rank, the same bits."""
        width, rank, size = b.shape[1], self._rank, self._memory.size
        out = x.new_empty((*x.shape[:-1], width))
        rows = out.numel() // width if width else 0
        signature = sum_signature(operation, x.dtype, x.shape, width)
        epoch, part, guard = self._open_for_sum(operation, name, signature, x, rows, width)
        cut = Cut(1, even_lengths(rows, size), 1)
        wholes = [epoch.buffer(peer, part.dtype, (rows, width)) for peer in range(size)]
        at_once = size == 2 or part.nbytes <= _SMALL_SUM_BYTES
        flags = None if at_once else [epoch.flag(rank, peer) for peer in range(size)]
        self._partials(epoch, scatter_panels(cut, rank), [(x, b)], part, flags)
        if at_once:
            epoch.signal(size)
        if epoch.has_room:
            guard(epoch.agree)
        if at_once:
            guard(lambda: [epoch.wait(peer, size) for peer in range(size)])
            add_in_order(wholes, bias, out.view(rows, width))
        else:
            guard(lambda: [epoch.wait(peer, rank) for peer in range(size)])
            parts = [whole.split(cut.lengths) for whole in wholes]
            # in place: of this rank's slot the others read every part but this one
            add_in_order([parts[peer][rank] for peer in range(size)], None, parts[rank][rank])
            epoch.signal(size)
            for peer, target in enumerate(out.view(rows, width).split(cut.lengths)):
                guard(lambda peer=peer: epoch.wait(peer, size))
                add_in_order([parts[peer][peer]], bias, target)
        epoch.close()
        return out

    # --- one epoch, step by step ------------------------------------------------------------------------------------

    def _publish(self, operation: str, name: str, x: Tensor, dim: int) -> tuple[Epoch, Cut, Callable]:
        """Put x into this rank's slot and say so."""
        signature = gather_signature(operation, x.dtype, x.shape, dim)
        place = self._group.announce(operation, name, x)
        guard = functools.partial(self._group.guard, place)
        epoch = guard(lambda: self._memory.announce(signature, x.shape[dim], x.nbytes))
        if epoch.has_room:
            epoch.buffer(self._rank, x.dtype, x.shape).copy_(x)
            epoch.signal(_IN_PLACE)
        guard(epoch.agree)
        if epoch.grown:  # into the new slot then; the flag of the old one may be up
            epoch.buffer(self._rank, x.dtype, x.shape).copy_(x)
            epoch.signal(_IN_NEW_PLACE)
        return epoch, Cut.of(x.shape, dim, epoch.lengths), guard

    def _collect(self, epoch: Epoch, cut: Cut, x: Tensor, dim: int) -> Tensor:
        whole = x.new_empty(_with(x.shape, dim, cut.length, x.shape[-1]))
        size = self._memory.size
        for rank in ((self._rank + step) % size for step in range(size)):
            epoch.wait(rank, _chunk(epoch))
            shard = epoch.buffer(rank, x.dtype, _with(x.shape, dim, cut.lengths[rank], x.shape[-1]))
            whole.narrow(dim, cut.start(rank), cut.lengths[rank]).copy_(shard)
        return whole

    def _multiply_in_place(
        self, epoch: Epoch, cut: Cut, x: Tensor, b: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:  # fmt: skip
        size, depth = self._memory.size, x.shape[-1]
        shards = [epoch.buffer(rank, x.dtype, (cut.shard_rows(rank), depth)) for rank in range(size)]
        if bias is not None:
            out.copy_(bias)
        arrives = [0 if rank == self._rank else epoch.flag(rank, _chunk(epoch)) for rank in range(size)]
        flags = Flags(epoch.number, self._memory.peers, self._memory.timeout_s, arrives, [0] * size)
        panels = gather_panels(cut, self._rank)
        target = out.view(cut.rows, b.shape[1])
        multiply = kernels.for_device(x.device).panel_gemm
        failed = multiply(panels, shards, b, target, flags, accumulate=bias is not None)
        if failed >= 0:
            epoch.raise_for(failed, f"with chunk {_chunk(epoch)}")

    def _open_for_sum(
        self, operation: str, name: str, signature: str, x: Tensor, rows: int, width: int
    ) -> tuple[Epoch, Tensor, Callable]:
        """An epoch with room for a partial [rows, width] in the precision of sums, and that room.

        The caller agrees once its partial is there, unless it was done here, to make room.
        """
        wide = sum_dtype(x.dtype)
        place = self._group.announce(operation, name, x)
        guard = functools.partial(self._group.guard, place)
        epoch = guard(lambda: self._memory.announce(signature, rows, rows * width * wide.itemsize))
        if not epoch.has_room:
            guard(epoch.agree)
        return epoch, epoch.buffer(self._rank, wide, (rows, width)), guard

    def _partials(
        self, epoch: Epoch, panels: Tensor, pairs: Pairs, part: Tensor, flags: Sequence[int] | None
    ) -> None:  # fmt: skip
        """part = sum of a @ b; `flags`: one for each owner, raised when its rows are there."""
        size, last = self._memory.size, len(pairs) - 1
        for index, (a, b) in enumerate(pairs):
            a = a.reshape(part.shape[0], b.shape[0])
            if a.dtype == part.dtype and not _in_place(a.dtype, a.shape[0], b.shape[1], b.shape[0]):
                torch.mm(a, b, out=part) if index == 0 else part.addmm_(a, b)
                if index == last and flags is not None:
                    self._signal_all(epoch)
                continue
            a = a if a.stride(1) == 1 else a.contiguous()
            leaves = flags if flags is not None and index == last else [0] * size
            raised = Flags(epoch.number, self._memory.peers, self._memory.timeout_s, [0] * size, leaves)
            kernels.for_device(a.device).panel_gemm(panels, [a] * size, b, part, raised, accumulate=index > 0)

    def _signal_all(self, epoch: Epoch) -> None:
        for rank in range(self._memory.size):
            epoch.signal(rank)


@functools.lru_cache(maxsize=256)
def gather_panels(cut: Cut, rank: int) -> Tensor:
    """`gather_order` as panel_gemm takes it: from each rank's shard into the whole."""
    return torch.tensor(gather_order(cut, rank), dtype=torch.int64).view(-1, 4)


@functools.lru_cache(maxsize=256)
def scatter_panels(cut: Cut, rank: int) -> Tensor:
    """`scatter_order` as panel_gemm takes it: from the whole into the whole, owner after owner."""
    panels = [(owner, row, row, rows) for owner, _, row, rows in scatter_order(cut, rank)]
    return torch.tensor(panels, dtype=torch.int64).view(-1, 4)


def _chunk(epoch: Epoch) -> int:
    return _IN_NEW_PLACE if epoch.grown else _IN_PLACE


def _in_place(dtype: torch.dtype, rows: int, out_features: int, in_features: int) -> bool:
    """Whether the packed product is as fast as torch's: it reads shards where they lie."""
    return dtype == torch.float64 or packed_gemm_is_faster(dtype, rows, out_features, in_features)


def _with(shape: Sequence[int], dim: int, length: int, width: int) -> tuple[int, ...]:
    """`shape` with `length` at `dim` and `width` at the end."""
    return (*shape[:dim], length, *shape[dim + 1 : -1], width)
