"""Grouped GEMM: every expert's rows times its own weight, and the gradients by rows, weights and bias.

Rows stand sorted by expert; expert e owns rows offsets[e] .. offsets[e+1]. Forward and the gradient by the rows are one
persistent kernel (the weight read along its other dimension); the gradient by the weights has a program a tile of
a weight, whose sum runs over the expert's rows in a fixed order. No atomics, sums in float32, nothing read back.

Shape letters: R sorted rows, T tokens, E experts, C columns that are summed over, N columns of the result.
Prefixes: p_ pointer, d_ tensor descriptor or pointer, o_ offset, b_ block in registers, m_ mask, i_ index.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyfast.kernels.triton.expert_tiles import (
    cumulative_tiles,
    halves,
    locate,
    row_bound,
    row_tile_bound,
    tile_pointers,
    zero_outside,
)
from pyfast.kernels.triton.moe_launch import descriptor, launch_for, run_simple

# ---------------------------------------------------------------------------------------------------------------------
# Loads shared with the fused MLP
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def load_rows(
    d_x, o_source, o_row, o_c, C, stride_xr, stride_xc,
    DESCRIPTOR: tl.constexpr, EVEN: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_C] of x: the rows `o_source` by pointers, or the rows from `o_row` on by descriptor."""
    if DESCRIPTOR:
        b_x = d_x.load([o_row, o_c])
    else:
        o_cols = o_c + tl.arange(0, BLOCK_C)
        p_rows = d_x + o_source.to(tl.int64) * stride_xr
        p_tile = p_rows[:, None] + o_cols.to(tl.int64)[None, :] * stride_xc
        if EVEN:
            b_x = tl.load(p_tile)
        else:
            b_x = tl.load(p_tile, mask=(o_cols < C)[None, :], other=0.0)
    return b_x


