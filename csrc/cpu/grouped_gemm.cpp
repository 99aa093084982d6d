// One product an expert over rows sorted by expert: forward (and the gradient by rows, which is a forward), the gradient
// by the weights, the gradient by the bias.
#include "moe_weight_gradient.h"

namespace pyfast {
namespace {

constexpr int64_t kBlockRows = 128;

// Weight rows [first, first + slab) times the rows of a block.
template <class E, class T>
void forward_block(const GroupedGemm& g, const RowBlock& rows, int64_t first, int64_t slab) {
  using C = sum_t<E>;
  static thread_local Scratch lane_memory, sum_memory, row_memory;
  const LaneBlock<C> block{rows.rows};
  E* lanes = lane_memory.get<E>(block.lanes() * steps_of<E>(g.in));
  const Matrix w = matrix_of(g.w, rows.expert);
  const int64_t group = group_rows<C>(w);
  C* sums = sum_memory.get<C>(block.lanes() * group);
  C* narrow_me = row_memory.get<C>(block.kWide * group);
  pack_lanes<C>(g.x, rows.first, g.in, block, lanes);
  for (int64_t i = first; i < first + slab; i += group) {
    const int64_t count = std::min(group, first + slab - i);
    multiply_lanes<C>(w, first + slab, i, count, g.in, block, lanes, sums, group);
    for (int64_t panel = 0; panel < block.panels(); ++panel) {
      const int64_t start = panel * block.kWide, width = block.width(panel), size = block.count(panel);
      C* values = sums + start * group;
      if (g.bias) {
        const T* bias = static_cast<const T*>(g.bias) + rows.expert * g.out + i;
        for (int64_t j = 0; j < count; ++j)
          for (int64_t l = 0; l < width; ++l) values[j * width + l] += widen(bias[j]);
      }
      T* y = static_cast<T*>(g.y) + (rows.first + start) * g.out + i;
      if constexpr (std::is_same_v<T, C>) {
        store_rows<C>(values, width, size, count, y, g.out);
      } else {
        store_rows<C>(values, width, size, count, narrow_me, group);
        for (int64_t r = 0; r < size; ++r) {
          int64_t j = 0;
          const C* row = narrow_me + r * group;
          for (; j + Vec<C>::size <= count; j += Vec<C>::size) store(y + r * g.out + j, load(row + j));
          for (; j < count; ++j) narrow(row[j], y + r * g.out + j);
        }
      }
    }
  }
}

template <class T, class E>
void forward(const GroupedGemm& g) {
  using C = sum_t<E>;
  if (g.out == 0 || g.rows == 0) return;
  const ExpertOffsets& groups = g.groups;
  const int64_t begin = groups.offsets[0], end = groups.offsets[groups.experts];
  std::fill_n(static_cast<T*>(g.y), begin * g.out, T{});
  std::fill_n(static_cast<T*>(g.y) + end * g.out, (g.rows - end) * g.out, T{});
  const auto blocks = row_blocks<C>(groups, 0, groups.experts, kBlockRows);
  const int64_t count = int64_t(blocks.size());
  if (count == 0) return;
  // Slabs of weight rows where there are too few blocks to keep all threads busy.
  const int64_t wanted = std::max<int64_t>(1, (4 * g.threads + count - 1) / count);
  const int64_t slab = round_up((g.out + wanted - 1) / wanted, kGroup<C>), slabs = (g.out + slab - 1) / slab;
  parallel_tasks(count * slabs, g.threads, [&](int64_t task, int) {
    const int64_t first = task % slabs * slab;
    forward_block<E, T>(g, blocks[task / slabs], first, std::min(slab, g.out - first));
  });
}

template <class T>
void bias_gradient(const GroupedBiasGradient& g) {
  using C = compute_t<T>;
  constexpr int64_t kColumns = 256;
  const int64_t parts = (g.width + kColumns - 1) / kColumns;
  parallel_tasks(g.groups.experts * parts, g.threads, [&](int64_t task, int) {
    const int64_t e = task / parts, j = task % parts * kColumns, count = std::min(kColumns, g.width - j);
    C* sum = static_cast<C*>(g.dbias) + e * g.width + j;
    std::fill_n(sum, count, C(0));
    for (int64_t r = g.groups.offsets[e]; r < g.groups.offsets[e + 1]; ++r) {
      const T* row = static_cast<const T*>(g.dy.data) + r * g.dy.row_stride + j * g.dy.col_stride;
      for (int64_t q = 0; q < count; ++q) sum[q] += widen(row[q * g.dy.col_stride]);
    }
  });
}

}  // namespace

void grouped_gemm(const GroupedGemm& g) {
#if defined(__AVX512F__)
  if (bfloat16_dot() && g.x.dtype == DType::bf16 && g.w.dtype == DType::bf16) return forward<bf16, bf16_pair>(g);
#endif
  with_dtype(g.x.dtype, [&](auto* tag) {
    using T = std::decay_t<decltype(*tag)>;
    forward<T, compute_t<T>>(g);
  });
}

void grouped_weight_gradient(const GroupedWeightGradient& g) {
  const WeightGradient gradient{g.left, g.right, g.left_width, g.right_width, g.dw, g.accumulate};
  if (g.dw.dtype == DType::f64)
    weight_gradients<double>(&gradient, 1, g.groups, 0, g.groups.experts, g.threads);
  else
    weight_gradients<float>(&gradient, 1, g.groups, 0, g.groups.experts, g.threads);
}

void grouped_bias_gradient(const GroupedBiasGradient& g) {
  with_dtype(g.dy.dtype, [&](auto* tag) { bias_gradient<std::decay_t<decltype(*tag)>>(g); });
}

}  // namespace pyfast
