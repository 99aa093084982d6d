// The pieces every matrix product here is made of: packing, the micro-kernel, and the loops over tiles.
//
//   C [m, n] (+)= scale * A [m, k] B [k, n]
//
// Both operands are first copied into *panels*, the order in which the micro-kernel reads them:
//
//   A: panels of MR rows,    packed[panel][k][MR]      MR = Tile<C>::rows
//   B: panels of NR columns, packed[panel][k][NR]      NR = Tile<C>::cols, a few vectors
//
// with zeros where a panel sticks out of the matrix. Packing takes any strides (so transposes are free) and any storage
// dtype: bf16 and f16 widen on the way, or bf16 stays in pairs (bf16_pair.h; E is then not C, and k counts pairs). A packed
// operand can be used any number of times. The micro-kernel keeps one MR x NR tile of C in registers over the whole depth.
// (Goto and van de Geijn 2008; BLIS, Van Zee and van de Geijn 2015)
//
//   pack_a / pack_b / pack_a_rows   one operand -> panels
//   micro_kernel<C, ROWS>           one full tile
//   edge_tile                       one tile of any size up to MR x NR
//   multiply_panels                 all tiles of a packed block of A times a packed block of B
//   gemm_blocked                    the whole product: blocks for the caches, tasks for the threads (gemm_blocked.h)
//
// An element of C is one chain of fmas over k, whatever the tile it falls in: the same bits for every blocking of m and
// n and every number of threads. (Blocks of k are added up in order: their size, kDepthBlock, is part of the result.)
#pragma once
#include <algorithm>

#include "gemm_pack_pairs.h"
#include "transpose.h"

