// The product of gemm_blocked.h over rows of several owners: each panel is taken when its owner's flag has risen, and an
// owner's flag is raised when the last of its panels is done. An element of out has the bits that gemm gives it.
#include <vector>

#include "../flags.h"
#include "gemm_blocked.h"

namespace pyfast {
namespace {

// A piece of a panel that one task computes.
struct Block {
  int64_t rank, a_row, out_row, rows;
};

std::vector<Block> blocks_of(const PanelGemm& g, int64_t row_block) {
  std::vector<Block> blocks;
  for (int64_t panel = 0; panel < g.count; ++panel) {
    const int64_t* p = g.panels + 4 * panel;
    for (int64_t row = 0; row < p[3]; row += row_block)
      blocks.push_back({p[0], p[1] + row, p[2] + row, std::min(row_block, p[3] - row)});
  }
  return blocks;
}

// The first failure, as 4 * rank + Arrival; the other tasks then end without waiting.
class Failure {
 public:
  bool any() const { return code_.load(std::memory_order_relaxed) >= 0; }
  void set(int64_t rank, Arrival state) {
    int64_t none = -1;
    code_.compare_exchange_strong(none, 4 * rank + int64_t(state));
  }
  int64_t code() const { return code_.load(); }

 private:
  std::atomic<int64_t> code_{-1};
};

void raise_all(const PanelGemm& g) {
  for (int64_t rank = 0; rank < g.rank_count; ++rank)
    if (Flag* flag = g.ranks[rank].leaves; flag && !reached(*flag, g.epoch)) raise_flag(*flag, g.epoch);
}

// The result of a sum over nothing: 0, or what was there.
template <class Out>
int64_t empty_product(const PanelGemm& g) {
  for (int64_t panel = 0; panel < g.count && !g.accumulate; ++panel)
    for (int64_t row = 0; row < g.panels[4 * panel + 3]; ++row)
      std::fill_n(static_cast<Out*>(g.out) + (g.panels[4 * panel + 2] + row) * g.out_row_stride, g.n, Out{});
  raise_all(g);
  return -1;
}

template <class E, class Out>
int64_t panel_gemm(const PanelGemm& g) {
  if (g.n == 0 || g.k == 0) return empty_product<Out>(g);
  using C = sum_t<E>;
  constexpr int NR = Tile<C>::cols;
  static thread_local Scratch b_memory;
  constexpr bool direct = std::is_same_v<Out, C>;
  constexpr int64_t fitting = kPackedBytes / int64_t(sizeof(C));
  // as in gemm_blocked: the same slabs, the same sums
  int64_t column_block = std::min<int64_t>(kMaxColumnBlock, round_up(g.n, NR)), depth = g.k;
  if (direct)
    depth = std::max<int64_t>(1, fitting / column_block / kDepthBlock) * kDepthValues<E>;
  else
    column_block = std::max<int64_t>(8 * NR, std::min(column_block, fitting / steps_of<E>(g.k) / NR * NR));
  const Matrix b{g.b_dtype, g.b, g.b_row_stride, g.b_col_stride};
  int64_t total = 0;
  for (int64_t panel = 0; panel < g.count; ++panel) total += g.panels[4 * panel + 3];
  const int64_t row_block = std::min(kRowBlock, round_up((total + g.threads - 1) / g.threads, Tile<C>::rows));
  const std::vector<Block> blocks = blocks_of(g, row_block);
  std::vector<std::atomic<int64_t>> left(g.rank_count);
  for (const Block& block : blocks) left[block.rank].fetch_add(1, std::memory_order_relaxed);
  Failure failure;
  for (int64_t j = 0; j < g.n; j += column_block)
    for (int64_t p = 0; p < g.k; p += depth) {
      const detail::Slab slab{j, std::min(column_block, g.n - j), p, std::min(depth, g.k - p)};
      const bool last = j + column_block >= g.n && p + depth >= g.k;
      E* packed_b = b_memory.get<E>(packed_b_size<C>(slab.cols, steps_of<E>(slab.depth)));
      pack_b_blocks<E>(b, p, j, slab.depth, slab.cols, packed_b, g.threads);
      parallel_tasks(int64_t(blocks.size()), g.threads, [&](int64_t task, int) {
        const Block& block = blocks[task];
        const PanelRank& owner = g.ranks[block.rank];
        if (failure.any()) return;
        if (owner.arrives) {
          const Arrival state = wait_for(*owner.arrives, g.epoch, g.peers[block.rank], g.timeout_s);
          if (state != Arrival::arrived) return failure.set(block.rank, state);
        }
        // product_rows takes row i of A and of out alike: shift A so that both start at 0
        const Matrix a{g.a_dtype, owner.a, g.a_row_stride, 1};
        with_matrix<E>(a, block.a_row, 0, [&](auto* first) {
          Out* out = static_cast<Out*>(g.out) + block.out_row * g.out_row_stride;
          const Product product{{g.a_dtype, first, g.a_row_stride, 1}, b, g.out_dtype, out, g.out_row_stride,
                                block.rows, g.n, g.k, 1.0, g.accumulate, false};
          detail::product_rows<E, Out>(product, slab, 0, block.rows, packed_b);
        });
        if (last && owner.leaves && left[block.rank].fetch_sub(1, std::memory_order_acq_rel) == 1)
          raise_flag(*owner.leaves, g.epoch);
      });
      if (failure.any()) return failure.code();
    }
  raise_all(g);  // of those without a row
  return -1;
}

}  // namespace

int64_t panel_gemm(const PanelGemm& g) {
#if defined(__AVX512F__)
  const Product whole{{g.a_dtype, nullptr, g.a_row_stride, 1}, {g.b_dtype, nullptr, g.b_row_stride, g.b_col_stride},
                      g.out_dtype, nullptr, g.out_row_stride, 0, g.n, g.k, 1.0, g.accumulate, false};
  if (detail::is_of_pairs(whole)) {
    if (g.out_dtype == DType::f32) return panel_gemm<bf16_pair, float>(g);
    if (g.out_dtype == DType::bf16) return panel_gemm<bf16_pair, bf16>(g);
  }
#endif
  switch (g.out_dtype) {
    case DType::f64: return panel_gemm<double, double>(g);
    case DType::f32: return panel_gemm<float, float>(g);
    case DType::bf16: return panel_gemm<float, bf16>(g);
    case DType::f16: return panel_gemm<float, f16>(g);
  }
  return -1;
}

}  // namespace pyfast
