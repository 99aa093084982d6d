"""Attention forward: one program holds a tile of queries of one head and walks over the keys they see.

The online softmax is Milakov and Gimelshein (2018), the blocking Dao (2023); exponentials are of base 2. Which tiles
there are and which ranges of keys each meets is planned on the host (kernels/runs.py): a range is either seen by every
query, and then nothing is compared, or masked by position.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyfast.kernels.triton.attention_tiles import LN_2, LOG2_E, load_rows, products, store_rows, tanh, visible


@triton.jit
def attention_forward_kernel(
    p_q, p_k, p_v, k, v, p_out, p_lse, p_sinks, p_tiles, p_ranges, tiles, heads, heads_at_once, group,
    q_t, q_n, k_t, k_n, v_t, v_n, out_t, out_n, lse_n, scale, softcap, left, right,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_MASKED: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, CARRY: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """out [Tq, Nq, Dv] and lse [Nq, Tq], or with CARRY the two continued in place; a program a tile and head.

    tiles [tiles, 6]: first row, rows, stride of positions, and ranges: first whole one, first masked one, end.
    ranges [ranges, 4]: first row, rows, its position less that of the tile, stride. Heads are taken heads_at_once at a
    time, so that their keys stay in the L2 cache; those of one group are neighbours.
    """
    head, i_tile = place(tl.program_id(0), tiles, heads, heads_at_once)
    p_tile = p_tiles + i_tile * 6
    row, count, stride = tl.load(p_tile), tl.load(p_tile + 1), tl.load(p_tile + 2)
    whole, masked, end = tl.load(p_tile + 3), tl.load(p_tile + 4), tl.load(p_tile + 5)
    if CARRY and not SINKS:
        if whole == end:
            return
    o_q = tl.arange(0, BLOCK_Q)
    p_row_lse = p_lse + head.to(tl.int64) * lse_n + row + o_q
    b_q = load_rows(p_q, row, head, count, q_t, q_n, D, BLOCK_Q, BLOCK_D, True, False)
    if CARRY:  # the state is normalised: as if there were one key of weight 1 whose value is acc
        b_top = tl.load(p_row_lse, mask=o_q < count, other=float("-inf")) * LOG2_E
        b_sum = tl.where(b_top > float("-inf"), 1.0, 0.0)
        b_acc = load_rows(p_out, row, head, count, out_t, out_n, DV, BLOCK_Q, BLOCK_DV, True, False)
    else:
        b_top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_Q], tl.float32)
        b_acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)

    for i_range in range(whole, masked):
        p_range = p_ranges + i_range * 4
        k_row, k_count = tl.load(p_range), tl.load(p_range + 1)
        for first in range(0, k_count, BLOCK_K):
            b_acc, b_top, b_sum = _attend(
                b_q, b_acc, b_top, b_sum, k, v, k_row + first, head // group, 0, 0, 0, 0, k_t, k_n, v_t, v_n,
                scale, softcap, left, right, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_K, SOFTCAP, False,
                PRECISION, DESCRIPTOR,
            )  # fmt: skip
    for i_range in range(masked, end):
        p_range = p_ranges + i_range * 4
        k_row, k_count, relative, k_stride = (
            tl.load(p_range), tl.load(p_range + 1), tl.load(p_range + 2), tl.load(p_range + 3),
        )  # fmt: skip
        for first in range(0, k_count, BLOCK_MASKED):
            b_acc, b_top, b_sum = _attend(
                b_q, b_acc, b_top, b_sum, p_k, p_v, k_row + first, head // group, k_count - first,
                relative + first * k_stride, stride, k_stride, k_t, k_n, v_t, v_n, scale, softcap, left, right,
                D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_MASKED, SOFTCAP, True, PRECISION, False,
            )  # fmt: skip

    m_seen = b_sum > 0
    if SINKS:  # one more logit, without a value; a row that saw no key takes no part of it
        b_sink = tl.load(p_sinks + head) * LOG2_E
        b_new = tl.where(m_seen, tl.maximum(b_top, b_sink), 0.0)
        b_kept = tl.exp2(b_top - b_new)
        b_sum = b_sum * b_kept + tl.where(m_seen, tl.exp2(b_sink - b_new), 0.0)
        b_acc = b_acc * b_kept[:, None]
        b_top = b_new
    b_sum = tl.where(m_seen, b_sum, 1.0)
    b_lse = tl.where(m_seen, (b_top + tl.log2(b_sum)) * LN_2, float("-inf"))
    tl.store(p_row_lse, b_lse, mask=o_q < count)
    b_acc = b_acc / b_sum[:, None]
    store_rows(p_out, b_acc, row, head, count, out_t, out_n, DV, BLOCK_Q, BLOCK_DV, False)


@triton.jit
def place(program, tiles, heads, heads_at_once):
    """(head, tile) of a program: all tiles, longest first, of the first heads_at_once heads; then the next heads."""
    i_batch = program // (tiles * heads_at_once)
    within = program % (tiles * heads_at_once)
    here = tl.minimum(heads_at_once, heads - i_batch * heads_at_once)
    return i_batch * heads_at_once + within % here, within // here


@triton.jit
def _attend(
    b_q, b_acc, b_top, b_sum, k, v, k_row, k_head, k_count, relative, q_stride, k_stride, k_t, k_n, v_t, v_n,
    scale, softcap, left, right, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """One block of keys joins the softmax: (acc, top, sum), acc and sum relative to 2 ** top."""
    b_k = load_rows(k, k_row, k_head, k_count, k_t, k_n, D, BLOCK_K, BLOCK_D, MASKED, DESCRIPTOR)
    b_scores = products(b_q, b_k, PRECISION)
    if SOFTCAP:
        b_scores = softcap * LOG2_E * tanh(b_scores * (scale / softcap))
    else:
        b_scores = b_scores * (scale * LOG2_E)
    if MASKED:
        o_q, o_k = tl.arange(0, BLOCK_Q)[:, None], tl.arange(0, BLOCK_K)[None, :]
        m_seen = visible(relative, q_stride, k_stride, left, right, o_q, o_k) & (o_k < k_count)
        b_scores = tl.where(m_seen, b_scores, float("-inf"))
    b_new = tl.maximum(b_top, tl.max(b_scores, 1))
    b_base = tl.where(b_new > float("-inf"), b_new, 0.0) if MASKED else b_new  # a row may have seen nothing yet
    b_weights = tl.exp2(b_scores - b_base[:, None])
    b_kept = tl.exp2(b_top - b_base)
    b_sum = b_sum * b_kept + tl.sum(b_weights, 1)
    b_v = load_rows(v, k_row, k_head, k_count, v_t, v_n, DV, BLOCK_K, BLOCK_DV, MASKED, DESCRIPTOR)
    b_acc = tl.dot(b_weights.to(b_v.dtype), b_v, b_acc * b_kept[:, None], input_precision=PRECISION)
    return b_acc, b_new, b_sum