namespace pyfast {

// The micro-tile. The accumulators fill the register file but for the B vectors and one broadcast of A:
// 12 x 2 of 32 registers (AVX-512, NEON), 6 x 2 of 16 (AVX2), 4 x 2 of 16 (SSE2, which has no fma and needs temporaries).
template <class C>
struct Tile {
#if defined(__AVX512F__) || defined(__aarch64__)
  static constexpr int rows = 12;
#elif defined(__AVX2__)
  static constexpr int rows = 6;
#else
  static constexpr int rows = 4;
#endif
  static constexpr int vectors = 2;
  static constexpr int cols = vectors * Vec<C>::size;
};

// Depth for which a panel of B (kDepthBlock x NR) and a block of A stay in the caches near the core.
constexpr int64_t kDepthBlock = 384;

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Elements of packed A with `rows` rows, of packed B with `cols` columns.
template <class C>
constexpr int64_t packed_a_size(int64_t rows, int64_t depth) {
  return round_up(rows, Tile<C>::rows) * depth;
}
template <class C>
constexpr int64_t packed_b_size(int64_t cols, int64_t depth) {
  return round_up(cols, Tile<C>::cols) * depth;
}

// ---- packing --------------------------------------------------------------------------------------------------------

namespace detail {

// One panel whose lanes lie apart and whose depth is contiguous (A as stored, B transposed). lane(i) -> const T*.
// `kChunk` values of each lane are widened into a small square first: then one transposition serves every dtype.
template <int W, class C, class T, class Lane>
void pack_deep_panel(Lane&& lane, int lanes, int64_t depth, C* out) {
  constexpr int kChunk = Vec<C>::size > 8 ? Vec<C>::size : 8;
  alignas(64) C square[W * kChunk];
  std::fill(square + lanes * kChunk, square + W * kChunk, C(0));
  const T* source[W];
  for (int i = 0; i < lanes; ++i) source[i] = lane(i);
  for (int64_t k = 0; k < depth; k += kChunk, out += kChunk * W) {
    const int count = int(std::min<int64_t>(kChunk, depth - k));
    if (count < kChunk) {
      for (int i = 0; i < W; ++i)
        for (int j = 0; j < count; ++j) out[j * W + i] = i < lanes ? C(widen(source[i][k + j])) : C(0);
      return;
    }
    for (int i = 0; i < lanes; ++i)
      for (int j = 0; j < kChunk; j += Vec<C>::size) store(square + i * kChunk + j, load(source[i] + k + j));
    for (int j = 0; j < kChunk; j += 4) {
      int i = 0;
      for (; i + 4 <= W; i += 4) transpose4<W>(square + i * kChunk + j, kChunk, out + j * W + i);
      for (; i < W; ++i)
        for (int q = j; q < j + 4; ++q) out[q * W + i] = square[i * kChunk + q];
    }
  }
}

// One panel whose lanes are contiguous (B as stored, A transposed).
template <int W, class C, class T>
void pack_wide_panel(const T* in, int64_t depth_stride, int lanes, int64_t depth, C* out) {
  constexpr int kWhole = W / Vec<C>::size * Vec<C>::size;  // lanes in whole vectors
  for (int64_t k = 0; k < depth; ++k, in += depth_stride, out += W) {
    if (lanes == W) {
      for (int i = 0; i < kWhole; i += Vec<C>::size) store(out + i, load(in + i));
      if constexpr (std::is_same_v<T, C>)
        std::memcpy(out + kWhole, in + kWhole, (W - kWhole) * sizeof(C));
      else
        for (int i = kWhole; i < W; ++i) out[i] = widen(in[i]);
    } else {
      for (int i = 0; i < W; ++i) out[i] = i < lanes ? C(widen(in[i])) : C(0);
    }
  }
}

// `lanes` x `depth` values into panels of W lanes.
template <int W, class C, class T>
void pack(const T* in, int64_t lane_stride, int64_t depth_stride, int64_t lanes, int64_t depth, C* out) {
  if constexpr (std::is_same_v<C, bf16_pair>) {
    pack_pairs<W, T>(in, lane_stride, depth_stride, lanes, depth, out);
  } else {
    for (int64_t first = 0; first < lanes; first += W, out += W * depth) {
      const T* panel = in + first * lane_stride;
      const int count = int(std::min<int64_t>(W, lanes - first));
      if (depth_stride == 1) {
        pack_deep_panel<W, C, T>([&](int i) { return panel + i * lane_stride; }, count, depth, out);
      } else if (lane_stride == 1) {
        pack_wide_panel<W, C, T>(panel, depth_stride, count, depth, out);
      } else {
        for (int64_t k = 0; k < depth; ++k)
          for (int i = 0; i < W; ++i)
            out[k * W + i] = i < count ? C(widen(panel[i * lane_stride + k * depth_stride])) : C(0);
      }
    }
  }
}

}  // namespace detail

// A [rows, depth] at a[i * row_stride + k * depth_stride]; out has packed_a_size<C>(rows, depth) elements.
template <class E, class T>
void pack_a(const T* a, int64_t row_stride, int64_t depth_stride, int64_t rows, int64_t depth, E* out) {
  detail::pack<Tile<sum_t<E>>::rows, E, T>(a, row_stride, depth_stride, rows, depth, out);
}

// B [depth, cols] at b[k * depth_stride + j * col_stride]; out has packed_b_size<C>(cols, depth) elements.
template <class E, class T>
void pack_b(const T* b, int64_t depth_stride, int64_t col_stride, int64_t depth, int64_t cols, E* out) {
  detail::pack<Tile<sum_t<E>>::cols, E, T>(b, col_stride, depth_stride, cols, depth, out);
}

// A whose rows lie anywhere, each contiguous: row(i) -> const T*. A gather costs nothing on top of packing.
template <class C, class T, class Row>
void pack_a_rows(Row&& row, int64_t rows, int64_t depth, C* out) {
  constexpr int MR = Tile<C>::rows;
  for (int64_t first = 0; first < rows; first += MR, out += MR * depth)
    detail::pack_deep_panel<MR, C, T>([&](int i) -> const T* { return row(first + i); },
                                      int(std::min<int64_t>(MR, rows - first)), depth, out);
}

// ---- the micro-kernel -----------------------------------------------------------------------------------------------

// c [ROWS, NR] = (accumulate ? c : 0) + scale * a b for one panel of A (its first ROWS rows) and one of B.
template <class C, int ROWS, class E>
void micro_kernel(int64_t depth, const E* __restrict a, const E* __restrict b, C* __restrict c, int64_t c_stride,
                  C scale, bool accumulate) {
  constexpr int MR = Tile<C>::rows, NV = Tile<C>::vectors, L = Vec<C>::size;
  // Not unrolled, or the addresses of all rows would take up vector registers through the loop over k.
#pragma GCC unroll 1
  for (int r = 0; r < ROWS; ++r) __builtin_prefetch(c + r * c_stride, 1);
  vec_t<C> sum[ROWS][NV];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) sum[r][v] = zero<C>();
  for (int64_t k = 0; k < depth; ++k, a += MR, b += NV * L) {
    decltype(operands(b)) bv[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) bv[v] = operands(b + v * L);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const auto av = repeated(a + r);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) add_products<C>(sum[r][v], av, bv[v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r, c += c_stride)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v)
      store(c + v * L, accumulate ? load(c + v * L) + sum[r][v] * scale : sum[r][v] * scale);
}

