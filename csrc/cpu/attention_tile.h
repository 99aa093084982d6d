// Matrix products on small blocks in cache, as attention needs them: queries lie along the vector lanes.
//
// With scores kept transposed, S^T [keys, queries], the softmax runs down the rows with no step across lanes, and S^T is
// at once the B operand of O^T += V^T S^T and, read by rows, the A operand of dV += S^T dO: nothing is repacked between
// the products, which is why gemm_kernel.h (both operands packed) is not used here.
//
//   panel     kLanes<C> queries: [depth][kLanes] (an operand or a result with queries along the lanes)
//   columns   keys [row][col] stored as groups of kRows columns, [group][kKeyBlock][kRows]: read along rows or columns
//             with constant strides, so one copy of K serves S = Q K^T and dQ = dS K
#pragma once
#include "simd.h"

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

constexpr int64_t kKeyBlock = 128;

constexpr int64_t ceil_to(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// C [kRows, NV vectors] (+)= sum over p < depth of a(r, p) b(p, :).
// a(r, p) lies at a[(p / kRows) * a_group + (p % kRows) * DEPTH_STEP + r * ROW_STEP]. Every element of C is one chain of
// fmas over p from 0, then one addition if it accumulates: the same bits in every NV.
template <class C, int NV, int ROW_STEP, int DEPTH_STEP>
void tile(int64_t depth, const C* a, int64_t a_group, const C* b, int64_t b_stride, C* c, int64_t c_stride,
          bool accumulate) {
  constexpr int L = Vec<C>::size;
  vec_t<C> sum[kRows][NV];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 3
    for (int v = 0; v < NV; ++v) sum[r][v] = zero<C>();
  auto step = [&](const C* ap, const C* bp) __attribute__((always_inline)) {
    vec_t<C> bv[NV];
#pragma GCC unroll 3
    for (int v = 0; v < NV; ++v) bv[v] = load(bp + v * L);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const vec_t<C> av = broadcast<C>(ap[r * ROW_STEP]);
#pragma GCC unroll 3
      for (int v = 0; v < NV; ++v) sum[r][v] += av * bv[v];
    }
  };
  for (; depth >= kRows; depth -= kRows, a += a_group)
#pragma GCC unroll 8
    for (int p = 0; p < kRows; ++p, b += b_stride) step(a + p * DEPTH_STEP, b);
  for (int64_t p = 0; p < depth; ++p, b += b_stride) step(a + p * DEPTH_STEP, b);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r, c += c_stride)
#pragma GCC unroll 3
    for (int v = 0; v < NV; ++v) store(c + v * L, accumulate ? load(c + v * L) + sum[r][v] : sum[r][v]);
}

// S^T [rows, lanes] = columns [rows, depth] x panel [depth, lanes] for rows [begin, end), multiples of kRows.
template <class C, int NV>
void columns_times_panel(const C* columns, int64_t begin, int64_t end, int64_t depth, const C* panel, C* s) {
  constexpr int W = kLanes<C>;
  for (int64_t r = begin; r < end; r += kRows)
    tile<C, NV, kRows, 1>(depth, columns + r * kRows, kKeyBlock * kRows, panel, W, s + r * W, W, false);
}

// result [width, lanes] (+)= columns^T [width, keys] x S^T [keys, lanes] over keys [begin, end); width is padded to kRows.
template <class C, int NV>
void columns_transposed_times_scores(const C* columns, int64_t width, int64_t begin, int64_t end, const C* s, C* result,
                                     bool accumulate) {
  constexpr int W = kLanes<C>;
  for (int64_t i = 0; i < width; i += kRows)
    tile<C, NV, 1, kRows>(end - begin, columns + i * kKeyBlock + begin * kRows, kRows * kRows, s + begin * W, W,
                          result + i * W, W, accumulate);
}

// result [keys, width] += S^T [keys, lanes] x rows [lanes, width] for keys [begin, end), multiples of kRows; width is
// padded to whole vectors and is the row stride of both.
template <class C>
void scores_times_rows(const C* s, int64_t begin, int64_t end, int64_t lanes, const C* rows, int64_t width, C* result) {
  constexpr int W = kLanes<C>, L = Vec<C>::size;
  for (int64_t vectors = width / L, j = 0; vectors > 0;) {
    // Four vectors as 2 + 2, not 3 + 1: a tile one vector wide is bound by the broadcasts.
    const int64_t nv = vectors == 4 ? 2 : std::min<int64_t>(vectors, kVectors);
    for (int64_t r = begin; r < end; r += kRows) {
      const C *a = s + r * W, *b = rows + j;
      C* c = result + r * width + j;
      if (nv == 3)
        tile<C, 3, W, 1>(lanes, a, kRows, b, width, c, width, true);
      else if (nv == 2)
        tile<C, 2, W, 1>(lanes, a, kRows, b, width, c, width, true);
      else
        tile<C, 1, W, 1>(lanes, a, kRows, b, width, c, width, true);
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
