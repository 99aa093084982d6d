"""Which expert, rows and columns a program of a grouped GEMM works on, found on the device from `offsets` alone.

Rows sorted by expert are cut into tiles of BLOCK_M rows that never cross an expert's border. How many tiles there are
is known on the device only; the host knows the bound R // BLOCK_M + min(E, R), so it launches a fixed number of
programs and each walks over the tiles that are its own. Nothing is read back.

Shape letters: R sorted rows, E experts. Prefixes: p_ pointer, o_ offset, b_ block in registers, m_ mask, i_ index.
"""

from __future__ import annotations

import triton
import triton.language as tl


def row_tile_bound(rows: int, experts: int, block_m: int) -> int:
    """The most tiles of `block_m` rows that `rows` rows of `experts` experts can fall into."""
    return rows // block_m + min(experts, rows)


@triton.jit
def row_bound(p_offsets, i_expert, R):
    """offsets[i_expert], kept inside the buffer: wrong offsets then give wrong numbers, never a wild access."""
    bound = tl.load(p_offsets + i_expert)
    return tl.minimum(tl.maximum(bound, 0), R).to(tl.int32)


@triton.jit
def cumulative_tiles(p_offsets, E, R, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """[EXPERTS] number of row tiles of the experts 0..e; experts from E on repeat the total."""
    o_e = tl.arange(0, EXPERTS)
    m_e = o_e < E
    b_begin = tl.load(p_offsets + o_e, mask=m_e, other=0)
    b_end = tl.load(p_offsets + o_e + 1, mask=m_e, other=0)
    b_begin = tl.minimum(tl.maximum(b_begin, 0), R).to(tl.int32)
    b_end = tl.minimum(tl.maximum(b_end, 0), R).to(tl.int32)
    b_rows = tl.maximum(b_end - b_begin, 0)
    return tl.cumsum((b_rows + BLOCK_M - 1) // BLOCK_M, 0)


@triton.jit
def locate(i_tile, b_last, p_offsets, R, tiles_n, BLOCK_M: tl.constexpr, ROWS_FIRST: tl.constexpr):
    """(expert, first row, end of the expert's rows, index of the column tile) of tile `i_tile`.

    The search: one comparison with every expert's last tile and a sum, instead of log2(E) loads that wait for each
    other. ROWS_FIRST walks down an expert's rows before it moves to the next columns, which keeps a slice of the
    weights in cache; otherwise a slice of the rows stays.
    """
    m_before = b_last * tiles_n <= i_tile
    i_expert = tl.sum(m_before.to(tl.int32), 0)
    first = tl.max(tl.where(m_before, b_last, 0), 0)
    begin = row_bound(p_offsets, i_expert, R)
    end = row_bound(p_offsets, i_expert + 1, R)
    i_local = i_tile - first * tiles_n
    if ROWS_FIRST:
        tiles_m = tl.cdiv(end - begin, BLOCK_M)
        i_m = i_local % tiles_m
        i_n = i_local // tiles_m
    else:
        i_m = i_local // tiles_n
        i_n = i_local % tiles_n
    return i_expert, begin + i_m * BLOCK_M, end, i_n


@triton.jit
def tile_pointers(p_y, o_rows, o_n, N, BLOCK_N: tl.constexpr):
    """[BLOCK_M, BLOCK_N] pointers into y [R, N] (contiguous): a 64-bit pointer a row plus small constants, which the
    compiler keeps as immediate offsets; any other order of these sums costs it two registers an element."""
    p_rows = p_y + o_rows.to(tl.int64) * N + o_n
    return p_rows[:, None] + tl.arange(0, BLOCK_N)[None, :]


@triton.jit
def halves(b_x):
    """The left and right half of the columns of a tile, so that an epilogue holds the registers of a part only."""
    b_pairs = tl.reshape(b_x, [b_x.shape[0], 2, b_x.shape[1] // 2])
    return tl.split(tl.permute(b_pairs, [0, 2, 1]))


@triton.jit
def quarters(b_x):
    """The same in four parts, from left to right."""
    b_left, b_right = halves(b_x)
    b_0, b_1 = halves(b_left)
    b_2, b_3 = halves(b_right)
    return b_0, b_1, b_2, b_3


@triton.jit
def zero_outside(p_y, p_offsets, E, R, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Write 0 into the rows of y [R, N] (contiguous) before offsets[0] and from offsets[E] on; programs share it."""
    first = row_bound(p_offsets, 0, R)
    last = row_bound(p_offsets, E, R)
    tiles_n = tl.cdiv(N, BLOCK_N)
    head = tl.cdiv(first, BLOCK_M)
    total = (head + tl.cdiv(R - last, BLOCK_M)) * tiles_n
    b_zero = tl.zeros([BLOCK_M, BLOCK_N], p_y.dtype.element_ty)
    for i_tile in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        i_m = i_tile // tiles_n
        in_head = i_m < head
        o_row = tl.where(in_head, i_m * BLOCK_M, last + (i_m - head) * BLOCK_M) + tl.arange(0, BLOCK_M)
        o_n = (i_tile % tiles_n) * BLOCK_N
        o_col = o_n + tl.arange(0, BLOCK_N)
        end = tl.where(in_head, first, R)
        tl.store(tile_pointers(p_y, o_row, o_n, N, BLOCK_N), b_zero, mask=(o_row < end)[:, None] & (o_col < N)[None, :])
