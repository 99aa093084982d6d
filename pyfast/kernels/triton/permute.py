"""Row movement: tokens to rows sorted by expert, their weighted sum back, and the gradients of both.

Where there is no row, its number of columns is taken as 0: the same masks then serve for dropped slots and for the last
block of columns.

Shape letters: R = T * K sorted rows, T tokens, K slots a token, H columns.
Prefixes: p_ pointer, o_ offset, b_ block, m_ mask, i_ index.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pyfast.kernels.triton.moe_launch import run_simple

MOST_COLUMNS = 1024  # a program's
GATHERED = 4  # rows a program of gather_rows: as many loads in flight a thread


@triton.jit
def gather_rows_kernel(p_x, p_gather, p_rows, R, H, stride_xt, stride_xh, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """rows[r] = x[gather[r]], 0 where gather[r] is -1, for ROWS rows at once. rows [R, H] contiguous."""
    o_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_h = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    b_token = tl.load(p_gather + o_r, mask=o_r < R, other=-1)
    p_source = (p_x + b_token.to(tl.int64) * stride_xt)[:, None] + o_h.to(tl.int64)[None, :] * stride_xh
    b_x = tl.load(p_source, mask=(b_token >= 0)[:, None] & (o_h < H)[None, :], other=0.0)
    p_target = (p_rows + o_r.to(tl.int64) * H)[:, None] + o_h[None, :]
    tl.store(p_target, b_x, mask=(o_r < R)[:, None] & (o_h < H)[None, :])


@triton.jit
def unpermute_kernel(
    p_rows, p_inverse, p_weights, p_y, H, stride_rr, stride_rh,
    WEIGHTED: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """y[t] = sum over k = 0, 1, ... of weights[t, k] rows[inverse[t * K + k]], in float32, rounded once."""
    i_token = tl.program_id(0)
    o_h = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    b_y = tl.zeros([COLUMNS], tl.float32)
    for i_k in tl.static_range(K):
        i_row = tl.load(p_inverse + i_token * K + i_k).to(tl.int64)
        p_row = p_rows + i_row * stride_rr + o_h.to(tl.int64) * stride_rh
        b_row = tl.load(p_row, mask=o_h < tl.where(i_row >= 0, H, 0), other=0.0).to(tl.float32)
        if WEIGHTED:
            # A dropped slot adds 0 whatever its weight is, infinite included.
            b_row *= tl.where(i_row >= 0, tl.load(p_weights + i_token * K + i_k), 0.0)
        b_y += b_row
    tl.store(p_y + i_token.to(tl.int64) * H + o_h, b_y.to(p_y.dtype.element_ty), mask=o_h < H)


@triton.jit
def unpermute_backward_kernel(
    p_dy, p_rows, p_gather, p_slot, p_weights, p_drows, p_dweights, H, stride_yt, stride_yh, stride_rr, stride_rh,
    NEED_ROWS: tl.constexpr, NEED_WEIGHTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """drows[r] = weights[slot[r]] dy[gather[r]] and dweights[slot[r]] = <dy[gather[r]], rows[r]> over all columns."""
    i_row = tl.program_id(0).to(tl.int64)
    i_token = tl.load(p_gather + i_row).to(tl.int64)
    i_slot = tl.load(p_slot + i_row)
    weight = tl.load(p_weights + i_slot, mask=i_slot >= 0, other=0.0)
    used = tl.where(i_slot >= 0, H, 0)
    b_sum = tl.zeros([COLUMNS], tl.float32)
    for o_first in tl.range(0, H, COLUMNS):
        o_h = o_first + tl.arange(0, COLUMNS)
        p_source = p_dy + i_token * stride_yt + o_h.to(tl.int64) * stride_yh
        b_dy = tl.load(p_source, mask=o_h < used, other=0.0).to(tl.float32)
        if NEED_ROWS:
            tl.store(p_drows + i_row * H + o_h, (b_dy * weight).to(p_drows.dtype.element_ty), mask=o_h < H)
        if NEED_WEIGHTS:
            p_row = p_rows + i_row * stride_rr + o_h.to(tl.int64) * stride_rh
            b_sum += b_dy * tl.load(p_row, mask=o_h < used, other=0.0).to(tl.float32)
    if NEED_WEIGHTS:
        tl.store(p_dweights + i_slot, tl.sum(b_sum, 0), mask=i_slot >= 0)


def gather_rows(x: Tensor, gather: Tensor) -> Tensor:
    """rows [R, H] of x [T, H]: rows[r] = x[gather[r]], 0 where gather[r] is -1."""
    count, width = gather.shape[0], x.shape[1]
    rows = x.new_empty(count, width)
    if rows.numel():
        columns = _columns(width)
        run_simple(
            gather_rows_kernel, (triton.cdiv(count, GATHERED), triton.cdiv(width, columns)), _warps(columns),
            x, gather.contiguous(), rows, count, width, *x.stride(), ROWS=GATHERED, COLUMNS=columns,
        )  # fmt: skip
    return rows


def unpermute_forward(rows: Tensor, inverse: Tensor, weights: Tensor | None, k: int) -> Tensor:
    """y [T, H] of rows [R, H] and inverse [T * k]; weights [T, k] float32, or None for a plain sum."""
    width = rows.shape[1]
    tokens = inverse.shape[0] // max(k, 1)
    y = rows.new_empty(tokens, width)
    if y.numel():
        columns = _columns(width)
        run_simple(
            unpermute_kernel, (tokens, triton.cdiv(width, columns)), _warps(columns),
            rows, inverse.contiguous(), None if weights is None else weights.contiguous(), y, width, *rows.stride(),
            WEIGHTED=weights is not None, K=k, COLUMNS=columns,
        )  # fmt: skip
    return y


def unpermute_backward(
    dy: Tensor, rows: Tensor | None, gather: Tensor, slot: Tensor, weights: Tensor, need_drows: bool,
    need_dweights: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(drows [R, H] like dy, dweights [T, K] float32) of dy [T, H]; empty where not needed, then rows may be None."""
    width, count = dy.shape[1], gather.shape[0]
    drows = dy.new_empty((count, width) if need_drows else (0,))
    dweights = weights.new_zeros(weights.shape if need_dweights else (0,))  # a dropped slot has no row to write it
    if count and (need_drows or need_dweights):
        columns = _columns(width)
        run_simple(
            unpermute_backward_kernel, count, _warps(columns),
            dy, rows if need_dweights else None, gather.contiguous(), slot.contiguous(), weights.contiguous(), drows,
            dweights, width, *dy.stride(), *(rows.stride() if need_dweights else (0, 0)),
            NEED_ROWS=need_drows, NEED_WEIGHTS=need_dweights, COLUMNS=columns,
        )  # fmt: skip
    return drows, dweights


def _columns(width: int) -> int:
    return min(MOST_COLUMNS, max(16, triton.next_power_of_2(width)))


def _warps(columns: int) -> int:
    """Eight columns a thread: 16 bytes of bfloat16, the widest load there is."""
    return min(8, max(1, columns // 256))
