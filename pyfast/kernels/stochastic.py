"""Stochastic rounding to bfloat16 with random bits that are a function of (seed, step, index): a counter, no generator.

So a value is rounded alike on any number of threads, in any cut of a buffer, and again after a resume. Every backend
uses `key`; the rest is the plain-torch form of what csrc/cpu/adamw.cpp does, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK64, _MASK32 = 2**64 - 1, 2**32 - 1


def key(seed: int, step: int) -> int:
    """64 bits from (seed, step), by SplitMix64 (Steele et al. 2014)."""
    return _splitmix64(_splitmix64(seed & _MASK64) ^ (step & _MASK64))


def indices(first: int, count: int, places: Tensor | None = None) -> Tensor:
    """The indices of `count` values from position `first` of a buffer on: int64 [count].

    places: int64 [n, 2], rows (start, index); from position start to the next row's they count from index on. None:
    index and position are the same.
    """
    position = torch.arange(first, first + count)
    if places is None:
        return position
    starts, index = places[:, 0].contiguous(), places[:, 1]
    run = torch.searchsorted(starts, position, right=True) - 1
    return position - starts[run] + index[run]


def random_bits(seed: int, step: int, index: Tensor) -> Tensor:
    """32 random bits for each of the int64 indices, which are not negative: int64, in [0, 2^32)."""
    high, which = (index >> 32).unique(return_inverse=True)
    keys = [_splitmix64(key(seed, step) ^ value) for value in high.tolist()]
    before, between = (index.new_tensor([k >> shift & _MASK32 for k in keys])[which] for shift in (0, 32))
    x = (index & _MASK32) ^ before  # the finalizer of MurmurHash3 (Appleby), with a key before and one in the middle
    x = _times(x ^ (x >> 16), 0x85EBCA6B)
    x = _times(((x ^ (x >> 13)) + between) & _MASK32, 0xC2B2AE35)
    return x ^ (x >> 16)


def round_randomly(x: Tensor, bits: Tensor) -> Tensor:
    """float32 `x` in bfloat16, up or down with the chances that keep the mean; `bits`: 16 random bits a value."""
    rounded = (x.contiguous().view(torch.int32).long() + (bits & 0xFFFF).view(x.shape)) & 0xFFFF0000
    signed = torch.where(rounded >= 2**31, rounded - 2**32, rounded).int()  # as the pattern of an int32
    return torch.where(x.isnan(), x, signed.view(torch.float32)).bfloat16()


def _times(x: Tensor, factor: int) -> Tensor:
    """x factor mod 2^32, in halves: the whole product does not fit 63 bits."""
    return (x * (factor & 0xFFFF) + ((x * (factor >> 16) & 0xFFFF) << 16)) & _MASK32


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)
