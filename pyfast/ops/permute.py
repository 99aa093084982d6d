"""Moving rows between token order and expert order in a mixture of experts.

T tokens, K slots a token, E experts, R = T * K sorted rows, H width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyfast import kernels
from pyfast.kernels.dtypes import sum_dtype
from pyfast.ops.checks import check_float
from pyfast.ops.dispatch import Op, differentiable
from pyfast.ops.row_map import RowMap, check_experts, row_map


def permute(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, RowMap]:
    """Copy each token's row once for each of its experts, sorted by expert.

    Args:
        x: [T, H] float32, bfloat16, float16 or float64. Strides are free; columns that are not contiguous cost a copy.
        experts: [T, K] int32 or int64, -1 for a dropped slot.
        num_experts: E.

    Returns:
        rows [R, H] of x's dtype with R = T * K whatever is dropped: expert e's are offsets[e] up to offsets[e + 1], in
        the order of their slots; rows from offsets[E] on are 0. And the RowMap that `unpermute` needs. The gradient by
        x is the sum over each token's rows in the order of its slots, in float32 (float64 for float64), rounded once.

    Raises:
        TypeError, ValueError: naming the argument that does not fit; see `pyfast.ops.row_map`.
    """
    check_float("x", x)
    check_experts(experts, num_experts)
    if x.dim() != 2 or x.shape[0] != experts.shape[0]:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; it must be ({experts.shape[0]}, H), a row for each token of experts "
            f"{tuple(experts.shape)}"
        )
    if x.device != experts.device:
        raise ValueError(f"x is on {x.device}, experts on {experts.device}; move them to one device")
    mapped = row_map(experts, num_experts)
    return _gather(x, mapped.gather, mapped.inverse, mapped.k), mapped


def unpermute(rows: Tensor, row_map: RowMap, weights: Tensor | None = None, *, k: int | None = None) -> Tensor:
    """Sum each token's rows, times their weights, back in token order: y_t = sum over k of weights[t, k] rows[t, k].

    Args:
        rows: [R, H] float32, bfloat16, float16 or float64; rows from offsets[E] on are not read.
        row_map: what `permute` or `row_map` returned.
        weights: [T, K] floating point, or None for 1. Float32 (float64 for float64 rows) is used as it is, other
            dtypes are converted to it.
        k: slots a token; needed only for a row_map put together by hand and no weights.

    Returns:
        y [T, H] of the dtype of rows: the sum runs over k in order in float32 (float64 for float64) and is rounded
        once; a dropped slot adds nothing. The gradient by weights is float32 too (float64 for float64), and right where
        a weight is 0.

    Raises:
        TypeError, ValueError: naming the argument that does not fit.
    """
    check_float("rows", rows)
    k = _check_map(rows, row_map, weights, k)
    if weights is not None:
        weights = weights.to(sum_dtype(rows.dtype))
    return _sum(rows, row_map.gather, row_map.slot, row_map.inverse, weights, k)


def _check_map(rows: Tensor, row_map: RowMap, weights: Tensor | None, k: int | None) -> int:
    """The slots a token, once everything fits."""
    if not isinstance(row_map, RowMap):
        raise TypeError(f"row_map is a {type(row_map).__name__}; the RowMap that permute returned is needed")
    for name in ("gather", "slot", "inverse"):
        entry = getattr(row_map, name)
        if not isinstance(entry, Tensor) or entry.dim() != 1:
            what = f"{tuple(entry.shape)}" if isinstance(entry, Tensor) else f"a {type(entry).__name__}"
            raise TypeError(f"row_map.{name} is {what}; an int32 tensor [rows] is needed")
    slots = row_map.inverse.shape[0]
    if rows.dim() != 2 or rows.shape[0] != slots:
        raise ValueError(
            f"rows has shape {tuple(rows.shape)}; it must be ({slots}, H), a row for each entry of row_map"
        )
    for name in ("gather", "slot", "inverse"):
        entry = getattr(row_map, name)
        if entry.dtype != torch.int32 or entry.shape != (slots,):
            raise ValueError(f"row_map.{name} is {entry.dtype} {tuple(entry.shape)}; it must be int32 ({slots},)")
        if entry.device != rows.device:
            raise ValueError(f"row_map.{name} is on {entry.device}, rows on {rows.device}; move them to one device")
    if weights is not None:
        check_float("weights", weights)
        if weights.device != rows.device:
            raise ValueError(f"weights is on {weights.device}, rows on {rows.device}; move them to one device")
    for known in (row_map.k, weights.shape[1] if weights is not None and weights.dim() == 2 else None):
        k = known if k is None else k
    if k is None:
        raise ValueError(
            "k is None; without weights and with a row_map put together by hand it must say the slots a token"
        )
    if isinstance(k, bool) or not isinstance(k, (int, torch.SymInt)):
        raise TypeError(f"k is {k!r}; an integer is needed")
    if k < 1 or slots % k:
        raise ValueError(f"k is {k}; it must divide the {slots} slots of row_map")
    if row_map.k not in (None, k):
        raise ValueError(f"k is {k}; row_map was made with {row_map.k} slots a token")
    if weights is not None and weights.shape != (slots // k, k):
        raise ValueError(f"weights has shape {tuple(weights.shape)}; it must be ({slots // k}, {k}), tokens and slots")
    return k


def _gather_forward(x: Tensor, gather: Tensor, inverse: Tensor, k: int) -> Tensor:
    return kernels.for_device(x.device).gather_rows(x, gather)


def _gather_fake(x: Tensor, gather: Tensor, inverse: Tensor, k: int) -> Tensor:
    return x.new_empty((gather.shape[0], x.shape[1]))


def _gather_context(ctx, inputs, output) -> None:
    x, gather, inverse, ctx.k = inputs
    ctx.save_for_backward(gather, inverse)


def _gather_gradients(ctx, drows: Tensor):
    gather, inverse = ctx.saved_tensors
    return _sum_op(drows, gather, gather, inverse, None, ctx.k), None, None, None


def _sum_forward(
    rows: Tensor, gather: Tensor, slot: Tensor, inverse: Tensor, weights: Tensor | None, k: int
) -> Tensor:  # fmt: skip
    return kernels.for_device(rows.device).unpermute_forward(rows, inverse, weights, k)


def _sum_fake(
    rows: Tensor, gather: Tensor, slot: Tensor, inverse: Tensor, weights: Tensor | None, k: int
) -> Tensor:  # fmt: skip
    return rows.new_empty((inverse.shape[0] // k, rows.shape[1]))


def _sum_context(ctx, inputs, output) -> None:
    rows, gather, slot, inverse, weights, ctx.k = inputs
    # The rows are needed for the gradient by the weights alone.
    ctx.save_for_backward(rows if ctx.needs_input_grad[4] else None, gather, slot, inverse, weights)


def _sum_gradients(ctx, dy: Tensor):
    rows, gather, slot, inverse, weights = ctx.saved_tensors
    need_drows, need_dweights = ctx.needs_input_grad[0], ctx.needs_input_grad[4]
    drows = dweights = None
    if weights is None:
        drows = _gather_op(dy, gather, inverse, ctx.k) if need_drows else None
    else:
        results = _sum_backward_op(dy, rows, gather, slot, weights, need_drows, need_dweights)
        drows, dweights = (r if need else None for r, need in zip(results, (need_drows, need_dweights), strict=True))
    return drows, None, None, None, dweights, None


def _sum_backward(
    dy: Tensor, rows: Tensor | None, gather: Tensor, slot: Tensor, weights: Tensor, need_drows: bool,
    need_dweights: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return kernels.for_device(dy.device).unpermute_backward(
        dy, rows, gather, slot, weights, need_drows, need_dweights
    )  # fmt: skip


def _sum_backward_fake(
    dy: Tensor, rows: Tensor | None, gather: Tensor, slot: Tensor, weights: Tensor, need_drows: bool,
    need_dweights: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return (
        dy.new_empty((gather.shape[0], dy.shape[1]) if need_drows else (0,)),
        weights.new_empty(weights.shape if need_dweights else (0,)),
    )


_gather_op = Op(
    "permute_rows", "(Tensor x, Tensor gather, Tensor inverse, SymInt k) -> Tensor", _gather_forward, _gather_fake
)  # fmt: skip
_sum_op = Op(
    "unpermute_rows",
    "(Tensor rows, Tensor gather, Tensor slot, Tensor inverse, Tensor? weights, SymInt k) -> Tensor",
    _sum_forward,
    _sum_fake,
)
_sum_backward_op = Op(
    "unpermute_rows_backward",
    "(Tensor dy, Tensor? rows, Tensor gather, Tensor slot, Tensor weights, bool need_drows, bool need_dweights) -> "
    "(Tensor, Tensor)",
    _sum_backward,
    _sum_backward_fake,
)
_gather = differentiable(_gather_op, _gather_context, _gather_gradients)
_sum = differentiable(_sum_op, _sum_context, _sum_gradients)