@triton.jit
def load_weight(
    d_w, i_expert, o_n, o_c, N, C, stride_we, stride_wn, stride_wc,
    DESCRIPTOR: tl.constexpr, C_INNER: tl.constexpr, EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """[BLOCK_C, BLOCK_N] of expert `i_expert`'s weight; C_INNER: summed-over columns are the weight's inner ones."""
    if DESCRIPTOR:
        if C_INNER:
            b_w = tl.reshape(d_w.load([i_expert, o_n, o_c]), [BLOCK_N, BLOCK_C]).T
        else:
            b_w = tl.reshape(d_w.load([i_expert, o_c, o_n]), [BLOCK_C, BLOCK_N])
    else:
        o_cols = o_c + tl.arange(0, BLOCK_C)
        o_out = o_n + tl.arange(0, BLOCK_N)
        p_weight = d_w + i_expert.to(tl.int64) * stride_we
        p_tile = p_weight + o_cols.to(tl.int64)[:, None] * stride_wc + o_out.to(tl.int64)[None, :] * stride_wn
        if EVEN:
            b_w = tl.load(p_tile, mask=(o_out < N)[None, :], other=0.0)
        else:
            b_w = tl.load(p_tile, mask=(o_cols < C)[:, None] & (o_out < N)[None, :], other=0.0)
    return b_w


@triton.jit
def source_rows(p_gather, o_row, end, BLOCK_M: tl.constexpr, GATHER: tl.constexpr):
    """[BLOCK_M] the rows of x that the sorted rows from `o_row` on come from. Beyond `end` the last one repeats, so
    that loads need no mask; what is computed there is not stored."""
    o_rows = tl.minimum(o_row + tl.arange(0, BLOCK_M), end - 1)
    if GATHER:
        o_source = tl.load(p_gather + o_rows)
    else:
        o_source = o_rows
    return o_source


# ---------------------------------------------------------------------------------------------------------------------
# Rows times weights
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def grouped_gemm_kernel(
    d_x, d_w, p_bias, p_gather, p_offsets, p_y,
    R, E, N, C, stride_xr, stride_xc, stride_we, stride_wn, stride_wc, stride_be, stride_bn,
    GATHER: tl.constexpr, BIAS: tl.constexpr, X_DESCRIPTOR: tl.constexpr, W_DESCRIPTOR: tl.constexpr,
    C_INNER: tl.constexpr, EVEN: tl.constexpr, ROWS_FIRST: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[r, n] = sum over c of x[source of r, c] w[expert of r, n, c] (+ bias[expert of r, n]); y [R, N] contiguous."""
    b_last = cumulative_tiles(p_offsets, E, R, BLOCK_M, EXPERTS)
    tiles_n = tl.cdiv(N, BLOCK_N)
    total = tl.max(b_last, 0) * tiles_n
    for i_tile in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        i_expert, o_row, end, i_n = locate(i_tile, b_last, p_offsets, R, tiles_n, BLOCK_M, ROWS_FIRST)
        o_n = i_n * BLOCK_N
        o_source = source_rows(p_gather, o_row, end, BLOCK_M, GATHER)
        b_y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for o_c in tl.range(0, C, BLOCK_C):
            b_x = load_rows(d_x, o_source, o_row, o_c, C, stride_xr, stride_xc, X_DESCRIPTOR, EVEN, BLOCK_C)
            b_w = load_weight(
                d_w, i_expert, o_n, o_c, N, C, stride_we, stride_wn, stride_wc, W_DESCRIPTOR, C_INNER, EVEN,
                BLOCK_N, BLOCK_C,
            )  # fmt: skip
            b_y = tl.dot(b_x, b_w, b_y, input_precision=PRECISION)
        o_cols = o_n + tl.arange(0, BLOCK_N)
        o_rows = o_row + tl.arange(0, BLOCK_M)
        m_cols = o_cols < N
        if BIAS:
            p_row = p_bias + i_expert.to(tl.int64) * stride_be + o_cols.to(tl.int64) * stride_bn
            b_y += tl.load(p_row, mask=m_cols, other=0.0).to(tl.float32)[None, :]
        # An expert's last tile is stored under a mask: the rows behind it are the next expert's.
        p_tile = tile_pointers(p_y, o_rows, o_n, N, BLOCK_N)
        tl.store(p_tile, b_y.to(p_y.dtype.element_ty), mask=(o_rows < end)[:, None] & m_cols[None, :])
    zero_outside(p_y, p_offsets, E, R, N, BLOCK_M, BLOCK_N)


def grouped_gemm(
    x: Tensor, w: Tensor, offsets: Tensor, *, transpose: bool = False, bias: Tensor | None = None,
    gather: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y [R, N] of x [R, K] and w [E, N, K], or y [R, K] of x [R, N] with `transpose`; rows outside the offsets are 0.

    gather [R] int32: x is [T, .] and sorted row r reads its row gather[r]. bias [E, N].
    """
    experts = w.shape[0]
    rows = x.shape[0] if gather is None else gather.shape[0]
    out, inner = (w.shape[2], w.shape[1]) if transpose else (w.shape[1], w.shape[2])
    stride_n, stride_c = (w.stride(2), w.stride(1)) if transpose else (w.stride(1), w.stride(2))
    y = x.new_empty(rows, out)
    if rows == 0 or out == 0:
        return y
    if experts == 0:
        return y.zero_()
    launch = launch_for("gemm", rows, experts, x, w)
    config = launch.config
    block_w = [1, config.block_k, config.block_n] if transpose else [1, config.block_n, config.block_k]
    d_w = descriptor(w, block_w, launch)
    d_x = None if gather is not None else descriptor(x, [config.block_m, config.block_k], launch)
    tiles = (row_tile_bound(rows, experts, config.block_m) + 2) * triton.cdiv(out, config.block_n)
    launch.run(
        grouped_gemm_kernel, min(launch.programs, tiles),
        x if d_x is None else d_x, w if d_w is None else d_w, bias, gather, offsets, y,
        rows, experts, out, inner, x.stride(0), x.stride(1), w.stride(0), stride_n, stride_c,
        0 if bias is None else bias.stride(0), 0 if bias is None else bias.stride(1),
        GATHER=gather is not None, BIAS=bias is not None, X_DESCRIPTOR=d_x is not None, W_DESCRIPTOR=d_w is not None,
        C_INNER=not transpose, EVEN=inner % config.block_k == 0, ROWS_FIRST=rows_first(w, x),
        EXPERTS=triton.next_power_of_2(experts),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_C=config.block_k, PRECISION="ieee",
    )  # fmt: skip
    return y


def rows_first(w: Tensor, x: Tensor) -> bool:
    """Whether to walk down the rows before the columns: while all weights are more bytes than all rows, a slice of
    the weights is what should be read once."""
    return w.numel() * w.element_size() >= x.numel() * x.element_size()


# ---------------------------------------------------------------------------------------------------------------------
# The gradient by the weights
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def step_rows(p_gather, o_row, end, GATHER: tl.constexpr, BLOCK_R: tl.constexpr):
    """[BLOCK_R] the rows of x that the sorted rows from `o_row` on come from; beyond `end` the first row there is."""
    o_rows = o_row + tl.arange(0, BLOCK_R)
    if GATHER:
        o_source = tl.load(p_gather + o_rows, mask=o_rows < end, other=0)
    else:
        o_source = o_rows
    return o_source


@triton.jit
def load_step(p_x, o_source, o_col, N, stride_xr, stride_xn, EVEN: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_R, BLOCK_N] of x, all rows of which exist."""
    o_cols = o_col + tl.arange(0, BLOCK_N)
    p_rows = p_x + o_source.to(tl.int64) * stride_xr
    p_tile = p_rows[:, None] + o_cols.to(tl.int64)[None, :] * stride_xn
    if EVEN:
        b_x = tl.load(p_tile)
    else:
        b_x = tl.load(p_tile, mask=(o_cols < N)[None, :], other=0.0)
    return b_x


@triton.jit
def load_step_transposed(p_x, o_source, o_col, N, stride_xr, stride_xn, EVEN: tl.constexpr, BLOCK_N: tl.constexpr):
    """The same as [BLOCK_N, BLOCK_R]: pointers that stand transposed, as a transposed tile is not copied
    asynchronously before Hopper."""
    o_cols = o_col + tl.arange(0, BLOCK_N)
    p_rows = p_x + o_source.to(tl.int64) * stride_xr
    p_tile = p_rows[None, :] + o_cols.to(tl.int64)[:, None] * stride_xn
    if EVEN:
        b_x = tl.load(p_tile)
    else:
        b_x = tl.load(p_tile, mask=(o_cols < N)[:, None], other=0.0)
    return b_x


@triton.jit
def load_last_step(p_x, o_source, m_rows, o_col, N, stride_xr, stride_xn, BLOCK_N: tl.constexpr):
    """[BLOCK_R, BLOCK_N] where only some rows exist, 0 in the others: in both factors, as 0 * inf is not a number."""
    o_cols = o_col + tl.arange(0, BLOCK_N)
    p_rows = p_x + o_source.to(tl.int64) * stride_xr
    p_tile = p_rows[:, None] + o_cols.to(tl.int64)[None, :] * stride_xn
    return tl.load(p_tile, mask=m_rows[:, None] & (o_cols < N)[None, :], other=0.0)


@triton.jit
def store_weight(b_dw, p_weight, o_n, o_k, N, K, stride_wn, stride_wk, ACCUMULATE: tl.constexpr):
    """Stores a tile of one expert's weight gradient [N, K] of any strides, or adds it."""
    o_rows = o_n + tl.arange(0, b_dw.shape[0])
    o_cols = tl.arange(0, b_dw.shape[1])
    p_rows = p_weight + o_rows.to(tl.int64) * stride_wn + o_k.to(tl.int64) * stride_wk
    p_tile = p_rows[:, None] + o_cols.to(tl.int64)[None, :] * stride_wk
    m_tile = (o_rows < N)[:, None] & (o_k + o_cols < K)[None, :]
    if ACCUMULATE:
        b_dw += tl.load(p_tile, mask=m_tile, other=0.0)
    tl.store(p_tile, b_dw.to(p_weight.dtype.element_ty), mask=m_tile)


@triton.jit
def grouped_wgrad_kernel(
    p_dy, p_x, p_gather, p_offsets, p_dw,
    R, N, K, stride_yr, stride_yn, stride_xr, stride_xk, stride_we, stride_wn, stride_wk,
    GATHER_DY: tl.constexpr, GATHER_X: tl.constexpr, ACCUMULATE: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dw[e, n, k] (+)= sum over e's rows of dy[r, n] x[r, k]. An expert without rows: 0, or left alone."""
    tiles_k = tl.cdiv(K, BLOCK_K)
    tiles = tl.cdiv(N, BLOCK_N) * tiles_k
    i_expert = tl.program_id(0) // tiles
    i_tile = tl.program_id(0) % tiles
    o_n = (i_tile // tiles_k) * BLOCK_N
    o_k = (i_tile % tiles_k) * BLOCK_K
    begin = row_bound(p_offsets, i_expert, R)
    end = row_bound(p_offsets, i_expert + 1, R)
    if ACCUMULATE:
        if end <= begin:
            return
    b_dw = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    full = begin + tl.maximum(end - begin, 0) // BLOCK_R * BLOCK_R
    # The rows of a step are looked up one step ahead. Looked up in the step itself, the compiler would split its
    # stages between the two loads and overlap nothing.
    o_dy = step_rows(p_gather, begin, end, GATHER_DY, BLOCK_R)
    o_x = step_rows(p_gather, begin, end, GATHER_X, BLOCK_R)
    for o_row in tl.range(begin, full, BLOCK_R):
        b_dy = load_step_transposed(p_dy, o_dy, o_n, N, stride_yr, stride_yn, EVEN_N, BLOCK_N)
        b_x = load_step(p_x, o_x, o_k, K, stride_xr, stride_xk, EVEN_K, BLOCK_K)
        b_dw = tl.dot(b_dy, b_x, b_dw, input_precision=PRECISION)
        o_dy = step_rows(p_gather, o_row + BLOCK_R, end, GATHER_DY, BLOCK_R)
        o_x = step_rows(p_gather, o_row + BLOCK_R, end, GATHER_X, BLOCK_R)
    if full < end:
        m_rows = full + tl.arange(0, BLOCK_R) < end
        b_dy = load_last_step(p_dy, o_dy, m_rows, o_n, N, stride_yr, stride_yn, BLOCK_N)
        b_x = load_last_step(p_x, o_x, m_rows, o_k, K, stride_xr, stride_xk, BLOCK_K)
        b_dw = tl.dot(b_dy.T, b_x, b_dw, input_precision=PRECISION)
    p_weight = p_dw + i_expert.to(tl.int64) * stride_we
    b_left, b_right = halves(b_dw)
    store_weight(b_left, p_weight, o_n, o_k, N, K, stride_wn, stride_wk, ACCUMULATE)
    store_weight(b_right, p_weight, o_n, o_k + BLOCK_K // 2, N, K, stride_wn, stride_wk, ACCUMULATE)


def grouped_wgrad(
    dy: Tensor, x: Tensor, offsets: Tensor, dw: Tensor, accumulate: bool, *, gather: Tensor | None = None,
    gather_dy: bool = False,
) -> None:  # fmt: skip
    """Writes dw [E, N, K] (any strides and dtype) of dy [R, N] and x [R, K], or adds to it (float32).

    gather [R]: x (with `gather_dy`: dy) holds tokens, and sorted row r is its row gather[r].
    """
    if dw.numel() == 0:
        return
    rows = x.shape[0] if gather is None else gather.shape[0]
    experts, columns, inner = dw.shape
    launch = launch_for("wgrad", rows, experts, dy, x, dw)
    config = launch.config
    tiles = triton.cdiv(columns, config.block_m) * triton.cdiv(inner, config.block_n)
    launch.run(
        grouped_wgrad_kernel, experts * tiles, dy, x, gather, offsets, dw,
        rows, columns, inner, *dy.stride(), *x.stride(), *dw.stride(),
        GATHER_DY=gather is not None and gather_dy, GATHER_X=gather is not None and not gather_dy,
        ACCUMULATE=accumulate, EVEN_N=columns % config.block_m == 0, EVEN_K=inner % config.block_n == 0,
        BLOCK_N=config.block_m, BLOCK_K=config.block_n, BLOCK_R=config.block_k, PRECISION="ieee",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# The gradient by the bias
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def grouped_bias_grad_kernel(
    p_dy, p_offsets, p_db, R, N, stride_yr, stride_yn, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):
    """db[e, n] = sum over e's rows of dy[r, n]: partial sums of every BLOCK_R-th row, then their sum."""
    i_expert = tl.program_id(0)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    begin = row_bound(p_offsets, i_expert, R)
    end = row_bound(p_offsets, i_expert + 1, R)
    b_sum = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    for o_row in tl.range(begin, end, BLOCK_R):
        o_rows = o_row + tl.arange(0, BLOCK_R)
        p_tile = p_dy + o_rows.to(tl.int64)[:, None] * stride_yr + o_n.to(tl.int64)[None, :] * stride_yn
        b_sum += tl.load(p_tile, mask=(o_rows < end)[:, None] & m_n[None, :], other=0.0).to(tl.float32)
    p_row = p_db + i_expert.to(tl.int64) * N + o_n
    tl.store(p_row, tl.sum(b_sum, 0), mask=m_n)


def grouped_bias_grad(dy: Tensor, offsets: Tensor, experts: int) -> Tensor:
    """db [E, N] float32 of dy [R, N]."""
    rows, columns = dy.shape
    db = dy.new_empty(experts, columns, dtype=torch.float32)
    if db.numel():
        run_simple(
            grouped_bias_grad_kernel, (experts, triton.cdiv(columns, 64)), 4, dy, offsets, db, rows, columns,
            *dy.stride(), BLOCK_R=32, BLOCK_N=64,
        )  # fmt: skip
    return db
