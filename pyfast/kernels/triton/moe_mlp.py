"""The fused expert MLP: gather + GEMM + SwiGLU, GEMM, weighted sum of a token's experts; and its gradient.

Saved for backward: x, the maps and the pre-activation, a bfloat16 one in kept.py's 16 bits. With r a sorted row of
expert e, t its token, p its weight:

    h_r = W13_e x_t      a_r = silu(gate_r) * up_r      y_r = W2_e a_r      out_t = sum over its slots of p y_r
    D_r = W2_e^T dout_t            dp = <D_r, a_r>  (equal to <dout_t, y_r>, and right at p = 0: nothing is divided)
    dh_r = dSwiGLU(h_r, p D_r)     dW2_e = sum of dout_t (p a_r)^T      dW13_e = sum of dh_r x_t^T
    dx_t = sum over its slots of W13_e^T dh_r

This is the scheme of SonicMoE (Guo et al., 2025). No atomics; every sum has a fixed order.

Shape letters: R sorted rows, T tokens, H model width, F expert width, E experts, K slots a token, C columns
that are summed over.
Prefixes: p_ pointer, d_ tensor descriptor or pointer, o_ offset, b_ block in registers, m_ mask, i_ index.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyfast.kernels.triton.expert_tiles import (
    cumulative_tiles,
    locate,
    quarters,
    row_tile_bound,
    tile_pointers,
    zero_outside,
)
from pyfast.kernels.triton.grouped_gemm import load_rows, load_weight, rows_first, source_rows
from pyfast.kernels.triton.kept import from_kept, kept_view, to_kept
from pyfast.kernels.triton.moe_launch import descriptor, launch_for, run_simple


@triton.jit
def store_swiglu(b_gate, b_up, p_h, p_a, o_rows, m_rows, o_n, F, STORE_H: tl.constexpr, STORE_A: tl.constexpr):
    """Stores h and a for the columns of b_gate and b_up [BLOCK_M, COLUMNS]."""
    COLUMNS: tl.constexpr = b_gate.shape[1]
    KEPT: tl.constexpr = p_h.dtype.element_ty
    m_tile = m_rows[:, None] & (o_n + tl.arange(0, COLUMNS) < F)[None, :]
    b_gate_h = to_kept(b_gate, KEPT)
    b_up_h = to_kept(b_up, KEPT)
    if STORE_H:
        p_tile = tile_pointers(p_h, o_rows, o_n, 2 * F, COLUMNS)
        tl.store(p_tile, b_gate_h, mask=m_tile)
        tl.store(p_tile + F, b_up_h, mask=m_tile)
    if STORE_A:
        b_seen = from_kept(b_gate_h)
        b_a = b_seen * tl.sigmoid(b_seen) * from_kept(b_up_h)
        tl.store(tile_pointers(p_a, o_rows, o_n, F, COLUMNS), b_a.to(p_a.dtype.element_ty), mask=m_tile)


@triton.jit
def moe_up_kernel(
    d_x, d_w, p_gather, p_offsets, p_h, p_a,
    R, E, F, C, stride_xr, stride_xc, stride_we, stride_wn, stride_wc,
    W_DESCRIPTOR: tl.constexpr, EVEN: tl.constexpr, ROWS_FIRST: tl.constexpr, STORE_H: tl.constexpr,
    STORE_A: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """h [R, 2F] = W13 x (gate, then up) as it is kept, and a [R, F] = silu(gate) * up from what backward will see."""
    b_last = cumulative_tiles(p_offsets, E, R, BLOCK_M, EXPERTS)
    tiles_n = tl.cdiv(F, BLOCK_N)
    total = tl.max(b_last, 0) * tiles_n
    for i_tile in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        i_expert, o_row, end, i_n = locate(i_tile, b_last, p_offsets, R, tiles_n, BLOCK_M, ROWS_FIRST)
        o_n = i_n * BLOCK_N
        o_source = source_rows(p_gather, o_row, end, BLOCK_M, True)
        b_gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        b_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for o_c in tl.range(0, C, BLOCK_C):
            b_x = load_rows(d_x, o_source, o_row, o_c, C, stride_xr, stride_xc, False, EVEN, BLOCK_C)
            b_w = load_weight(
                d_w, i_expert, o_n, o_c, F, C, stride_we, stride_wn, stride_wc, W_DESCRIPTOR, True, EVEN,
                BLOCK_N, BLOCK_C,
            )  # fmt: skip
            b_v = load_weight(
                d_w, i_expert, F + o_n, o_c, 2 * F, C, stride_we, stride_wn, stride_wc, W_DESCRIPTOR, True, EVEN,
                BLOCK_N, BLOCK_C,
            )  # fmt: skip
            b_gate = tl.dot(b_x, b_w, b_gate, input_precision=PRECISION)
            b_up = tl.dot(b_x, b_v, b_up, input_precision=PRECISION)
        o_rows = o_row + tl.arange(0, BLOCK_M)
        m_rows = o_rows < end
        QUARTER: tl.constexpr = BLOCK_N // 4
        b_gate_0, b_gate_1, b_gate_2, b_gate_3 = quarters(b_gate)
        b_up_0, b_up_1, b_up_2, b_up_3 = quarters(b_up)
        store_swiglu(b_gate_0, b_up_0, p_h, p_a, o_rows, m_rows, o_n, F, STORE_H, STORE_A)
        store_swiglu(b_gate_1, b_up_1, p_h, p_a, o_rows, m_rows, o_n + QUARTER, F, STORE_H, STORE_A)
        store_swiglu(b_gate_2, b_up_2, p_h, p_a, o_rows, m_rows, o_n + 2 * QUARTER, F, STORE_H, STORE_A)
        store_swiglu(b_gate_3, b_up_3, p_h, p_a, o_rows, m_rows, o_n + 3 * QUARTER, F, STORE_H, STORE_A)
    if STORE_H:
        zero_outside(p_h, p_offsets, E, R, 2 * F, BLOCK_M, BLOCK_N)


def moe_up(
    x: Tensor, w_gate_up: Tensor, gather: Tensor, offsets: Tensor, *, store_h: bool = True, store_a: bool = True
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """(h [R, 2F], a [R, F]) of x [T, H] and w_gate_up [E, 2F, H]; None for what is not asked for.

    A bfloat16 h holds codes (kept.py), not numbers. Its rows outside the offsets are 0, those of `a` are not written:
    only grouped kernels may read it.
    """
    rows, experts, width = gather.shape[0], w_gate_up.shape[0], w_gate_up.shape[1] // 2
    h = x.new_empty(rows if store_h else 0, 2 * width)  # the kernel rounds as it keeps, whether it keeps or not
    a = x.new_empty(rows, width) if store_a else None
    kept = h if store_h else None
    if rows == 0 or width == 0:
        return kept, a
    if experts == 0:
        return (kept.zero_() if store_h else None), a
    launch = launch_for("up", rows, experts, x, w_gate_up)
    config = launch.config
    d_w = descriptor(w_gate_up, [1, config.block_n, config.block_k], launch)
    tiles = (row_tile_bound(rows, experts, config.block_m) + 2) * triton.cdiv(width, config.block_n)
    launch.run(
        moe_up_kernel, min(launch.programs, tiles),
        x, w_gate_up if d_w is None else d_w, gather, offsets, kept_view(h), a,
        rows, experts, width, x.shape[1], *x.stride(), *w_gate_up.stride(),
        W_DESCRIPTOR=d_w is not None, EVEN=x.shape[1] % config.block_k == 0, ROWS_FIRST=rows_first(w_gate_up, x),
        STORE_H=store_h, STORE_A=store_a, EXPERTS=triton.next_power_of_2(experts),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_C=config.block_k, PRECISION="ieee",
    )  # fmt: skip
    return kept, a


@triton.jit
def swiglu_gradient(b_d, b_p, p_h, p_dh, p_pa, o_rows, m_rows, o_n, F):
    """Stores dh and p a for the columns of b_d = D [BLOCK_M, COLUMNS] and returns their part of dp [BLOCK_M]."""
    COLUMNS: tl.constexpr = b_d.shape[1]
    type_out: tl.constexpr = p_dh.dtype.element_ty
    m_tile = m_rows[:, None] & (o_n + tl.arange(0, COLUMNS) < F)[None, :]
    p_tile = tile_pointers(p_h, o_rows, o_n, 2 * F, COLUMNS)
    b_gate = from_kept(tl.load(p_tile, mask=m_tile, other=0))
    b_up = from_kept(tl.load(p_tile + F, mask=m_tile, other=0))
    b_sigmoid = tl.sigmoid(b_gate)
    b_silu = b_gate * b_sigmoid
    b_da = b_p[:, None] * b_d
    p_tile = tile_pointers(p_dh, o_rows, o_n, 2 * F, COLUMNS)
    tl.store(p_tile, (b_da * b_up * b_sigmoid * (1 + b_gate * (1 - b_sigmoid))).to(type_out), mask=m_tile)
    tl.store(p_tile + F, (b_da * b_silu).to(type_out), mask=m_tile)
    b_a = b_silu * b_up
    tl.store(tile_pointers(p_pa, o_rows, o_n, F, COLUMNS), (b_p[:, None] * b_a).to(type_out), mask=m_tile)
    return tl.sum(b_d * b_a, 1)


@triton.jit
def moe_down_dgrad_kernel(
    d_dout, d_w, p_h, p_weights, p_gather, p_slot, p_offsets, p_dh, p_pa, p_partial,
    R, E, F, C, stride_xr, stride_xc, stride_we, stride_wc, stride_wn,
    W_DESCRIPTOR: tl.constexpr, EVEN: tl.constexpr, ROWS_FIRST: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """D = W2^T dout for BLOCK_N of F columns, and from it at once dh [R, 2F], p a [R, F] and this column tile's part of
    dp, partial [R, ceil(F / BLOCK_N)]."""
    b_last = cumulative_tiles(p_offsets, E, R, BLOCK_M, EXPERTS)
    tiles_n = tl.cdiv(F, BLOCK_N)
    total = tl.max(b_last, 0) * tiles_n
    for i_tile in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        i_expert, o_row, end, i_n = locate(i_tile, b_last, p_offsets, R, tiles_n, BLOCK_M, ROWS_FIRST)
        o_n = i_n * BLOCK_N
        o_source = source_rows(p_gather, o_row, end, BLOCK_M, True)
        b_d = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for o_c in tl.range(0, C, BLOCK_C):
            b_x = load_rows(d_dout, o_source, o_row, o_c, C, stride_xr, stride_xc, False, EVEN, BLOCK_C)
            b_w = load_weight(
                d_w, i_expert, o_n, o_c, F, C, stride_we, stride_wn, stride_wc, W_DESCRIPTOR, False, EVEN,
                BLOCK_N, BLOCK_C,
            )  # fmt: skip
            b_d = tl.dot(b_x, b_w, b_d, input_precision=PRECISION)
        o_rows = o_row + tl.arange(0, BLOCK_M)
        m_rows = o_rows < end
        b_p = tl.load(p_weights + tl.load(p_slot + o_rows, mask=m_rows, other=0), mask=m_rows, other=0.0)
        QUARTER: tl.constexpr = BLOCK_N // 4
        b_0, b_1, b_2, b_3 = quarters(b_d)
        b_dp = swiglu_gradient(b_0, b_p, p_h, p_dh, p_pa, o_rows, m_rows, o_n, F)
        b_dp += swiglu_gradient(b_1, b_p, p_h, p_dh, p_pa, o_rows, m_rows, o_n + QUARTER, F)
        b_dp += swiglu_gradient(b_2, b_p, p_h, p_dh, p_pa, o_rows, m_rows, o_n + 2 * QUARTER, F)
        b_dp += swiglu_gradient(b_3, b_p, p_h, p_dh, p_pa, o_rows, m_rows, o_n + 3 * QUARTER, F)
        tl.store(p_partial + o_rows.to(tl.int64) * tiles_n + i_n, b_dp, mask=m_rows)


def moe_down_dgrad(
    dout: Tensor, w_down: Tensor, h: Tensor, weights: Tensor, gather: Tensor, slot: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dh [R, 2F], p a [R, F], partial sums of dp [R, tiles] float32) of dout [T, H], w_down [E, H, F], h as kept and
    weights [T, K] (contiguous). Rows outside the offsets are not written: only grouped kernels may read them."""
    rows, (experts, width_out, width) = gather.shape[0], w_down.shape
    launch = launch_for("down_dgrad", rows, experts, dout, w_down)
    config = launch.config
    tiles_n = triton.cdiv(width, config.block_n)
    dh, pa = dout.new_empty(rows, 2 * width), dout.new_empty(rows, width)
    partial = dout.new_empty(rows, tiles_n, dtype=torch.float32)
    if rows == 0 or experts == 0 or width == 0:
        return dh, pa, partial.zero_()
    d_w = descriptor(w_down, [1, config.block_k, config.block_n], launch)
    launch.run(
        moe_down_dgrad_kernel, min(launch.programs, row_tile_bound(rows, experts, config.block_m) * tiles_n),
        dout, w_down if d_w is None else d_w, kept_view(h), weights, gather, slot, offsets, dh, pa, partial,
        rows, experts, width, width_out, *dout.stride(), *w_down.stride(),
        W_DESCRIPTOR=d_w is not None, EVEN=width_out % config.block_k == 0, ROWS_FIRST=rows_first(w_down, dout),
        EXPERTS=triton.next_power_of_2(experts),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_C=config.block_k, PRECISION="ieee",
    )  # fmt: skip
    return dh, pa, partial


@triton.jit
def slot_sum_kernel(p_partial, p_inverse, p_out, slots, tiles, BLOCK_S: tl.constexpr):
    """out[s] = sum over j of partial[inverse[s], j], in order; 0 for a dropped slot."""
    o_s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    m_s = o_s < slots
    b_row = tl.load(p_inverse + o_s, mask=m_s, other=-1)
    m_row = b_row >= 0
    b_sum = tl.zeros([BLOCK_S], tl.float32)
    for i_tile in tl.range(0, tiles):
        b_sum += tl.load(p_partial + b_row.to(tl.int64) * tiles + i_tile, mask=m_row, other=0.0)
    tl.store(p_out + o_s, b_sum, mask=m_s)


def slot_sum(partial: Tensor, inverse: Tensor, shape: torch.Size) -> Tensor:
    """dweights [T, K] float32: each slot's row of partial [R, tiles] summed in order, 0 for a dropped slot."""
    out = torch.empty(shape, dtype=torch.float32, device=partial.device)
    if out.numel():
        slots, tiles = partial.shape
        run_simple(slot_sum_kernel, triton.cdiv(slots, 256), 4, partial, inverse, out, slots, tiles, BLOCK_S=256)
    return out
