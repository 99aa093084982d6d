"""The map between slots and rows sorted by expert, stable by (expert, slot): a counting sort without atomics.

    count    every chunk of slots counts its experts                              counts [chunks, E]
    spread   per expert, chunk after chunk: how many came before                  counts -> exclusive sums, totals [E]
    offsets  exclusive sums of the totals over the experts                        offsets [E + 1]
    place    row = offsets[e] + before in earlier chunks + before in this chunk   gather, slot, inverse

The last number is counted by comparing every slot with the earlier ones of its chunk, so the map is the same bytes on
every run and backend. Everything stays on the device.

Shape letters: S = T * K slots, E experts, K slots a token.
Prefixes: p_ pointer, o_ offset, b_ block, m_ mask, i_ index.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyfast.kernels.triton.expert_tiles import cumulative_tiles
from pyfast.kernels.triton.moe_launch import run_simple

CHUNK = 256  # slots a program; it compares CHUNK * CHUNK / 2 pairs
COMPARED = 32  # of them at a time


@triton.jit
def count_kernel(p_experts, p_counts, S, E, CHUNK: tl.constexpr, BINS: tl.constexpr):
    """counts[chunk, e]: slots of expert e in the chunk. Dropped slots fall into bin E < BINS, which is not stored."""
    i_chunk = tl.program_id(0)
    o_s = i_chunk * CHUNK + tl.arange(0, CHUNK)
    b_id = tl.load(p_experts + o_s, mask=o_s < S, other=-1)  # compared before it is made 32 bits: 2^32 is not 0
    tl.device_assert((b_id >= -1) & (b_id < E), "an expert id is neither -1 nor below the number of experts")
    b_count = tl.histogram(tl.where((b_id >= 0) & (b_id < E), b_id, E).to(tl.int32), BINS)
    o_e = tl.arange(0, BINS)
    tl.store(p_counts + i_chunk.to(tl.int64) * E + o_e, b_count, mask=o_e < E)


@triton.jit
def spread_kernel(p_counts, p_totals, chunks, E, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr):
    """counts [chunks, E] become, in place, their exclusive sums over the chunks; totals [E] their sums."""
    o_e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    b_before = tl.zeros([BLOCK_E], tl.int32)
    for i_c in tl.range(0, chunks, BLOCK_C):
        o_c = i_c + tl.arange(0, BLOCK_C)
        m_c = (o_c < chunks)[:, None] & (o_e < E)[None, :]
        p_tile = p_counts + o_c.to(tl.int64)[:, None] * E + o_e[None, :]
        b_count = tl.load(p_tile, mask=m_c, other=0)
        tl.store(p_tile, b_before[None, :] + tl.cumsum(b_count, 0) - b_count, mask=m_c)
        b_before += tl.sum(b_count, 0)
    tl.store(p_totals + o_e, b_before, mask=o_e < E)


@triton.jit
def offsets_kernel(p_totals, p_offsets, E, EXPERTS: tl.constexpr):
    """offsets[e + 1] = totals[0] + ... + totals[e]."""
    o_e = tl.arange(0, EXPERTS)
    b_total = tl.load(p_totals + o_e, mask=o_e < E, other=0)
    tl.store(p_offsets, 0)
    tl.store(p_offsets + 1 + o_e, tl.cumsum(b_total, 0), mask=o_e < E)


@triton.jit
def place_kernel(
    p_experts, p_before, p_offsets, p_gather, p_slot, p_inverse, S, E, K, CHUNK: tl.constexpr, COMPARED: tl.constexpr
):
    """Where each slot of the chunk goes; and -1 into the chunk's part of gather and slot behind the last row."""
    i_chunk = tl.program_id(0)
    o_first = i_chunk * CHUNK
    o_s = o_first + tl.arange(0, CHUNK)
    m_s = o_s < S
    b_id = tl.load(p_experts + o_s, mask=m_s, other=-1)
    m_kept = (b_id >= 0) & (b_id < E)
    b_expert = b_id.to(tl.int32)
    b_rank = tl.zeros([CHUNK], tl.int32)
    for i_j in tl.range(0, CHUNK, COMPARED):
        o_j = o_first + i_j + tl.arange(0, COMPARED)
        b_other = tl.load(p_experts + o_j, mask=o_j < S, other=-1).to(tl.int32)
        m_earlier = (b_expert[:, None] == b_other[None, :]) & (o_j[None, :] < o_s[:, None])
        b_rank += tl.sum(m_earlier.to(tl.int32), 1)
    b_row = b_rank + tl.load(p_offsets + b_expert, mask=m_kept, other=0)
    b_row += tl.load(p_before + i_chunk.to(tl.int64) * E + b_expert, mask=m_kept, other=0)
    tl.store(p_gather + b_row, o_s // K, mask=m_kept)
    tl.store(p_slot + b_row, o_s, mask=m_kept)
    tl.store(p_inverse + o_s, tl.where(m_kept, b_row, -1), mask=m_s)
    m_unused = m_s & (o_s >= tl.load(p_offsets + E))
    b_none = tl.full([CHUNK], -1, tl.int32)
    tl.store(p_gather + o_s, b_none, mask=m_unused)
    tl.store(p_slot + o_s, b_none, mask=m_unused)


@triton.jit
def tile_list_kernel(
    p_offsets, p_tiles, p_count, E, R, bound, BLOCK: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr
):
    """tiles[i] = (expert, first row) of tile i, (-1, -1) from count on; every program searches all experts for its."""
    b_last = cumulative_tiles(p_offsets, E, R, BLOCK, EXPERTS)
    total = tl.max(b_last, 0)
    o_tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    m_before = b_last[None, :] <= o_tile[:, None]
    b_expert = tl.sum(m_before.to(tl.int32), 1)
    b_first = tl.max(tl.where(m_before, b_last[None, :], 0), 1)
    m_tile = o_tile < tl.minimum(total, bound)
    b_row = tl.load(p_offsets + b_expert, mask=m_tile, other=0).to(tl.int32) + (o_tile - b_first) * BLOCK
    m_room = o_tile < bound
    tl.store(p_tiles + 2 * o_tile, tl.where(m_tile, b_expert, -1), mask=m_room)
    tl.store(p_tiles + 2 * o_tile + 1, tl.where(m_tile, b_row, -1), mask=m_room)
    if tl.program_id(0) == 0:
        tl.store(p_count, total)


def row_map(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(offsets [E + 1], gather [R], slot [R], inverse [R]) int32 of experts [T, K]; R = T * K; -1 is a dropped slot."""
    experts = experts.contiguous()
    slots = experts.numel()

    def empty(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=experts.device)

    offsets, gather, slot, inverse = empty(num_experts + 1), empty(slots), empty(slots), empty(slots)
    if slots == 0 or num_experts == 0:
        return offsets.zero_(), gather.fill_(-1), slot.fill_(-1), inverse.fill_(-1)
    chunks = triton.cdiv(slots, CHUNK)
    counts, totals = empty(chunks * num_experts), empty(num_experts)
    bins = triton.next_power_of_2(num_experts + 1)
    # debug: wrong ids are looked for in this kernel only, and without reading anything back.
    run_simple(count_kernel, chunks, 4, experts, counts, slots, num_experts, CHUNK=CHUNK, BINS=bins, debug=True)
    run_simple(
        spread_kernel, triton.cdiv(num_experts, 16), 4, counts, totals, chunks, num_experts, BLOCK_C=64, BLOCK_E=16
    )
    run_simple(offsets_kernel, 1, 4, totals, offsets, num_experts, EXPERTS=triton.next_power_of_2(num_experts))
    run_simple(
        place_kernel, chunks, 8, experts, counts, offsets, gather, slot, inverse, slots, num_experts, experts.shape[-1],
        CHUNK=CHUNK, COMPARED=COMPARED,
    )  # fmt: skip
    return offsets, gather, slot, inverse


def tile_list(offsets: Tensor, block: int, bound: int) -> tuple[Tensor, Tensor]:
    """(tiles int32 [bound, 2], count int32 [1]): (expert, first row) of each tile of up to `block` sorted rows."""
    experts = offsets.shape[0] - 1
    tiles = torch.empty((bound, 2), dtype=torch.int32, device=offsets.device)
    count = torch.empty(1, dtype=torch.int32, device=offsets.device)
    if experts == 0:
        return tiles.fill_(-1), count.zero_()
    width = triton.next_power_of_2(experts)
    searched = max(1, 4096 // width)  # tiles a program: as many comparisons as stay in registers
    run_simple(
        tile_list_kernel, max(1, triton.cdiv(bound, searched)), 4, offsets.contiguous(), tiles, count, experts,
        torch.iinfo(torch.int32).max, bound, BLOCK=block, EXPERTS=width, TILES=searched,
    )  # fmt: skip
    return tiles, count
