// Backward of the expert MLP, row by row of the sorted order; row r is slot s of token t, p its router weight:
//
//   D = W_down^T dy[t]                      A = silu(g) u, from the kept pre-activation (g, u)
//   dp[s] = <D, A>                          right at p = 0 too: nothing is divided by p
//   (dg, du) = p D . (dA/dg, dA/du)
//   dx[t] = sum over k of W_gate_up^T (dg, du)
//   dW_down += dy[t] (p A)^T                dW_gate_up += (dg, du) x[t]^T
//
// Experts are taken in waves: all rows of a wave first (tasks: blocks of rows), then its weight gradients, from rows that
// are still in the outer caches and in a workspace that no more than a wave needs.
#include <utility>

#include "moe_mlp.h"
#include "moe_weight_gradient.h"

namespace pyfast {
namespace {

constexpr int64_t kWaveBytes = 12ll << 20;  // of dh and activation

// The end of the wave of experts that starts at `begin`.
int64_t wave_end(const MoeMlpShape& s, int64_t begin) {
  const int64_t row_bytes = 3 * s.ffn * (s.dtype == DType::f64 ? 8 : rows_are_bf16(s) ? 2 : 4);
  const int64_t most = std::max(kWaveBytes / std::max<int64_t>(1, row_bytes), 2 * kMlpRows * s.threads);
  int64_t end = begin + 1;
  while (end < s.groups.experts && s.groups.offsets[end + 1] - s.groups.offsets[begin] <= most) ++end;
  return end;
}

// One panel of the slopes: from D (`product`) and (gate, up), weight rows [f, f + count).
template <class C>
struct Panel {
  int64_t width, lanes;
  const C* router;  // [width] p, 0 in unused lanes
  C* dot;           // [width] += <D, A>
};

// gate, up: [count][stride] with the lanes of the panel first. dgate, dup, activation: [count or, of pairs, count / 2]
// [width].
template <class K, class C, class E>
void slopes(const Panel<C>& panel, int64_t count, const C* product, const K* gate, const K* up, int64_t stride, E* dgate,
            E* dup, E* activation) {
  constexpr int64_t L = Vec<C>::size, N = kValues<C, E>;  // N divides count
  for (int64_t l = 0; l < panel.width; l += L) {
    const vec_t<C> p = load(panel.router + l);
    const bool whole = l + L <= stride;
    const int64_t left = std::max<int64_t>(0, std::min(L, stride - l));
    K part_gate[L] = {}, part_up[L] = {};
    vec_t<C> dot = zero<C>();
    for (int64_t j = 0; j < count; j += N) {
      vec_t<C> gate_slope[N], up_slope[N], scaled_activation[N];
      for (int64_t i = 0; i < N; ++i) {
        const K *gate_row = gate + (j + i) * stride + l, *up_row = up + (j + i) * stride + l;
        if (!whole) {
          std::memcpy(part_gate, gate_row, left * sizeof(K));
          std::memcpy(part_up, up_row, left * sizeof(K));
          gate_row = part_gate;
          up_row = part_up;
        }
        const vec_t<C> g = load_kept(gate_row), u = load_kept(up_row), d = load(product + (j + i) * panel.width + l);
        const vec_t<C> s = sigmoid<C>(g), silu = g * s, a = silu * u, scaled = d * p;
        dot += d * a;
        gate_slope[i] = scaled * u * (s + silu * (C(1) - s));
        up_slope[i] = scaled * silu;
        scaled_activation[i] = a * p;
      }
      const int64_t place = j / N * panel.width + l;
      store_operands(dgate + place, gate_slope);
      store_operands(dup + place, up_slope);
      store_operands(activation + place, scaled_activation);
    }
    store(panel.dot + l, load(panel.dot + l) + dot);
  }
}

template <class T, class E>
class BlockBackward {
  using C = sum_t<E>;
  static constexpr int64_t N = kValues<C, E>;