// The smallest micro-kernel that covers `rows` rows (all of MR, two thirds or one third of it).
template <class C, class E>
PF_INLINE void micro_kernel_for(int64_t rows, int64_t depth, const E* a, const E* b, C* c, int64_t c_stride, C scale,
                                bool accumulate) {
  constexpr int MR = Tile<C>::rows, two = MR * 2 / 3, one = MR / 3;
  if (rows > two)
    micro_kernel<C, MR>(depth, a, b, c, c_stride, scale, accumulate);
  else if (rows > one)
    micro_kernel<C, two>(depth, a, b, c, c_stride, scale, accumulate);
  else
    micro_kernel<C, one>(depth, a, b, c, c_stride, scale, accumulate);
}

// A tile at the border of C: rows <= MR, cols <= NR; nothing outside is read or written.
template <class C, class E>
void edge_tile(int64_t rows, int64_t cols, int64_t depth, const E* a, const E* b, C* c, int64_t c_stride, C scale,
               bool accumulate) {
  constexpr int MR = Tile<C>::rows, NR = Tile<C>::cols;
  alignas(64) C tile[MR * NR];
  if (accumulate)
    for (int64_t r = 0; r < MR; ++r)
      for (int64_t j = 0; j < NR; ++j) tile[r * NR + j] = r < rows && j < cols ? c[r * c_stride + j] : C(0);
  micro_kernel_for<C>(rows, depth, a, b, tile, NR, scale, accumulate);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = 0; j < cols; ++j) c[r * c_stride + j] = tile[r * NR + j];
}

// ---- tile loops -----------------------------------------------------------------------------------------------------

// C [rows, cols] (+)= scale * A B for packed A [rows, depth] and packed B [depth, cols]. A panel of B stays in L1 while
// the panels of A pass by: keep the block of A (rows x depth) within L2.
template <class C, class E>
void multiply_panels(int64_t rows, int64_t cols, int64_t depth, const E* a, const E* b, C* c, int64_t c_stride,
                     C scale = C(1), bool accumulate = false) {
  constexpr int MR = Tile<C>::rows, NR = Tile<C>::cols;
  for (int64_t j = 0; j < cols; j += NR)
    for (int64_t i = 0; i < rows; i += MR) {
      const E *a_panel = a + i * depth, *b_panel = b + j * depth;
      C* tile = c + i * c_stride + j;
      if (i + MR <= rows && j + NR <= cols)
        micro_kernel<C, MR>(depth, a_panel, b_panel, tile, c_stride, scale, accumulate);
      else
        edge_tile<C>(std::min<int64_t>(MR, rows - i), std::min<int64_t>(NR, cols - j), depth, a_panel, b_panel, tile,
                     c_stride, scale, accumulate);
    }
}

}  // namespace pyfast
