"""What the transports of collective matmuls share: sums in rank order, and what ranks must agree on."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from pyfast.comm.exchange import combine

Pairs = Sequence[tuple[Tensor, Tensor]]  # operands a, b of products that are added up


def add_in_order(pieces: Sequence[Tensor], bias: Tensor | None, out: Tensor) -> None:
    """out = pieces[0] + pieces[1] + ... + bias, in this order and the pieces' precision, rounded once."""
    if bias is None and out.dtype == pieces[0].dtype:
        return combine(pieces, out, "sum")
    terms = [*pieces] if bias is None else [*pieces, bias]
    if len(terms) == 1:
        out.copy_(terms[0])
    elif len(terms) == 2:
        torch.add(terms[0], terms[1], out=out)
    else:
        total = terms[0] + terms[1]
        for term in terms[2:-1]:
            total += term
        torch.add(total, terms[-1], out=out)


@functools.lru_cache(maxsize=512)
def gather_signature(operation: str, dtype: torch.dtype, shape: Sequence[int], dim: int) -> str:
    """What all ranks must bring alike to a gather of `shape` along `dim`."""
    return f"{operation} {dtype} {_shape_except(shape, dim)} gathered along {dim}"


@functools.lru_cache(maxsize=512)
def sum_signature(
    operation: str,
    dtype: torch.dtype,
    shape: Sequence[int],
    width: int,
    dim: int | None = None,
    lengths: tuple[int, ...] = (),
) -> str:
    """What all ranks must bring alike to a sum of products of `shape` to `width`, cut along `dim` into `lengths`."""
    cut = "" if dim is None else f", cut along {dim} into {lengths}"
    return f"{operation} {dtype} {_shape_except(shape, -1)} to {width}{cut}"


def _shape_except(shape: Sequence[int], dim: int) -> str:
    """`shape` as text with a star at `dim`, where ranks may differ."""
    dim %= len(shape)
    return "[" + ", ".join("*" if d == dim else str(length) for d, length in enumerate(shape)) + "]"
