// Matrix products on small blocks in cache, as attention needs them: queries lie along the vector lanes.
//
// With scores kept transposed, S^T [keys, queries], the softmax runs down the rows with no step across lanes, and S^T
// is at once the B operand of O^T += V^T S^T and, read by rows, the A operand of dV += S^T dO: nothing is repacked
// between the products, which is why gemm_kernel.h (both operands packed) is not used here.
//
//   panel     kLanes<C> queries: [depth][kLanes] (an operand or a result with queries along the lanes)
//   columns   keys [row][col] stored as groups of kRows columns, [group][kKeyBlock][kRows]: read along rows or columns
//             with constant strides, so one copy of K serves S = Q K^T and dQ = dS K
#pragma once
#include "bf16_pair.h"

namespace pyfast {

// kRows x kVectors accumulators: 8 x 3 of 32 registers, or 4 x 3 of 16.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRows = 8;
#else
constexpr int kRows = 4;
#endif
constexpr int kVectors = 3;
template <class C>
constexpr int kLanes = kVectors * Vec<C>::size;

constexpr int64_t kKeyBlock = 256;

constexpr int64_t ceil_to(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// A factor of a product that is the sum of `parts` operands, `step` apart: its products are added up part by part.
struct Split {
  int parts = 1;
  int64_t step = 0;
};

// C [R, NV vectors] (+)= sum over p < depth of a(r, p) b(p, :).
// a(r, p) lies at a[(p / kRows) * a_group + (p % kRows) * DEPTH_STEP + r * ROW_STEP]. Every element of C is one chain
// of sums over p from 0, then one addition if it accumulates: the same bits in every NV and R.
template <class C, int NV, int ROW_STEP, int DEPTH_STEP, int R = kRows, class E>
void tile(int64_t depth, const E* a, int64_t a_group, const E* b, int64_t b_stride, C* c, int64_t c_stride,
          bool accumulate, Split split_a = {}, Split split_b = {}) {
  constexpr int L = Vec<C>::size;
  vec_t<C> sum[R][NV];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
    for (int v = 0; v < NV; ++v) sum[r][v] = zero<C>();
  auto step = [&](const E* ap, const E* bp) __attribute__((always_inline)) {
    decltype(operands(bp)) bv[NV];
#pragma GCC unroll 3
    for (int v = 0; v < NV; ++v) bv[v] = operands(bp + v * L);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const auto av = repeated(ap + r * ROW_STEP);
#pragma GCC unroll 3
      for (int v = 0; v < NV; ++v) add_products<C>(sum[r][v], av, bv[v]);
    }
  };
  for (int part = 0; part < split_a.parts * split_b.parts; ++part) {  // at most one of them has several
    const E *ap = a + part * split_a.step, *bp = b + part * split_b.step;
    int64_t left = depth;
    for (; left >= kRows; left -= kRows, ap += a_group)
#pragma GCC unroll 8
      for (int p = 0; p < kRows; ++p, bp += b_stride) step(ap + p * DEPTH_STEP, bp);
    for (int64_t p = 0; p < left; ++p, bp += b_stride) step(ap + p * DEPTH_STEP, bp);
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r, c += c_stride)
#pragma GCC unroll 3
    for (int v = 0; v < NV; ++v) store(c + v * L, accumulate ? load(c + v * L) + sum[r][v] : sum[r][v]);
}

// S^T [rows, lanes] = columns [rows, depth] x panel [depth, lanes] for rows [begin, end), multiples of kRows.
template <class C, int NV, class E>
void columns_times_panel(const E* columns, int64_t begin, int64_t end, int64_t depth, const E* panel, C* s) {
  constexpr int W = kLanes<C>;
  for (int64_t r = begin; r < end; r += kRows)
    tile<C, NV, kRows, 1>(depth, columns + r * kRows, kKeyBlock * kRows, panel, W, s + r * W, W, false);
}

// result [width, lanes] (+)= columns^T [width, keys] x S^T [keys, lanes] over keys [begin, end); width: whole kRows.
// Of pairs: keys 2 i and 2 i + 1 make a pair; begin and end are even.
template <class C, int NV, class E>
void columns_transposed_times_scores(const E* columns, int64_t width, int64_t begin, int64_t end, const E* s, C* result,
                                     bool accumulate, Split split = {}) {
  constexpr int W = kLanes<C>, N = kValues<C, E>;
  for (int64_t i = 0; i < width; i += kRows)
    tile<C, NV, 1, kRows>((end - begin) / N, columns + i * (kKeyBlock / N) + begin / N * kRows, kRows * kRows,
                          s + begin / N * W, W, result + i * W, W, accumulate, {}, split);
}

// result [keys, width] += S^T [keys, lanes] x rows [lanes, width] for keys [begin, end), multiples of kRows; width is
// padded to whole vectors and is the row stride of both. Of pairs: lanes 2 i and 2 i + 1 make a pair.
template <class C, class E>
void scores_times_rows(const E* s, int64_t begin, int64_t end, int64_t lanes, const E* rows, int64_t width, C* result,
                       Split split = {}) {
  constexpr int W = kLanes<C> / kValues<C, E>, L = Vec<C>::size;
  lanes = (lanes + kValues<C, E> - 1) / kValues<C, E>;
  for (int64_t vectors = width / L, j = 0; vectors > 0;) {
    // Four vectors as 2 + 2, not 3 + 1: a tile one vector wide is bound by the broadcasts.
    const int64_t nv = vectors == 4 ? 2 : std::min<int64_t>(vectors, kVectors);
    for (int64_t r = begin, rows_done; r < end; r += rows_done) {
      const E *a = s + r * W, *b = rows + j;
      C* c = result + r * width + j;
      auto run = [&](auto n, auto height) {
        tile<C, n, W, 1, height>(lanes, a, kRows, b, width, c, width, true, split);
        rows_done = height;
      };
      // Tiles of two vectors are higher: as many sums in flight as the others have, to hide the latency.
      constexpr int kHigher = kRows * 3 / 2;
      if (nv == 3)
        run(std::integral_constant<int, 3>(), std::integral_constant<int, kRows>());
      else if (nv == 1)
        run(std::integral_constant<int, 1>(), std::integral_constant<int, kRows>());
      else if (end - r >= kHigher)
        run(std::integral_constant<int, 2>(), std::integral_constant<int, kHigher>());
      else if (end - r >= kRows)
        run(std::integral_constant<int, 2>(), std::integral_constant<int, kRows>());
      else
        run(std::integral_constant<int, 2>(), std::integral_constant<int, kRows / 2>());
    }
    vectors -= nv;
    j += nv * L;
  }
}

// body(std::integral_constant<int, NV>) for a panel with `lanes` used lanes.
template <class C, class Body>
PF_INLINE void with_vectors(int64_t lanes, Body&& body) {
  constexpr int L = Vec<C>::size;
  if (lanes > 2 * L)
    body(std::integral_constant<int, 3>());
  else if (lanes > L)
    body(std::integral_constant<int, 2>());
  else
    body(std::integral_constant<int, 1>());
}

}  // namespace pyfast
