"""Gradient sums over data-parallel ranks with less on the wire: 16 bits or 1 bit a value instead of 32.

    bf16, fp16   each rank's gradient is rounded once; the ranks' values are summed in float32, in rank order. With all
                 of the sum on every rank (stage 0 of ZeRO) the sum is rounded once more on its way back.
    one_bit      of each value the sign, of each block of 256 the mean magnitude. What is left out (the residual) stays
                 on the rank and is added to its next gradient, so that over the steps everything arrives (Seide et al.
                 2014, Karimireddy et al. 2019). The ranks' values are summed in float32, in rank order.

fp16 values are scaled by a power of two a message, so that the largest is near 2^14: none overflows, and small
gradients keep their digits. NaN and infinity pass as NaN or infinity. All ranks get the same bits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyfast.comm import Work
from pyfast.parallel.config import COMPRESSIONS

if TYPE_CHECKING:
    from pyfast.parallel.buckets import Bucket

_BLOCK = 256  # values of one scale in one_bit
_SCALE_BYTES = 4
_FP16_EXPONENT = 14  # of the largest value of a message


class Compression:
    """How the gradients of buckets are summed over their data-parallel group; holds their residuals.

    kind: one of "bf16", "fp16", "one_bit".
    """

    def __init__(self, kind: str) -> None:
        self._codec = {"bf16": _BFloat16, "fp16": _Float16, "one_bit": _OneBit}[kind]()
        self._feedback = kind == "one_bit"
        self._residuals: dict[Bucket, Tensor] = {}

    def prepare(self, bucket: Bucket) -> None:
        """Called once for each bucket. ValueError for one that cannot be compressed."""
        if bucket.grad_shard.dtype != torch.float32:
            raise ValueError(
                f"compression: the gradients of {bucket.names[0]} .. are {bucket.grad_shard.dtype}; only float32 ones "
                "(of float32, bfloat16 and float16 parameters) are compressed, use compression='none'"
            )
        if self._feedback and bucket.data_group is not None:
            self._residuals[bucket] = torch.zeros(bucket.numel, device=bucket.grad_shard.device)

    def residuals(self) -> dict[str, dict[str, Tensor]]:
        """Kind -> parameter name -> what this rank has not sent of its gradients. The kind names the rank's place among
        the data-parallel ranks, each of which has residuals of its own."""
        result: dict[str, dict[str, Tensor]] = {}
        for bucket, residual in self._residuals.items():
            names = result.setdefault(f"{RESIDUAL}{bucket.data_group.rank}", {})
            names.update((slot.name, residual[slot.place].view(slot.shape)) for slot in bucket.slots)
        return result

    def reduce_scatter(self, bucket: Bucket, out: Tensor, name: str) -> Work:
        """Start the sum of the ranks' `bucket.main_grad`, of which `out` gets this rank's stretch."""
        group = bucket.data_group
        rows = self._encode(bucket, bucket.main_grad.view(group.size, -1))
        work = group.all_to_all(rows, name=name, async_op=True)

        def finish() -> None:
            self._sum(work.wait(), out)
            _clear_gaps(bucket, out, group.rank * out.numel())

        return Work(finish, out)

    def all_reduce(self, bucket: Bucket, name: str) -> Work:
        """Start the sum of the ranks' `bucket.main_grad`, in place."""
        group, grad = bucket.data_group, bucket.main_grad
        if self._feedback:  # a bit a value from every rank: cheaper than rounding the sum to bits once more
            work = group.all_gather(self._encode(bucket, grad.view(1, -1))[0], name=name, async_op=True)

            def finish() -> None:
                self._sum(work.wait(), grad)
                _clear_gaps(bucket, grad, 0)

        else:
            work = group.all_to_all(self._encode(bucket, grad.view(group.size, -1)), name=name, async_op=True)

            def finish() -> None:
                mine = grad.new_empty(grad.numel() // group.size)
                self._sum(work.wait(), mine)
                sums = group.all_gather(self._codec.encode(mine[None])[0], name=name)
                for row, message in zip(grad.view(group.size, -1), sums, strict=True):
                    row.copy_(self._codec.decode(message, row.numel()))

        return Work(finish, grad)

    def _encode(self, bucket: Bucket, rows: Tensor) -> Tensor:
        """The messages [rows, bytes] for the rows of this rank's gradient; what they lack becomes the residual."""
        if not self._feedback:
            return self._codec.encode(rows)
        residual = self._residuals[bucket].view(rows.shape)
        wanted = rows + residual
        messages = self._codec.encode(wanted)
        for row, message, left in zip(wanted, messages, residual, strict=True):
            rest = row - self._codec.decode(message, row.numel())
            # a step with NaN or infinity in it is skipped: nothing of it may stay
            left.copy_(torch.where(rest.isfinite(), rest, left))
        _clear_gaps(bucket, self._residuals[bucket], 0)
        return messages

    def _sum(self, messages: Tensor, out: Tensor) -> None:
        """out = the sum of the ranks' messages, in rank order."""
        out.copy_(self._codec.decode(messages[0], out.numel()))
        for message in messages[1:]:
            out.add_(self._codec.decode(message, out.numel()))


RESIDUAL = "residual_"  # what the kinds of `Compression.residuals` begin with


def _clear_gaps(bucket: Bucket, flat: Tensor, begin: int) -> None:
    """Zero what lies between parameters in `flat`, the bucket's stretch from `begin` on: a sign is never zero."""
    ends = [0] + [slot.place.stop for slot in bucket.slots]
    starts = [slot.place.start for slot in bucket.slots] + [bucket.numel]
    for end, start in zip(ends, starts, strict=True):
        low, high = max(end - begin, 0), min(start - begin, flat.numel())
        if low < high:
            flat[low:high] = 0


class _BFloat16:
    def encode(self, rows: Tensor) -> Tensor:
        """Messages uint8 [rows, bytes] of float32 [rows, length]."""
        return rows.bfloat16().view(torch.uint8)

    def decode(self, message: Tensor, length: int) -> Tensor:
        """float32 [length] of one message."""
        return message.view(torch.bfloat16).float()


class _Float16:
    """A power of two, then each value times it."""

    def encode(self, rows: Tensor) -> Tensor:
        largest = rows.abs().amax(1, keepdim=True) if rows.shape[1] else rows.new_zeros(len(rows), 1)
        exponent = torch.frexp(torch.where(largest.isfinite(), largest, 1.0)).exponent
        # from -100 to 100: scale and its inverse are ordinary numbers
        scale = torch.ldexp(torch.ones_like(largest), (_FP16_EXPONENT - exponent).clamp(-100, 100))
        return torch.cat([scale.view(torch.uint8), (rows * scale).half().view(torch.uint8)], dim=1)

    def decode(self, message: Tensor, length: int) -> Tensor:
        scale = message[:_SCALE_BYTES].view(torch.float32)
        return message[_SCALE_BYTES:].view(torch.float16).float() / scale


class _OneBit:
    """The mean magnitude of each block, then a bit a value: 1 for those that are not negative."""

    def encode(self, rows: Tensor) -> Tensor:
        count, length = rows.shape
        blocks = math.ceil(length / _BLOCK)
        magnitudes = torch.nn.functional.pad(rows.abs(), (0, blocks * _BLOCK - length)).view(count, blocks, _BLOCK)
        sizes = (length - _BLOCK * torch.arange(blocks, device=rows.device)).clamp(max=_BLOCK)
        scales = magnitudes.sum(2) / sizes
        bits = (rows >= 0).view(count, length // 8, 8) * _places(rows.device)
        filler = rows.new_zeros(count, -(length // 8) % _SCALE_BYTES, dtype=torch.uint8)  # the next row has scales too
        return torch.cat([scales.view(torch.uint8), bits.sum(2, dtype=torch.uint8), filler], dim=1)

    def decode(self, message: Tensor, length: int) -> Tensor:
        end = math.ceil(length / _BLOCK) * _SCALE_BYTES
        scales = message[:end].view(torch.float32).repeat_interleave(_BLOCK)[:length]
        positive = (message[end : end + length // 8, None] & _places(message.device)).view(-1) > 0
        return torch.where(positive, scales, -scales)


def _places(device: torch.device) -> Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)


__all__ = ["COMPRESSIONS", "RESIDUAL", "Compression"]
