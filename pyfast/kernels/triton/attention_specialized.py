"""Attention forward for Hopper with warps of their own for loading: the plain case of training, to be measured.

A warp group loads keys and values, two others multiply (12 warps, registers shared out by setmaxnreg). The compilers of
triton 3.6 and 3.9 do this to a kernel of 4 warps, and only if it has one loop, no branch with an `else`, and nothing
but TMA loads feeds its products. So this kernel takes batches alone, compares positions in every block if causal, and
describes its queries on the device: a description from the host would keep 128 rows where the compiler halves them.
"""

from __future__ import annotations

import contextvars

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyfast.kernels.triton import attention
from pyfast.kernels.triton.attention_config import SPECIALIZED, Tiles
from pyfast.kernels.triton.attention_forward import place
from pyfast.kernels.triton.attention_tiles import LN_2, LOG2_E, store_rows, tanh
from pyfast.kernels.triton.launch import architecture, describe, on_its_device


@on_its_device
def attention_forward_specialized(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, causal: bool, scale: float, softcap: float,
    *, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of `attention.attention_forward` for q [B, Sq, Nq, D], k and v [B, Sk, Nk, D]; no window.

    Raises ValueError where `unsuitable` names a reason.
    """
    if (reason := unsuitable(q, k, v, causal, tiles)) is not None:
        raise ValueError(f"{reason}; call attention_forward instead")
    tiles = tiles or SPECIALIZED[q.shape[-1]]
    q_TND, k_TND, v_TND = (attention._packed(x) for x in (q, k, v))
    out = q.new_empty(q.shape)
    lse_NT = torch.empty(q_TND.shape[1], q_TND.shape[0], dtype=torch.float32, device=q.device)
    blocks = ([tiles.block_k, 1, q.shape[-1]],) * 2
    arguments = (
        q_TND, *(describe(x, block) for x, block in zip((k_TND, v_TND), blocks, strict=True)), attention._flat(out),
        lse_NT, lse_NT if sinks is None else sinks.float().contiguous(), q.shape[0], q.shape[1], k.shape[1], q.shape[2],
        attention.heads_at_once(q_TND, k_TND, v_TND), q.shape[2] // k.shape[2], *q_TND.stride()[:2],
        *attention._flat(out).stride()[:2], lse_NT.stride(0), scale, softcap,
    )  # fmt: skip
    options = {
        "D": q.shape[-1], "BLOCK_Q": tiles.block_q, "BLOCK_K": tiles.block_k, "CAUSAL": causal, "SOFTCAP": softcap > 0,
        "SINKS": sinks is not None, "num_warps": tiles.num_warps, "num_stages": tiles.num_stages,
        "enable_fp_fusion": True,
    }  # fmt: skip
    programs = q.shape[0] * triton.cdiv(q.shape[1], tiles.block_q) * q.shape[2]
    contextvars.copy_context().run(_launch, programs, q.device, arguments, options)
    return out, attention._unpack_lse(lse_NT, q)


def unsuitable(q: Tensor, k: Tensor, v: Tensor, causal: bool, tiles: Tiles | None = None) -> str | None:
    """Why these cannot be attended to by the specialized kernel; None if they can."""
    width, rows_q, rows_k = q.shape[-1], q.shape[1], k.shape[1]
    if architecture() // 10 != 9:
        return f"this GPU is sm_{architecture()}; the specialized kernel is for sm_90"
    if q.dim() != 4:
        return f"q has {q.dim()} dimensions; [B, S, N, D] is needed"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"q is {q.dtype}; bfloat16 or float16 is needed"
    if width not in SPECIALIZED or v.shape[-1] != width:
        return f"head sizes are {width} and {v.shape[-1]}; both must be one of {sorted(SPECIALIZED)}"
    block = (tiles or SPECIALIZED[width]).block_k
    if q.shape[0] == 0 or rows_q == 0 or rows_k == 0 or rows_k % block:
        return f"q and k have {rows_q} and {rows_k} rows; k needs a multiple of {block}, and neither may be empty"
    if causal and rows_q > rows_k:
        return f"q has {rows_q} rows and k {rows_k}: some queries see nothing"
    return None


def _launch(programs: int, device: torch.device, arguments: tuple, options: dict) -> None:
    """In a context of its own, so that another allocator of Triton's stays as it is."""
    triton.set_allocator(lambda size, _alignment, _stream: torch.empty(size, dtype=torch.int8, device=device))
    attention_forward_specialized_kernel[(programs,)](*arguments, **options)


@triton.jit
def attention_forward_specialized_kernel(
    p_q, k, v, p_out, p_lse, p_sinks, batch, rows_q, rows_k, heads, heads_at_once, group, q_t, q_n, out_t, out_n,
    lse_n, scale, softcap, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """out [B Sq, Nq, D] and lse [Nq, B Sq]; a program a tile of queries and head, the last tiles of sequences first."""
    tiles = tl.cdiv(rows_q, BLOCK_Q)
    head, i = place(tl.program_id(0), tiles * batch, heads, heads_at_once)
    first_q, i_batch = (tiles - 1 - i // batch) * BLOCK_Q, i % batch
    row, count, k_row = i_batch * rows_q + first_q, rows_q - first_q, i_batch * rows_k
    o_q, o_k = tl.arange(0, BLOCK_Q)[:, None], tl.arange(0, BLOCK_K)[None, :]
    # Rows past the sequence are the next one's: what they hold stays in rows that are not stored.
    described = tl.make_tensor_descriptor(
        p_q, [batch * rows_q, (heads - 1) * q_n + D], [q_t.to(tl.int64), 1], [BLOCK_Q, D]
    )  # fmt: skip
    b_q = described.load([row, head * q_n])
    b_top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_Q], tl.float32)
    b_acc = tl.zeros([BLOCK_Q, D], tl.float32)
    position = first_q + rows_k - rows_q
    end = tl.minimum(position + BLOCK_Q, rows_k) if CAUSAL else rows_k
    for first in tl.range(0, end, BLOCK_K, warp_specialize=True):
        b_k = k.load([k_row + first, head // group, 0]).reshape(BLOCK_K, D)
        b_scores = tl.dot(b_q, tl.trans(b_k))
        if SOFTCAP:
            b_scores = softcap * LOG2_E * tanh(b_scores * (scale / softcap))
        else:
            b_scores = b_scores * (scale * LOG2_E)
        if CAUSAL:  # every query sees the first key, so that the maximum is finite from the first block on
            b_scores = tl.where(o_k <= o_q + (position - first), b_scores, float("-inf"))
        b_new = tl.maximum(b_top, tl.max(b_scores, 1))
        b_weights = tl.exp2(b_scores - b_new[:, None])
        b_kept = tl.exp2(b_top - b_new)
        b_sum = b_sum * b_kept + tl.sum(b_weights, 1)
        b_v = v.load([k_row + first, head // group, 0]).reshape(BLOCK_K, D)
        b_acc = tl.dot(b_weights.to(b_v.dtype), b_v, b_acc * b_kept[:, None])
        b_top = b_new
    if SINKS:
        b_sink = tl.load(p_sinks + head) * LOG2_E
        b_new = tl.maximum(b_top, b_sink)
        b_kept = tl.exp2(b_top - b_new)
        b_sum = b_sum * b_kept + tl.exp2(b_sink - b_new)
        b_acc = b_acc * b_kept[:, None]
        b_top = b_new
    o_rows = tl.arange(0, BLOCK_Q)
    tl.store(
        p_lse + head.to(tl.int64) * lse_n + row + o_rows, (b_top + tl.log2(b_sum)) * LN_2, mask=o_rows < count
    )  # fmt: skip
    store_rows(p_out, b_acc / b_sum[:, None], row, head, count, out_t, out_n, D, BLOCK_Q, D, False)
