// The whole product on top of gemm_kernel.h: blocks for the caches, tasks for the threads, any dtype in and out.
#pragma once
#include "gemm_kernel.h"
#include "parallel.h"
#include "scratch.h"

namespace pyfast {

// A matrix in memory: element (i, j) at data[i * row_stride + j * col_stride].
struct Matrix {
  DType dtype;
  const void* data;
  int64_t row_stride, col_stride;
};

// body(const T*) at element (i, j) of `matrix`. E double takes f64 only, bf16_pair bf16 and f32, E float all but f64.
template <class E, class Body>
PF_INLINE void with_matrix(const Matrix& matrix, int64_t i, int64_t j, Body&& body) {
  const int64_t offset = i * matrix.row_stride + j * matrix.col_stride;
  if constexpr (std::is_same_v<E, double>) {
    body(static_cast<const double*>(matrix.data) + offset);
  } else if constexpr (std::is_same_v<E, bf16_pair>) {
    if (matrix.dtype == DType::bf16) return body(static_cast<const bf16*>(matrix.data) + offset);
    body(static_cast<const float*>(matrix.data) + offset);
  } else {
    switch (matrix.dtype) {
      case DType::bf16: return body(static_cast<const bf16*>(matrix.data) + offset);
      case DType::f16: return body(static_cast<const f16*>(matrix.data) + offset);
      default: return body(static_cast<const float*>(matrix.data) + offset);
    }
  }
}

// Steps of depth that a kernel of operands E takes for `depth` values, and the values of a block of kDepthBlock steps.
template <class E>
constexpr int64_t steps_of(int64_t depth) {
  return (depth + kValues<sum_t<E>, E> - 1) / kValues<sum_t<E>, E>;
}
template <class E>
constexpr int64_t kDepthValues = kDepthBlock * kValues<sum_t<E>, E>;

// B [depth, cols] from row `first_row`, column `first_col` on, packed once for any number of products: blocks of
// kDepthValues, in each the panels. The block that starts at depth p begins at packed + steps_of(p) * round_up(cols, NR).
template <class E>
void pack_b_blocks(const Matrix& b, int64_t first_row, int64_t first_col, int64_t depth, int64_t cols, E* packed,
                   int threads) {
  constexpr int NR = Tile<sum_t<E>>::cols;
  constexpr int64_t kPanels = 4;  // a task packs that many panels of one block
  const int64_t groups = (cols + NR * kPanels - 1) / (NR * kPanels), blocks = (depth + kDepthValues<E> - 1) / kDepthValues<E>;
  parallel_tasks(groups * blocks, cols * depth < 16384 ? 1 : threads, [&](int64_t task, int) {
    const int64_t p = task / groups * kDepthValues<E>, j = task % groups * NR * kPanels;
    const int64_t kc = std::min(kDepthValues<E>, depth - p);
    with_matrix<E>(b, first_row + p, first_col + j, [&](auto* source) {
      pack_b<E>(source, b.row_stride, b.col_stride, kc, std::min(NR * kPanels, cols - j),
                packed + steps_of<E>(p) * round_up(cols, NR) + j * steps_of<E>(kc));
    });
  });
}

// out (+)= scale * A B; out [m, n] in float (double), f32/bf16/f16 storage (f64), columns contiguous.
struct Product {
  Matrix a, b;
  DType out_dtype;
  void* out;
  int64_t out_stride;
  int64_t m, n, k;
  double scale;
  bool accumulate;
  bool round_factors;  // a float factor of a bf16 one may be rounded to bf16
};

constexpr int64_t kRowBlock = 192;            // rows of A a task packs: kRowBlock x kDepthBlock floats, a part of L2
constexpr int64_t kMaxColumnBlock = 1024;     // columns of B that are packed at a time ...
constexpr int64_t kPackedBytes = 6ll << 20;   // ... and how much of it, shared by the threads: a part of L3

namespace detail {

// The part of the product that one packed part of B gives: columns [j, j + cols), summed over [p, p + depth).
struct Slab {
  int64_t j, cols, p, depth;
};

// Rows [i, i + rows) of a slab, from B packed by pack_b_blocks. Other outputs than C take all of k in one slab.
template <class E, class Out>
void product_rows(const Product& g, const Slab& slab, int64_t i, int64_t rows, const E* packed_b) {
  using C = sum_t<E>;
  static thread_local Scratch a_memory, sum_memory;
  E* packed_a = a_memory.get<E>(packed_a_size<C>(rows, kDepthBlock));
  const int64_t cols = slab.cols;
  Out* out = static_cast<Out*>(g.out) + i * g.out_stride + slab.j;
  constexpr bool direct = std::is_same_v<Out, C>;  // else sums are kept in C until all of k is in, and rounded once
  C* sum = direct ? reinterpret_cast<C*>(out) : sum_memory.get<C>(rows * cols);
  const int64_t sum_stride = direct ? g.out_stride : cols;
  for (int64_t p = 0; p < slab.depth; p += kDepthValues<E>) {
    const int64_t kc = std::min(kDepthValues<E>, slab.depth - p);
    with_matrix<E>(g.a, i, slab.p + p, [&](auto* source) {
      pack_a<E>(source, g.a.row_stride, g.a.col_stride, rows, kc, packed_a);
    });
    multiply_panels<C>(rows, cols, steps_of<E>(kc), packed_a,
                       packed_b + steps_of<E>(p) * round_up(cols, Tile<C>::cols), sum, sum_stride,
                       C(g.scale), slab.p + p > 0 || (direct && g.accumulate));
  }
  if constexpr (!direct)
    for (int64_t r = 0; r < rows; ++r, out += g.out_stride, sum += cols) {
      int64_t q = 0;
      for (; q + Vec<C>::size <= cols; q += Vec<C>::size)
        store(out + q, g.accumulate ? load(sum + q) + load(out + q) : load(sum + q));
      for (; q < cols; ++q) narrow(g.accumulate ? sum[q] + widen(out[q]) : sum[q], out + q);
    }
}

template <class E, class Out>
void gemm_blocked(const Product& g, int threads) {
  using C = sum_t<E>;
  constexpr int MR = Tile<C>::rows, NR = Tile<C>::cols;
  if (g.m == 0 || g.n == 0) return;
  if (g.k == 0) {
    for (int64_t i = 0; i < g.m && !g.accumulate; ++i)
      std::fill_n(static_cast<Out*>(g.out) + i * g.out_stride, g.n, Out{});
    return;
  }
  static thread_local Scratch b_memory;
  constexpr int64_t fitting = kPackedBytes / int64_t(sizeof(C));
  int64_t column_block = std::min<int64_t>(kMaxColumnBlock, round_up(g.n, NR)), depth = g.k;
  if (std::is_same_v<Out, C>)  // sums may stay in out from slab to slab
    depth = std::max<int64_t>(1, fitting / column_block / kDepthBlock) * kDepthValues<E>;
  else
    column_block = std::max<int64_t>(8 * NR, std::min(column_block, fitting / steps_of<E>(g.k) / NR * NR));
  const int64_t row_block = std::min(kRowBlock, round_up((g.m + threads - 1) / threads, MR));
  for (int64_t j = 0; j < g.n; j += column_block)
    for (int64_t p = 0; p < g.k; p += depth) {
      const Slab slab{j, std::min(column_block, g.n - j), p, std::min(depth, g.k - p)};
      E* packed_b = b_memory.get<E>(packed_b_size<C>(slab.cols, steps_of<E>(slab.depth)));
      pack_b_blocks<E>(g.b, p, j, slab.depth, slab.cols, packed_b, threads);
      parallel_tasks((g.m + row_block - 1) / row_block, threads, [&](int64_t task, int) {
        const int64_t i = task * row_block;
        product_rows<E, Out>(g, slab, i, std::min(row_block, g.m - i), packed_b);
      });
    }
}

// Whether the factors are bf16, or may be rounded to it.
inline bool is_of_pairs(const Product& g) {
  auto fits = [&](DType dtype) { return dtype == DType::bf16 || (g.round_factors && dtype == DType::f32); };
  return bfloat16_dot() && fits(g.a.dtype) && fits(g.b.dtype) && (g.a.dtype == DType::bf16 || g.b.dtype == DType::bf16);
}

}  // namespace detail

// The product for any dtypes: f64 throughout, or any mix of f32, bf16, f16 with float sums.
inline void gemm_blocked(const Product& g, int threads) {
#if defined(__AVX512F__)
  if (detail::is_of_pairs(g)) {
    if (g.out_dtype == DType::f32) return detail::gemm_blocked<bf16_pair, float>(g, threads);
    if (g.out_dtype == DType::bf16) return detail::gemm_blocked<bf16_pair, bf16>(g, threads);
  }
#endif
  switch (g.out_dtype) {
    case DType::f64: return detail::gemm_blocked<double, double>(g, threads);
    case DType::f32: return detail::gemm_blocked<float, float>(g, threads);
    case DType::bf16: return detail::gemm_blocked<float, bf16>(g, threads);
    case DType::f16: return detail::gemm_blocked<float, f16>(g, threads);
  }
}

}  // namespace pyfast
