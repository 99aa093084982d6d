"""Collective matmuls as a collective of the group, then a product: where ranks do not share memory.

The same methods, sums and agreement as `SharedTransport`; nothing overlaps inside one, but the backward passes still
run a whole product beside each collective.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyfast import kernels
from pyfast.comm import Group
from pyfast.kernels.dtypes import sum_dtype
from pyfast.ops.linear import linear
from pyfast.ops.overlap_sums import Pairs, add_in_order, gather_signature, sum_signature


class CollectiveTransport:
    """The transport of any group; the same methods as `SharedTransport`, which describes them."""

    name = "collective"

    def __init__(self, group: Group) -> None:
        self._group = group

    def gather_matmul(
        self, operation: str, name: str, x: Tensor, dim: int, factors: Sequence[Tensor],
        biases: Sequence[Tensor | None], keep: bool,
    ) -> tuple[list[Tensor], Tensor | None, tuple[int, ...]]:  # fmt: skip
        lengths, finish = self._start_gather(operation, name, x, dim)
        whole = finish()
        outs = [linear(whole, b.t(), bias) for b, bias in zip(factors, biases, strict=True)]
        return outs, whole if keep else None, lengths

    def gather(self, operation: str, name: str, x: Tensor, dim: int) -> Callable[[], Tensor]:
        return self._start_gather(operation, name, x, dim)[1]

    def _start_gather(
        self, operation: str, name: str, x: Tensor, dim: int
    ) -> tuple[tuple[int, ...], Callable[[], Tensor]]:
        lengths = self._agree(gather_signature(operation, x.dtype, x.shape, dim), x.shape[dim], x.device)
        padded = _padded(x, dim, max(lengths))
        work = self._group.all_gather(padded, name=name, async_op=True)

        def finish() -> Tensor:
            shards = work.wait()
            return torch.cat([shards[rank].narrow(dim, 0, length) for rank, length in enumerate(lengths)], dim)

        return lengths, finish

    def matmul_scatter(
        self, operation: str, name: str, pairs: Pairs, dim: int, lengths: tuple[int, ...],
        bias: Tensor | None = None, addend: Tensor | None = None,
    ) -> Callable[[], Tensor]:  # fmt: skip
        x, width = pairs[0][0], pairs[0][1].shape[1]
        signature = sum_signature(operation, x.dtype, x.shape, width, dim, lengths)
        self._agree(signature, 0, x.device)
        whole = _partial(pairs, addend)
        parts = torch.stack([_padded(part, dim, max(lengths)) for part in whole.split(lengths, dim)])
        work = self._group.reduce_scatter(parts, name=name, async_op=True)

        def finish() -> Tensor:
            total = work.wait().narrow(dim, 0, lengths[self._group.rank])
            out = torch.empty(total.shape, dtype=x.dtype, device=x.device)
            add_in_order([total], bias, out)
            return out

        return finish

    def matmul_all_reduce(self, operation: str, name: str, x: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        self._agree(sum_signature(operation, x.dtype, x.shape, b.shape[1]), 0, x.device)
        total = _partial([(x, b)], None)
        self._group.all_reduce(total, name=name)
        out = torch.empty(total.shape, dtype=x.dtype, device=x.device)
        add_in_order([total], bias, out)
        return out

    def _agree(self, signature: str, length: int, device: torch.device) -> tuple[int, ...]:
        """Every rank's `length`; ValueError, the same on all ranks, when their signatures differ."""
        if self._group.size == 1:
            return (length,)
        code = _code(signature)
        mine = torch.tensor([code, length], device=device)
        every = self._group.all_gather(mine, name="agree on shapes").tolist()
        if any(other != code for other, _ in every):
            texts = self._group.all_gather_object(signature, name="shapes that differ")
            said = "; ".join(f"rank {rank}: {text}" for rank, text in zip(self._group.ranks, texts, strict=True))
            raise ValueError(f"the ranks disagree on an operation's shapes or dtypes: {said}. Nothing was sent.")
        return tuple(length for _, length in every)


@functools.lru_cache(maxsize=256)
def _code(signature: str) -> int:
    return int.from_bytes(hashlib.sha256(signature.encode()).digest()[:7], "little")


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    """x with zeros behind it along `dim`: collectives want equal shapes."""
    if x.shape[dim] == length:
        return x
    padding = x.new_zeros([length - x.shape[dim] if d == dim else n for d, n in enumerate(x.shape)])
    return torch.cat([x, padding], dim)


def _partial(pairs: Pairs, addend: Tensor | None) -> Tensor:
    """Sum of a @ b, + addend, in the precision of sums."""
    x, width = pairs[0][0], pairs[0][1].shape[1]
    whole = torch.empty((*x.shape[:-1], width), dtype=sum_dtype(x.dtype), device=x.device)
    for index, (a, b) in enumerate(pairs):
        kernels.for_device(a.device).gemm(
            a.reshape(-1, a.shape[-1]), b, whole.view(-1, width), accumulate=index > 0
        )  # fmt: skip
    return whole if addend is None else whole.add_(addend)
