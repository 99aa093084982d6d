// y[t] = sum over k of p[t, k] W_down[e] (silu(g) u), (g, u) = W_gate_up[e] x[t].
//
// Task: a block of rows of one expert, gathered from x into panels, through up-projection, SwiGLU and down-projection
// without leaving the caches. Then one pass sums the slots of each token in order.
#include "moe_mlp.h"

namespace pyfast {
namespace {

// Keeps one vector of gate or up, all of it or its first `count` lanes.
template <class K, class C>
PF_INLINE void keep_lanes(K* kept, int64_t count, const vec_t<C>& value) {
  constexpr int64_t L = Vec<C>::size;
  if (count >= L) {
    store_kept(kept, value);
  } else if (count > 0) {
    K part[L];
    store_kept(part, value);
    std::memcpy(kept, part, count * sizeof(K));
  }
}

// Keeps gate and up of one panel (weight rows [f, f + count)) and turns them into the activation.
template <class T, class C, class E>
void activate(const C* gate, const C* up, int64_t count, int64_t width, int64_t lanes, kept_t<T>* kept_gate,
              kept_t<T>* kept_up, E* activation) {
  constexpr int64_t L = Vec<C>::size, N = kValues<C, E>;  // N divides count
  for (int64_t j = 0; j < count; j += N)
    for (int64_t l = 0; l < width; l += L) {
      vec_t<C> rows[N];
      for (int64_t i = 0; i < N; ++i) {
        const vec_t<C> g = load(gate + (j + i) * width + l), u = load(up + (j + i) * width + l);
        rows[i] = g * sigmoid<C>(g) * u;
        if (!kept_gate) continue;
        keep_lanes<kept_t<T>, C>(kept_gate + (j + i) * lanes + l, lanes - l, g);
        keep_lanes<kept_t<T>, C>(kept_up + (j + i) * lanes + l, lanes - l, u);
      }
      store_operands(activation + j / N * width + l, rows);
    }
}

template <class T, class E>
void forward_block(const MoeMlpForward& g, const RowBlock& rows) {
  using C = sum_t<E>;
  constexpr int64_t N = kValues<C, E>;
  static thread_local Scratch x_memory, activation_memory, sum_memory;
  const int64_t H = g.shape.width, F = g.shape.ffn;
  const LaneBlock<C> block{rows.rows};
  E* x = x_memory.get<E>(block.lanes() * steps_of<E>(H));
  E* activation = activation_memory.get<E>(block.lanes() * steps_of<E>(F));
  const Matrix w_gate_up = matrix_of(g.shape.w_gate_up, rows.expert), w_down = matrix_of(g.shape.w_down, rows.expert);
  const int64_t up_group = group_rows<C>(w_gate_up), down_group = group_rows<C>(w_down);
  C* gate = sum_memory.get<C>(2 * block.lanes() * std::max(up_group, down_group));
  C* up = gate + block.lanes() * up_group;
  ExpertRows source = g.x;
  source.gather = g.shape.gather;
  pack_lanes<C>(source, rows.first, H, block, x);
  for (int64_t f = 0; f < F; f += up_group) {
    const int64_t count = std::min(up_group, F - f);
    multiply_lanes<C>(w_gate_up, F, f, count, H, block, x, gate, up_group);
    multiply_lanes<C>(w_gate_up, 2 * F, F + f, count, H, block, x, up, up_group);
    for (int64_t panel = 0; panel < block.panels(); ++panel) {
      const int64_t start = panel * block.kWide, width = block.width(panel), lanes = block.count(panel);
      auto* kept = g.pre ? static_cast<kept_t<T>*>(g.pre) + (rows.first + start) * 2 * F : nullptr;
      activate<T, C, E>(gate + start * up_group, up + start * up_group, count, width, lanes,
                     kept ? kept + f * lanes : nullptr, kept ? kept + (F + f) * lanes : nullptr,
                     activation + (start * F + f * width) / N);
    }
  }
  for (int64_t h = 0; h < H; h += down_group) {
    const int64_t count = std::min(down_group, H - h);
    multiply_lanes<C>(w_down, H, h, count, F, block, activation, gate, down_group);
    for (int64_t panel = 0; panel < block.panels(); ++panel) {
      const int64_t start = panel * block.kWide;
      store_rows<C>(gate + start * down_group, block.width(panel), block.count(panel), count,
                    static_cast<C*>(g.rows) + (rows.first + start) * H + h, H);
    }
  }
}

template <class T, class E>
void forward(const MoeMlpForward& g) {
  using C = sum_t<E>;
  const MoeMlpShape& s = g.shape;
  const auto blocks = row_blocks<C>(s.groups, 0, s.groups.experts, kMlpRows);
  parallel_tasks(int64_t(blocks.size()), s.threads, [&](int64_t task, int) { forward_block<T, E>(g, blocks[task]); });
  if (g.pre) {  // rows of nobody: kept memory is defined
    const int64_t used = s.groups.offsets[s.groups.experts], item = 2 * s.ffn;
    std::fill_n(static_cast<kept_t<T>*>(g.pre) + used * item, (s.tokens * s.top_k - used) * item, kept_t<T>{});
  }
  sum_over_slots<T>(s, static_cast<const C*>(s.weights), static_cast<const C*>(g.rows), static_cast<T*>(g.y));
}

}  // namespace

void moe_mlp_forward(const MoeMlpForward& g) {
  with_operands(g.shape, [&](auto* tag, auto* operand) {
    forward<std::decay_t<decltype(*tag)>, std::decay_t<decltype(*operand)>>(g);
  });
}

}  // namespace pyfast
