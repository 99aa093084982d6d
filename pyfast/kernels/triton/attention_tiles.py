"""What the attention kernels share: loading rows of one head, capped scores, which pairs see each other.

T packed rows, N heads, D head size. p_ pointer, o_ offsets within a block, b_ block of values, m_ mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(
    source, row, head, count, stride_t, stride_n, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Rows row to row + BLOCK of one head, [BLOCK, BLOCK_D]; columns from D on are 0, and rows from count on if MASKED.

    Rows that are masked may belong to nobody and hold NaN: they are not read, instead of multiplied by 0. What is
    masked, and the block that a program keeps, is loaded by pointers: asynchronous copies fill in zeros on the way to
    shared memory, where a descriptor's block would pass through registers.
    """
    o_rows = tl.arange(0, BLOCK)
    o_cols = tl.arange(0, BLOCK_D)
    if DESCRIPTOR:
        tl.static_assert(not MASKED, "a descriptor has no mask")
        b_rows = source.load([row, head, 0]).reshape(BLOCK, BLOCK_D)
    else:
        p_first = source + row.to(tl.int64) * stride_t + head.to(tl.int64) * stride_n
        p_rows = p_first + o_rows[:, None] * stride_t + o_cols[None, :]  # within a block 32 bits are enough
        if MASKED and D != BLOCK_D:
            b_rows = tl.load(p_rows, mask=(o_rows < count)[:, None] & (o_cols < D)[None, :], other=0.0)
        elif MASKED:
            b_rows = tl.load(p_rows, mask=(o_rows < count)[:, None], other=0.0)
        elif D != BLOCK_D:
            b_rows = tl.load(p_rows, mask=(o_cols < D)[None, :], other=0.0)
        else:
            b_rows = tl.load(p_rows)
    return b_rows


@triton.jit
def products(b_rows, b_others, PRECISION: tl.constexpr):
    """Of every row with every other, [BLOCK, D] and [OTHERS, D]: [BLOCK, OTHERS].

    Wide float32 rows are cut into four, each for warps of its own, and the four sums added: a thread that held whole
    rows in tf32's parts would spill.
    """
    BLOCK: tl.constexpr = b_rows.shape[0]
    OTHERS: tl.constexpr = b_others.shape[0]
    D: tl.constexpr = b_rows.shape[1]
    if D > 128 and b_rows.dtype == tl.float32:
        b_rows = b_rows.reshape(BLOCK, 4, D // 4).permute(1, 0, 2)
        b_others = b_others.reshape(OTHERS, 4, D // 4).permute(1, 2, 0)
        b_products = tl.sum(tl.dot(b_rows, b_others, input_precision=PRECISION), 0)
    else:
        b_products = tl.dot(b_rows, tl.trans(b_others), input_precision=PRECISION)
    return b_products


@triton.jit
def tanh(x):
    """Exact to float32's rounding: by a series near 0, where 1 - 2 / (exp(2x) + 1) cancels."""
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315))))
    return tl.where(square < 0.01, near, 1.0 - 2.0 / (tl.exp2(x * (2 * LOG2_E)) + 1.0))


@triton.jit
def visible(relative, stride_q, stride_k, left, right, o_q, o_k):
    """Whether query o_q sees key o_k, by positions: key - query = relative + o_k * stride_k - o_q * stride_q."""
    distance = relative + o_k * stride_k - o_q * stride_q
    return (distance <= right) & (distance >= -left)


@triton.jit
def store_rows(
    p_target, b_rows, row, head, count, stride_t, stride_n, D: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Writes (or adds, if ADD) count rows of one head, rounded once to the target's dtype."""
    p_first = p_target + row.to(tl.int64) * stride_t + head.to(tl.int64) * stride_n
    if ADD and BLOCK_D >= 64:  # by halves of the columns: what is added to needs registers too
        b_halves = b_rows.reshape(BLOCK, 2, BLOCK_D // 2).permute(0, 2, 1)
        b_left, b_right = b_halves.split()
        _store_columns(p_first, b_left, 0, count, stride_t, D, BLOCK, BLOCK_D // 2, ADD)
        _store_columns(p_first, b_right, BLOCK_D // 2, count, stride_t, D, BLOCK, BLOCK_D // 2, ADD)
    else:
        _store_columns(p_first, b_rows, 0, count, stride_t, D, BLOCK, BLOCK_D, ADD)


@triton.jit
def _store_columns(
    p_first, b_values, first, count, stride_t, D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    o_rows, o_cols = tl.arange(0, BLOCK), first + tl.arange(0, WIDTH)
    p_values = p_first + o_rows[:, None] * stride_t + o_cols[None, :]
    m_values = (o_rows < count)[:, None] & (o_cols < D)[None, :]
    if ADD:
        b_values += tl.load(p_values, mask=m_values, other=0.0)
    tl.store(p_values, b_values.to(p_first.dtype.element_ty), mask=m_values)
