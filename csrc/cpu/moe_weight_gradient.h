// dw[e] (+)= left^T right over the rows of each expert, for grouped_gemm and moe_mlp.
//
// Task: (expert, a slab of dw's rows). Both operands are rows of features as they lie in memory (gathered if need be), so
// packing only copies. Sums over rows are chains of fmas in blocks of kRowDepth rows: the same bits for any slabs.
#pragma once
#include "moe_tile.h"

namespace pyfast {

struct WeightGradient {
  ExpertRows left, right;
  int64_t left_width, right_width;
  ExpertMatrices dw;  // data null: not wanted
  bool accumulate;
};

constexpr int64_t kRowDepth = 256;  // steps of depth: of two rows if of pairs
constexpr int64_t kRightColumns = 512;  // of right that are packed at a time: kRowDepth x kRightColumns floats, half of L2

namespace detail {

// Rows [first, first + depth) of x, columns [column, column + lanes) as packed tiles of A; lanes <= kGroup.
template <class E>
void pack_left(const ExpertRows& x, int64_t first, int64_t depth, int64_t column, int64_t lanes, E* out) {
  with_matrix<E>({x.dtype, x.data, x.row_stride, x.col_stride}, 0, column, [&](auto* source) {
    using T = std::decay_t<decltype(*source)>;
    if (x.col_stride == 1)
      pack_columns<E, T>(
          [&](int64_t k) { return source + (x.gather ? int64_t(x.gather[first + k]) : first + k) * x.row_stride; },
          lanes, depth, out, steps_of<E>(depth) * Tile<sum_t<E>>::rows);
    else
      pack_a<E>(source + first * x.row_stride, x.col_stride, x.row_stride, lanes, depth, out);
  });
}

// Gathered rows as panels of B [depth][NR].
template <class T, class C, class Row>
void pack_gathered(Row&& row, int64_t depth, int64_t cols, C* out) {
  constexpr int64_t NR = Tile<C>::cols;
  for (int64_t k = 0; k < depth; ++k) {
    auto* source = row(k);
    for (int64_t j = 0; j < cols; j += NR) {
      C* target = out + j * depth + k * NR;
      const int64_t count = std::min(NR, cols - j);
      widen_run(source + j, count, target);
      std::fill(target + count, target + NR, C(0));
    }
  }
}
#if defined(__AVX512F__)
template <class T, class Row>
void pack_gathered(Row&& row, int64_t depth, int64_t cols, bf16_pair* out) {
  constexpr int NR = Tile<float>::cols;
  pack_wide_pairs<NR, T>(row, cols, depth, out, steps_of<bf16_pair>(depth) * NR);
}
#endif

// The same as pack_left, any number of columns, as panels of B.
template <class E>
void pack_right(const ExpertRows& x, int64_t first, int64_t depth, int64_t column, int64_t cols, E* out) {
  with_matrix<E>({x.dtype, x.data, x.row_stride, x.col_stride}, 0, column, [&](auto* source) {
    using T = std::decay_t<decltype(*source)>;
    if (x.gather)
      pack_gathered<T>([&](int64_t k) { return source + int64_t(x.gather[first + k]) * x.row_stride; }, depth, cols, out);
    else
      pack_b<E>(source + first * x.row_stride, x.row_stride, x.col_stride, depth, cols, out);
  });
}

// c [rows, cols] (+)= the tiles of A times the panels of B.
template <class C, class E>
void multiply_rows(int64_t rows, int64_t cols, int64_t depth, const E* a, const E* b, C* c, int64_t c_stride,
                   bool accumulate) {
  constexpr int64_t MR = Tile<C>::rows, NR = Tile<C>::cols;
  for (int64_t i = 0; i < rows; i += MR)
    for (int64_t j = 0; j < cols; j += NR) {
      const int64_t count = std::min(MR, rows - i), lanes = std::min(NR, cols - j);
      C* tile = c + i * c_stride + j;
      if (is_whole_tile<C>(count) && lanes == NR)
        lane_kernel_for<C, 2, true>(count, depth, a + i * depth, MR, b + j * depth, tile, c_stride, accumulate,
                                    {reinterpret_cast<const char*>(a), 0});
      else
        edge_tile<C>(count, lanes, depth, a + i * depth, b + j * depth, tile, c_stride, C(1), accumulate);
    }
}

// Rows [i, i + slab) of dw of one expert.
template <class E, class Out>
void weight_gradient_slab(const WeightGradient& g, const ExpertOffsets& groups, int64_t expert, int64_t i, int64_t slab) {
  using C = sum_t<E>;
  constexpr int64_t kValuesDeep = kRowDepth * kValues<C, E>;
  static thread_local Scratch a_memory, b_memory, sum_memory;
  const int64_t first = groups.offsets[expert], rows = groups.offsets[expert + 1] - first;
  Out* out = static_cast<Out*>(g.dw.data) + expert * g.dw.expert_stride + i * g.dw.row_stride;
  if (rows == 0) {
    for (int64_t r = 0; r < slab && !g.accumulate; ++r) std::fill_n(out + r * g.dw.row_stride, g.right_width, Out{});
    return;
  }
  constexpr bool direct = std::is_same_v<Out, C>;  // else sums are kept in C until all rows are in, and rounded once
  E* a = a_memory.get<E>(kGroup<C> * kRowDepth);
  E* b = b_memory.get<E>(packed_b_size<C>(std::min(kRightColumns, g.right_width), kRowDepth));
  for (int64_t j = 0; j < g.right_width; j += kRightColumns) {
    const int64_t cols = std::min(kRightColumns, g.right_width - j);
    C* sum = direct ? reinterpret_cast<C*>(out) + j : sum_memory.get<C>(slab * cols);
    const int64_t sum_stride = direct ? g.dw.row_stride : cols;
    for (int64_t r = 0; r < rows; r += kValuesDeep) {
      const int64_t depth = std::min(kValuesDeep, rows - r);
      pack_right<E>(g.right, first + r, depth, j, cols, b);
      for (int64_t q = 0; q < slab; q += kGroup<C>) {
        const int64_t count = std::min(kGroup<C>, slab - q);
        pack_left<E>(g.left, first + r, depth, i + q, count, a);
        multiply_rows<C>(count, cols, steps_of<E>(depth), a, b, sum + q * sum_stride, sum_stride, r > 0 || (direct && g.accumulate));
      }
    }
    if constexpr (!direct)
      for (int64_t q = 0; q < slab; ++q)
        for (int64_t c = 0; c < cols; ++c) narrow(sum[q * cols + c], out + q * g.dw.row_stride + j + c);
  }
}

template <class E>
void weight_gradient_to(const WeightGradient& g, const ExpertOffsets& groups, int64_t expert, int64_t i, int64_t slab) {
  switch (g.dw.dtype) {
    case DType::bf16: return weight_gradient_slab<E, bf16>(g, groups, expert, i, slab);
    case DType::f16: return weight_gradient_slab<E, f16>(g, groups, expert, i, slab);
    default: return weight_gradient_slab<E, float>(g, groups, expert, i, slab);
  }
}

template <class C>
void weight_gradient_task(const WeightGradient& g, const ExpertOffsets& groups, int64_t expert, int64_t i, int64_t slab) {
  if constexpr (std::is_same_v<C, double>) {
    weight_gradient_slab<double, double>(g, groups, expert, i, slab);
  } else {
#if defined(__AVX512F__)
    if (bfloat16_dot() && g.left.dtype == DType::bf16 && g.right.dtype == DType::bf16)
      return weight_gradient_to<bf16_pair>(g, groups, expert, i, slab);
#endif
    weight_gradient_to<float>(g, groups, expert, i, slab);
  }
}

}  // namespace detail

// All gradients of experts [begin, end), from one queue.
template <class C>
void weight_gradients(const WeightGradient* gradients, int count, const ExpertOffsets& groups, int64_t begin,
                      int64_t end, int threads) {
  struct Task {
    int gradient;
    int64_t expert, first, slab, work;
  };
  std::vector<Task> tasks;
  int64_t total = 0;
  const int64_t rows_of_all = groups.offsets[end] - groups.offsets[begin];
  for (int n = 0; n < count; ++n)
    if (gradients[n].dw.data) total += rows_of_all * gradients[n].left_width * gradients[n].right_width;
  const int64_t most = std::max<int64_t>(total / (4 * threads), 1 << 22);  // multiplications of a task
  for (int n = 0; n < count; ++n) {
    const WeightGradient& g = gradients[n];
    if (!g.dw.data || g.right_width == 0) continue;
    for (int64_t e = begin; e < end; ++e) {
      const int64_t rows = groups.offsets[e + 1] - groups.offsets[e];
      if (rows == 0 && g.accumulate) continue;
      const int64_t line = std::max<int64_t>(rows, 1) * g.right_width;
      const int64_t slab = round_up(std::max<int64_t>(most / line, 1), kGroup<C>);
      for (int64_t i = 0; i < g.left_width; i += slab) {
        const int64_t size = std::min(slab, g.left_width - i);
        tasks.push_back({n, e, i, size, size * line});
      }
    }
  }
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.work > b.work; });
  parallel_tasks(int64_t(tasks.size()), threads, [&](int64_t index, int) {
    const Task& task = tasks[index];
    const WeightGradient& g = gradients[task.gradient];
    detail::weight_gradient_task<C>(g, groups, task.expert, task.first, task.slab);
  });
}

}  // namespace pyfast