 public:
  // Rows of dh and activation start at `base`, a row of the sorted order.
  BlockBackward(const MoeMlpBackward& g, const RowBlock& rows, int64_t base)
      : g_(g),
        s_(g.shape),
        rows_(rows),
        base_(base),
        block_{rows.rows},
        w_gate_up_(matrix_of(g.shape.w_gate_up, rows.expert)),
        w_down_t_(transposed(matrix_of(g.shape.w_down, rows.expert))) {}

  void run() {
    static thread_local Scratch memory;
    const int64_t H = s_.width, F = s_.ffn, lanes = block_.lanes();
    group_ = std::max(group_rows<C>(w_down_t_), group_rows<C>(transposed(w_gate_up_)));
    C* next = memory.get<C>(lanes * (2 * H + 2 * F + 2 + 4 * group_));  // an E is no larger than a C
    auto take = [&](int64_t size) { return std::exchange(next, next + size); };
    auto take_operands = [&](int64_t depth) { return reinterpret_cast<E*>(take(lanes * depth)); };
    dy_ = take_operands(H);
    x_ = take_operands(H);
    dh_ = take_operands(2 * F);
    activation_ = take_operands(group_);
    router_ = take(lanes);
    dot_ = take(lanes);
    product_ = take(lanes * group_);
    gate_ = take(lanes * group_);
    up_ = take(lanes * group_);
    router_weights();
    pack(g_.dy, dy_);
    if (!g_.pre) pack(g_.x, x_);
    for (int64_t f = 0; f < F; f += group_) hidden_group(f, std::min(group_, F - f));
    if (g_.dweights)
      for (int64_t r = 0; r < rows_.rows; ++r) static_cast<C*>(g_.dweights)[s_.slot[rows_.first + r]] = dot_[r];
    if (g_.dx) input_gradient();
  }

 private:
  void router_weights() {
    std::fill_n(router_, block_.lanes(), C(0));
    std::fill_n(dot_, block_.lanes(), C(0));
    for (int64_t r = 0; r < rows_.rows; ++r)
      router_[r] = static_cast<const C*>(s_.weights)[s_.slot[rows_.first + r]];
  }

  void pack(ExpertRows source, E* panels) {
    source.gather = s_.gather;
    pack_lanes<C>(source, rows_.first, s_.width, block_, panels);
  }

  // Everything of hidden units [f, f + count): D, and from it dp, dh, activation.
  void hidden_group(int64_t f, int64_t count) {
    const int64_t H = s_.width, F = s_.ffn;
    multiply_lanes<C>(w_down_t_, F, f, count, H, block_, dy_, product_, group_);
    if (!g_.pre) {
      multiply_lanes<C>(w_gate_up_, F, f, count, H, block_, x_, gate_, group_);
      multiply_lanes<C>(w_gate_up_, 2 * F, F + f, count, H, block_, x_, up_, group_);
    }
    for (int64_t index = 0; index < block_.panels(); ++index) {
      const int64_t start = index * block_.kWide, row = rows_.first + start;
      const Panel<C> panel{block_.width(index), block_.count(index), router_ + start, dot_ + start};
      E *dgate = dh_ + (start * 2 * F + f * panel.width) / N, *dup = dgate + F * panel.width / N;
      const C* product = product_ + start * group_;
      E* activation = activation_ + start * group_ / N;
      if (g_.pre) {
        auto* kept = static_cast<const kept_t<T>*>(g_.pre) + row * 2 * F;
        slopes<kept_t<T>, C, E>(panel, count, product, kept + f * panel.lanes, kept + (F + f) * panel.lanes, panel.lanes,
                             dgate, dup, activation);
      } else {
        slopes<C, C, E>(panel, count, product, gate_ + start * group_, up_ + start * group_, panel.width, dgate, dup,
                     activation);
      }
      if (g_.dh) {
        E* out = static_cast<E*>(g_.dh) + ((row - base_) * 2 * F + f) / N;
        store_rows(dgate, panel.width, panel.lanes, count / N, out, 2 * F / N);
        store_rows(dup, panel.width, panel.lanes, count / N, out + F / N, 2 * F / N);
      }
      if (g_.activation)
        store_rows(activation, panel.width, panel.lanes, count / N,
                   static_cast<E*>(g_.activation) + ((row - base_) * F + f) / N, F / N);
    }
  }

