"""Attention backward, in two kernels without atomics: dk and dv by tiles of keys, dq by tiles of queries.

With lse over all keys and delta = rowsum(out * dout) - dlse, of each pair of query and key that see each other

    p = exp(score - lse),   dv += p dout,   ds = p (dout v - delta),   dk += scale ds q,   dq += scale ds k

(Dao, 2023); a softcap multiplies ds by 1 - (score / softcap)^2. Nothing here depends on how the forward was cut, so
ring steps simply add up. Both kernels compute the scores anew: 7 products instead of 5, the price of fixed-order sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyfast.kernels.triton.attention_tiles import LOG2_E, load_rows, products, store_rows, tanh, visible


@triton.jit
def attention_delta_kernel(
    p_out, p_dout, p_dlse, p_delta, rows, out_t, out_n, dout_t, dout_n, dlse_n, delta_n, DV: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """delta [Nq, Tq] = rowsum(out * dout) - dlse; a program a block of rows and head."""
    row, head = tl.program_id(0) * BLOCK, tl.program_id(1)
    count = rows - row
    b_out = load_rows(p_out, row, head, count, out_t, out_n, DV, BLOCK, BLOCK_DV, True, False).to(tl.float32)
    b_dout = load_rows(p_dout, row, head, count, dout_t, dout_n, DV, BLOCK, BLOCK_DV, True, False).to(tl.float32)
    b_delta = tl.sum(b_out * b_dout, 1)
    o_rows = tl.arange(0, BLOCK)
    m_rows = o_rows < count
    if HAS_DLSE:
        b_delta -= tl.load(p_dlse + head.to(tl.int64) * dlse_n + row + o_rows, mask=m_rows, other=0.0)
    tl.store(p_delta + head.to(tl.int64) * delta_n + row + o_rows, b_delta, mask=m_rows)


@triton.jit
def attention_backward_keys_kernel(
    p_q, p_k, p_v, p_dout, q, dout, p_lse, p_delta, p_dk, p_dv, p_tiles, p_ranges, heads_k, group,
    q_t, q_n, k_t, k_n, v_t, v_n, dout_t, dout_n, lse_n, delta_n, dk_t, dk_n, dv_t, dv_n, scale, softcap, left, right,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_MASKED: tl.constexpr, SOFTCAP: tl.constexpr, ADD: tl.constexpr,
    NEED_DK: tl.constexpr, NEED_DV: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """dk [Tk, Nk, D] and dv [Tk, Nk, Dv]: a program a tile of keys and kv head, over the queries of the whole group."""
    head, i_tile = tl.program_id(0) % heads_k, tl.program_id(0) // heads_k
    p_tile = p_tiles + i_tile * 6
    row, count, stride = tl.load(p_tile), tl.load(p_tile + 1), tl.load(p_tile + 2)
    whole, masked, end = tl.load(p_tile + 3), tl.load(p_tile + 4), tl.load(p_tile + 5)
    if ADD:
        if whole == end:
            return
    b_k = load_rows(p_k, row, head, count, k_t, k_n, D, BLOCK_K, BLOCK_D, True, False)
    b_v = load_rows(p_v, row, head, count, v_t, v_n, DV, BLOCK_K, BLOCK_DV, True, False)
    b_dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    b_dv = tl.zeros([BLOCK_K, BLOCK_DV], tl.float32)
    # One loop over the blocks of all query heads of the group, so that loading ahead never starts anew.
    for i_range in range(whole, masked):
        p_range = p_ranges + i_range * 4
        q_row, blocks = tl.load(p_range), tl.cdiv(tl.load(p_range + 1), BLOCK_Q)
        for i in range(0, group * blocks):
            b_dk, b_dv = _collect(
                b_k, b_v, b_dk, b_dv, q, dout, p_lse, p_delta, q_row + i % blocks * BLOCK_Q, head * group + i // blocks,
                0, 0, 0, 0, q_t, q_n, dout_t, dout_n, lse_n, delta_n, scale, softcap, left, right, D, DV, BLOCK_D,
                BLOCK_DV, BLOCK_Q, BLOCK_K, SOFTCAP, False, NEED_DK, NEED_DV, PRECISION, DESCRIPTOR,
            )  # fmt: skip
    for i_range in range(masked, end):
        p_range = p_ranges + i_range * 4
        q_row, q_count, relative, q_stride = (
            tl.load(p_range), tl.load(p_range + 1), tl.load(p_range + 2), tl.load(p_range + 3),
        )  # fmt: skip
        blocks = tl.cdiv(q_count, BLOCK_MASKED)
        for i in range(0, group * blocks):
            first = i % blocks * BLOCK_MASKED
            b_dk, b_dv = _collect(
                b_k, b_v, b_dk, b_dv, p_q, p_dout, p_lse, p_delta, q_row + first, head * group + i // blocks,
                q_count - first, -relative - first * q_stride, q_stride, stride,
                q_t, q_n, dout_t, dout_n, lse_n, delta_n, scale, softcap, left, right, D, DV, BLOCK_D, BLOCK_DV,
                BLOCK_MASKED, BLOCK_K, SOFTCAP, True, NEED_DK, NEED_DV, PRECISION, False,
            )  # fmt: skip
    if NEED_DK:
        store_rows(p_dk, b_dk * scale, row, head, count, dk_t, dk_n, D, BLOCK_K, BLOCK_D, ADD)
    if NEED_DV:
        store_rows(p_dv, b_dv, row, head, count, dv_t, dv_n, DV, BLOCK_K, BLOCK_DV, ADD)


@triton.jit
def _collect(
    b_k, b_v, b_dk, b_dv, q, dout, p_lse, p_delta, q_row, q_head, q_count, relative, q_stride, k_stride,
    q_t, q_n, dout_t, dout_n, lse_n, delta_n, scale, softcap, left, right, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr, NEED_DK: tl.constexpr, NEED_DV: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """What one block of queries gives dk (without scale) and dv. Scores are [keys, queries] here."""
    b_q = load_rows(q, q_row, q_head, q_count, q_t, q_n, D, BLOCK_Q, BLOCK_D, MASKED, DESCRIPTOR)
    b_products = products(b_k, b_q, PRECISION)
    b_dout = load_rows(dout, q_row, q_head, q_count, dout_t, dout_n, DV, BLOCK_Q, BLOCK_DV, MASKED, DESCRIPTOR)
    if NEED_DK:
        b_dweights = products(b_v, b_dout, PRECISION)
    b_lse, b_delta = _row_constants(p_lse, p_delta, q_row, q_head, q_count, lse_n, delta_n, BLOCK_Q, MASKED)
    b_weights, b_slope = _weights(b_products, b_lse[None, :], scale, softcap, SOFTCAP)
    if MASKED:
        o_q, o_k = tl.arange(0, BLOCK_Q)[None, :], tl.arange(0, BLOCK_K)[:, None]
        m_seen = visible(relative, q_stride, k_stride, left, right, o_q, o_k) & (o_q < q_count)
        b_weights = tl.where(m_seen, b_weights, 0.0)
    if NEED_DK:
        b_dscores = b_weights * (b_dweights - b_delta[None, :]) * b_slope
        if MASKED:  # delta of a row that sees nothing may be anything
            b_dscores = tl.where(m_seen, b_dscores, 0.0)
    if NEED_DV:
        b_dv = tl.dot(b_weights.to(b_dout.dtype), b_dout, b_dv, input_precision=PRECISION)
    if NEED_DK:
        b_dk = tl.dot(b_dscores.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
    return b_dk, b_dv


@triton.jit
def attention_backward_queries_kernel(
    p_q, p_k, p_v, p_dout, k, v, p_lse, p_delta, p_dq, p_tiles, p_ranges, heads, group,
    q_t, q_n, k_t, k_n, v_t, v_n, dout_t, dout_n, lse_n, delta_n, dq_t, dq_n, scale, softcap, left, right,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_MASKED: tl.constexpr, SOFTCAP: tl.constexpr, ADD: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """dq [Tq, Nq, D]: a program a tile of queries and head; heads of one group are neighbours."""
    head, i_tile = tl.program_id(0) % heads, tl.program_id(0) // heads
    p_tile = p_tiles + i_tile * 6
    row, count, stride = tl.load(p_tile), tl.load(p_tile + 1), tl.load(p_tile + 2)
    whole, masked, end = tl.load(p_tile + 3), tl.load(p_tile + 4), tl.load(p_tile + 5)
    if ADD:
        if whole == end:
            return
    b_q = load_rows(p_q, row, head, count, q_t, q_n, D, BLOCK_Q, BLOCK_D, True, False)
    b_dout = load_rows(p_dout, row, head, count, dout_t, dout_n, DV, BLOCK_Q, BLOCK_DV, True, False)
    b_lse, b_delta = _row_constants(p_lse, p_delta, row, head, count, lse_n, delta_n, BLOCK_Q, True)
    b_dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for i_range in range(whole, masked):
        p_range = p_ranges + i_range * 4
        k_row, k_count = tl.load(p_range), tl.load(p_range + 1)
        for first in range(0, k_count, BLOCK_K):
            b_dq = _descend(
                b_q, b_dout, b_lse, b_delta, b_dq, k, v, k_row + first, head // group, 0, 0, 0, 0, k_t, k_n, v_t, v_n,
                scale, softcap, left, right, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_K, SOFTCAP, False, PRECISION,
                DESCRIPTOR,
            )  # fmt: skip
    for i_range in range(masked, end):
        p_range = p_ranges + i_range * 4
        k_row, k_count, relative, k_stride = (
            tl.load(p_range), tl.load(p_range + 1), tl.load(p_range + 2), tl.load(p_range + 3),
        )  # fmt: skip
        for first in range(0, k_count, BLOCK_MASKED):
            b_dq = _descend(
                b_q, b_dout, b_lse, b_delta, b_dq, p_k, p_v, k_row + first, head // group, k_count - first,
                relative + first * k_stride, stride, k_stride, k_t, k_n, v_t, v_n, scale, softcap, left, right,
                D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_MASKED, SOFTCAP, True, PRECISION, False,
            )  # fmt: skip
    store_rows(p_dq, b_dq * scale, row, head, count, dq_t, dq_n, D, BLOCK_Q, BLOCK_D, ADD)


@triton.jit
def _descend(
    b_q, b_dout, b_lse, b_delta, b_dq, k, v, k_row, k_head, k_count, relative, q_stride, k_stride, k_t, k_n, v_t, v_n,
    scale, softcap, left, right, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """What one block of keys gives dq (without scale)."""
    b_k = load_rows(k, k_row, k_head, k_count, k_t, k_n, D, BLOCK_K, BLOCK_D, MASKED, DESCRIPTOR)
    b_products = products(b_q, b_k, PRECISION)
    b_weights, b_slope = _weights(b_products, b_lse[:, None], scale, softcap, SOFTCAP)
    b_v = load_rows(v, k_row, k_head, k_count, v_t, v_n, DV, BLOCK_K, BLOCK_DV, MASKED, DESCRIPTOR)
    b_dweights = products(b_dout, b_v, PRECISION)
    b_dscores = b_weights * (b_dweights - b_delta[:, None]) * b_slope
    if MASKED:
        o_q, o_k = tl.arange(0, BLOCK_Q)[:, None], tl.arange(0, BLOCK_K)[None, :]
        m_seen = visible(relative, q_stride, k_stride, left, right, o_q, o_k) & (o_k < k_count)
        b_dscores = tl.where(m_seen, b_dscores, 0.0)
    return tl.dot(b_dscores.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)


@triton.jit
def _row_constants(p_lse, p_delta, row, head, count, lse_n, delta_n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """lse in base 2 and delta, [BLOCK]."""
    o_rows = tl.arange(0, BLOCK)
    p_row_lse = p_lse + head.to(tl.int64) * lse_n + row + o_rows
    p_row_delta = p_delta + head.to(tl.int64) * delta_n + row + o_rows
    if MASKED:
        b_lse = tl.load(p_row_lse, mask=o_rows < count, other=0.0)
        b_delta = tl.load(p_row_delta, mask=o_rows < count, other=0.0)
    else:
        b_lse, b_delta = tl.load(p_row_lse), tl.load(p_row_delta)
    return b_lse * LOG2_E, b_delta


@triton.jit
def _weights(b_products, b_lse, scale, softcap, SOFTCAP: tl.constexpr):
    """exp(score - lse), and the slope of the score by scale * product: 1 unless there is a softcap."""
    if SOFTCAP:
        b_tanh = tanh(b_products * (scale / softcap))
        b_scores = softcap * LOG2_E * b_tanh
        b_slope = 1.0 - b_tanh * b_tanh
    else:
        b_scores = b_products * (scale * LOG2_E)
        b_slope = 1.0
    return tl.exp2(b_scores - b_lse), b_slope