  void input_gradient() {
    const int64_t H = s_.width, F = s_.ffn;
    for (int64_t h = 0; h < H; h += group_) {
      const int64_t count = std::min(group_, H - h);
      multiply_lanes<C>(transposed(w_gate_up_), H, h, count, 2 * F, block_, dh_, product_, group_);
      for (int64_t panel = 0; panel < block_.panels(); ++panel) {
        const int64_t start = panel * block_.kWide;
        store_rows<C>(product_ + start * group_, block_.width(panel), block_.count(panel), count,
                      static_cast<C*>(g_.dx_rows) + (rows_.first + start) * H + h, H);
      }
    }
  }

  const MoeMlpBackward& g_;
  const MoeMlpShape& s_;
  const RowBlock& rows_;
  const int64_t base_;
  const LaneBlock<C> block_;
  const Matrix w_gate_up_, w_down_t_;
  int64_t group_;
  E *dy_, *x_, *dh_, *activation_;
  C *router_, *dot_, *product_, *gate_, *up_;
};

// The rows [base, ...) of a wave as a matrix whose row r is row r of the sorted order.
template <class E>
ExpertRows wave_rows(const void* data, int64_t base, int64_t width) {
  constexpr DType dtype = std::is_same_v<E, bf16_pair> ? DType::bf16 : sizeof(E) == 8 ? DType::f64 : DType::f32;
  const uintptr_t start = reinterpret_cast<uintptr_t>(data) - uintptr_t(base * width * item_size(dtype));
  return {dtype, reinterpret_cast<const void*>(start), width, 1, nullptr};
}

template <class T, class E>
void backward(const MoeMlpBackward& g) {
  using C = sum_t<E>;
  const MoeMlpShape& s = g.shape;
  if (g.dweights) std::fill_n(static_cast<C*>(g.dweights), s.tokens * s.top_k, C(0));
  for (int64_t begin = 0, end; begin < s.groups.experts; begin = end) {
    end = g.keep_rows ? s.groups.experts : wave_end(s, begin);
    const int64_t base = g.keep_rows ? 0 : s.groups.offsets[begin];
    const auto blocks = row_blocks<C>(s.groups, begin, end, kMlpRows);
    parallel_tasks(int64_t(blocks.size()), s.threads,
                   [&](int64_t task, int) { BlockBackward<T, E>(g, blocks[task], base).run(); });
    if (g.keep_rows) continue;
    ExpertRows x = g.x, dy = g.dy;
    x.gather = dy.gather = s.gather;
    const WeightGradient gradients[] = {
        {wave_rows<E>(g.dh, base, 2 * s.ffn), x, 2 * s.ffn, s.width, g.dw_gate_up, g.accumulate},
        {dy, wave_rows<E>(g.activation, base, s.ffn), s.width, s.ffn, g.dw_down, g.accumulate}};
    weight_gradients<C>(gradients, 2, s.groups, begin, end, s.threads);
  }
  if (g.dx) sum_over_slots<T>(s, nullptr, static_cast<const C*>(g.dx_rows), static_cast<T*>(g.dx));
}

}  // namespace

bool moe_mlp_rows_are_bf16(const MoeMlpShape& s) { return rows_are_bf16(s); }

int64_t moe_mlp_backward_rows(const MoeMlpShape& s) {
  int64_t most = 0;
  for (int64_t begin = 0, end; begin < s.groups.experts; begin = end) {
    end = wave_end(s, begin);
    most = std::max(most, s.groups.offsets[end] - s.groups.offsets[begin]);
  }
  return most;
}

void moe_mlp_backward(const MoeMlpBackward& g) {
  with_operands(g.shape, [&](auto* tag, auto* operand) {
    backward<std::decay_t<decltype(*tag)>, std::decay_t<decltype(*operand)>>(g);
  });
}

}  // namespace pyfast
