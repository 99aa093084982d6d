// Attention backward (Dao 2023, algorithm 2), one pass, deterministic.
//
// With L = lse, P = exp(S - L), delta = rowsum(dO * O) - dL, and everything transposed as in the forward:
//
//   S^T = K Q^T   dP^T = V dO^T   dS^T = P^T * (dP^T - delta)   (* 1 - tanh^2 under a softcap)
//   dV += P^T dO   dK += dS^T Q * scale   dQ^T += K^T dS^T * scale   dsink = -sum exp(sink - L) delta
//
// First every panel of queries is prepared: Q and dO packed both ways, delta. Then a task is one block of keys of one
// unit (a kv head of a document): it keeps dK and dV of the block and adds its part of dQ into the panels. The blocks of
// a unit add to a panel in ascending order, each waiting for the one before: tasks are queued in that order too, so
// nobody waits for a task that no thread has begun. The last block writes dQ out. Every sum has one order: the same bits
// for any number of threads. S and dP are computed once. Gradients that nobody wants are left out with their products.
#include <atomic>
#include <memory>
#include <sched.h>
#include <vector>

#include "attention_pack.h"
#include "attention_scores.h"
#include "parallel.h"
#include "scratch.h"

namespace pyfast {
namespace {

// Sizes, in elements of C or E alike, and where a panel's parts lie.
template <class C, class E>
struct Layout {
  static_assert(sizeof(E) == sizeof(C));
  static constexpr int W = kLanes<C>, N = kValues<C, E>;
  int64_t depth, value_depth;  // of the products Q K^T and dO V^T
  int64_t columns;             // rows of dQ^T: head size padded to kRows
  int64_t width, value_width;  // padded to vectors: rows of Q, dO, dK, dV

  explicit Layout(const AttentionShape& s)
      : depth(depth_of<C, E>(s.head_size)),
        value_depth(depth_of<C, E>(s.value_size)),
        columns(ceil_to(s.head_size, kRows)),
        width(ceil_to(s.head_size, std::max(Vec<C>::size, kRows))),
        value_width(ceil_to(s.value_size, std::max(Vec<C>::size, kRows))) {}

  int64_t panel_size() const { return (depth + value_depth + columns + (width + value_width) / N + 2) * W; }
  int64_t task_size() const {
    const int64_t paired = N == 1 ? 0 : columns / N + 5 * W / N;
    return (depth + value_depth + width + value_width + 2 * W + paired) * kKeyBlock;
  }
};

template <class C, class E>
struct Panel {
  int64_t q0, lanes;
  E *q, *dout;            // [depth][kLanes], [value_depth][kLanes]; q scaled
  C* dq;                  // [columns][kLanes], sum over key blocks
  E *q_rows, *dout_rows;  // [kLanes][width], [kLanes][value_width], pairs of lanes if of pairs; unscaled
  C *lse, *delta;         // [kLanes]; lse in base 2, +inf where a query sees nothing

  Panel(const Layout<C, E>& layout, E* base, int64_t q0_, int64_t lanes_) : q0(q0_), lanes(lanes_) {
    constexpr int W = kLanes<C>, N = kValues<C, E>;
    q = base;
    dout = q + layout.depth * W;
    q_rows = dout + layout.value_depth * W;
    dout_rows = q_rows + layout.width * W / N;
    dq = reinterpret_cast<C*>(dout_rows + layout.value_width * W / N);
    lse = dq + layout.columns * W;
    delta = lse + W;
  }
};

// One block of keys with its gradients.
template <class C, class E>
struct KeyBlock {
  int64_t k0, count;
  E *k, *v;    // packed columns
  C *dk, *dv;  // [kKeyBlock][width], [kKeyBlock][value_width]
  C *s, *dp;   // [kKeyBlock][kLanes]
  // Operands of the products over queries and over keys: without pairs k, and P^T and dS^T where S^T and dP^T were.
  E* keys;                              // columns again, pairs of keys
  E *p, *ds, *ds_keys;                  // [kKeyBlock][kLanes] in pairs of lanes, twice, and in pairs of keys
  static constexpr Split kSplit = {kValues<C, E>, kLanes<C> / kValues<C, E> * kKeyBlock};  // of ds and ds_keys

  KeyBlock(const Layout<C, E>& layout, C* base, int64_t k0_, int64_t count_) : k0(k0_), count(count_) {
    constexpr int W = kLanes<C>, N = kValues<C, E>;
    dk = base;
    dv = dk + layout.width * kKeyBlock;
    s = dv + layout.value_width * kKeyBlock;
    dp = s + W * kKeyBlock;
    k = reinterpret_cast<E*>(dp + W * kKeyBlock);
    v = k + layout.depth * kKeyBlock;
    if constexpr (N == 1) {
      keys = k, p = s, ds = ds_keys = dp;
    } else {
      keys = v + layout.value_depth * kKeyBlock;
      p = keys + layout.columns * kKeyBlock / N;
      ds = p + W * kKeyBlock / N;
      ds_keys = ds + kSplit.parts * kSplit.step;
    }
  }
};

struct Unit {
  int64_t document, kv;
  int64_t first_panel;  // of its group x panels, within the chunk
};

struct Task {
  int64_t unit, run, number;  // the block of keys: number within the run
  int64_t left;  // work of this and the later blocks of the unit: descending order keeps the blocks of a unit in order
};

void longest_first(std::vector<Task>& tasks) {
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& x, const Task& y) { return x.left > y.left; });
}

// The scores of a row of a block to P^T and dS^T of it; masked entries become 0.
template <class C, int NV, class E>
struct ScoreGradients {
  static constexpr int W = kLanes<C>, L = Vec<C>::size;
  const Visible& visible;
  const KeyBlock<C, E>& block;
  const Panel<C, E>& panel;
  const C factor, softcap;
  const int64_t full_lo = visible.lo(panel.q0 + panel.lanes - 1), full_hi = visible.hi(panel.q0);
  vec_t<C> lse[NV], delta[NV];

  ScoreGradients(const AttentionShape& s, const Visible& visible_, const KeyBlock<C, E>& block_,
                 const Panel<C, E>& panel_)
      : visible(visible_), block(block_), panel(panel_), factor(score_factor<C, E>(s)), softcap(C(s.softcap)) {
    for (int v = 0; v < NV; ++v) lse[v] = load(panel.lse + v * L), delta[v] = load(panel.delta + v * L);
  }

  PF_INLINE void row(int64_t r, vec_t<C> (&weight)[NV], vec_t<C> (&gradient)[NV]) const {
    const int64_t key = block.k0 + r;
    const bool all = key >= full_lo && key < full_hi;
    for (int v = 0; v < NV; ++v) {
      vec_t<C> score = load(block.s + r * W + v * L), slope = load(block.dp + r * W + v * L) - delta[v], x;
      if (softcap > 0) {
        const vec_t<C> t = tanh<C>(score * factor);
        x = t * (softcap * C(kLog2E)) - lse[v];
        slope *= C(1) - t * t;
      } else {
        x = score * factor - lse[v];
      }
      x = x > C(0) ? zero<C>() : x;  // P <= 1 but for rounding
      weight[v] = exp2_softmax<C>(x);
      gradient[v] = weight[v] * slope;
    }
    if (all) return;
    const LaneRange see = r < block.count ? lanes_that_see(visible, key, panel.q0) : LaneRange{1 << 20, -1};
    for (int v = 0; v < NV; ++v) {
      const vec_t<C> lane = lane_numbers<C>(v);
      weight[v] = lane < C(see.first) ? zero<C>() : weight[v];
      weight[v] = lane > C(see.last) ? zero<C>() : weight[v];
      gradient[v] = weight[v] == C(0) ? zero<C>() : gradient[v];
    }
  }
};

// All rows [begin, end) of them, multiples of kRows, as operands.
template <class C, int NV>
void score_gradients(const ScoreGradients<C, NV, C>& scores, int64_t begin, int64_t end) {
  constexpr int W = kLanes<C>, L = Vec<C>::size;
  for (int64_t r = begin; r < end; ++r) {
    vec_t<C> weight[NV], gradient[NV];
    scores.row(r, weight, gradient);
    for (int v = 0; v < NV; ++v) {
      store(scores.block.p + r * W + v * L, weight[v]);
      store(scores.block.ds + r * W + v * L, gradient[v]);
    }
  }
}

#if defined(__AVX512F__)
// P is rounded to bf16, dS to the sum of two (KeyBlock::kSplit): rounding it once would cost dQ and dK as much again as
// their own rounding.
template <class C, int NV>
void score_gradients(const ScoreGradients<C, NV, bf16_pair>& scores, int64_t begin, int64_t end) {
  constexpr int W = kLanes<C>, L = Vec<C>::size;
  const auto& block = scores.block;
  auto put = [](bf16_pair* place, __m256i half) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(place), half); };
  for (int64_t r = begin; r < end; r += 2) {
    __m256i ds[2][NV], rest[2][NV];
    for (int i = 0; i < 2; ++i) {
      vec_t<C> weight[NV], gradient[NV];
      scores.row(r + i, weight, gradient);
      for (int v = 0; v < NV; ++v) {
        const int64_t place = ((r + i) * W + v * L) / 2;
        ds[i][v] = rounded(gradient[v]);
        rest[i][v] = rounded(gradient[v] - widened(ds[i][v]));
        put(block.p + place, rounded(weight[v]));
        put(block.ds + place, ds[i][v]);
        put(block.ds + block.kSplit.step + place, rest[i][v]);
      }
    }
    for (int v = 0; v < NV; ++v) {
      bf16_pair* place = block.ds_keys + r / 2 * W + v * L;
      _mm512_storeu_si512(place, pairs_of(ds[0][v], ds[1][v]));
      _mm512_storeu_si512(place + block.kSplit.step, pairs_of(rest[0][v], rest[1][v]));
    }
  }
}
#endif

// One row's sum of out * dout.
template <class U, class T>
compute_t<T> row_dot(const U* out, const T* dout, int64_t width) {
  using C = compute_t<T>;
  constexpr int L = Vec<C>::size;
  vec_t<C> sum = zero<C>();
  int64_t j = 0;
  for (; j + L <= width; j += L) sum += load(out + j) * load(dout + j);
  C total = horizontal_sum<C>(sum);
  for (; j < width; ++j) total += C(widen(out[j])) * C(widen(dout[j]));
  return total;
}

template <class T, class E>
struct Backward {
  using C = compute_t<T>;
  static constexpr int W = kLanes<C>, N = kValues<C, E>;
  const AttentionBackward& a;
  const AttentionShape& s = a.shape;
  const Documents documents{s, W};
  const Layout<C, E> layout{s};
  const int64_t group = s.heads_q / s.heads_k, all_units = int64_t(documents.list.size()) * s.heads_k;

  int64_t bytes_of(int64_t document) const {
    return documents.list[document].panels * group * layout.panel_size() * int64_t(sizeof(C));
  }
  int64_t workspace_bytes() const {
    return workspace_of_chunks(s.heads_k, all_units, [&](int64_t document) { return bytes_of(document); });
  }

  void run() const {
    std::vector<C> dsinks(s.sinks ? s.heads_q : 0, C(0));
    for (int64_t first = 0, last; first < all_units; first = last) {
      last = chunk_end(s.heads_k, all_units, first, [&](int64_t document) { return bytes_of(document); });
      run_chunk(first, last, dsinks);
    }
    if (s.sinks) std::copy(dsinks.begin(), dsinks.end(), static_cast<C*>(a.dsinks));
    if (a.accumulate) return;
    for (const Rows& rows : documents.loose_q) zero_rows(a.dq, s.heads_q * s.head_size, rows);
    for (const Rows& rows : documents.loose_k) {
      zero_rows(a.dk, s.heads_k * s.head_size, rows);
      zero_rows(a.dv, s.heads_k * s.value_size, rows);
    }
  }

  struct PanelIndex {
    int64_t unit, head, run, number;  // head of the group, number within the run
  };

  void run_chunk(int64_t first, int64_t last, std::vector<C>& dsinks) const {
    std::vector<Unit> units;
    std::vector<Task> tasks;
    std::vector<PanelIndex> panels;
    for (int64_t u = first; u < last; ++u) {
      const Document& document = documents.list[u / s.heads_k];
      units.push_back({u / s.heads_k, u % s.heads_k, int64_t(panels.size())});
      for (int64_t head = 0; head < group; ++head)
        for (int64_t run = document.q_begin; run < document.q_end; ++run)
          for (int64_t number = 0; number * W < documents.q[run].length; ++number)
            panels.push_back({u - first, head, run, number});
      add_tasks(document, u - first, tasks);
    }
    longest_first(tasks);

    std::vector<C> sink_parts(s.sinks ? panels.size() : 0);
    parallel_tasks(int64_t(panels.size()), s.threads, [&](int64_t i, int) {
      const Unit& unit = units[panels[i].unit];
      const C part = prepare(unit, panels[i].head, documents.q[panels[i].run], panels[i].number);
      if (s.sinks) sink_parts[i] = part;
    });
    for (size_t i = 0; i < sink_parts.size(); ++i)
      dsinks[units[panels[i].unit].kv * group + panels[i].head] += sink_parts[i];

    // done[panel]: how many blocks of keys have been added to the panel's dq.
    std::unique_ptr<std::atomic<int64_t>[]> done(new std::atomic<int64_t>[panels.size() + 1]);
    for (size_t i = 0; i < panels.size(); ++i) done[i].store(0, std::memory_order_relaxed);
    parallel_tasks(int64_t(tasks.size()), s.threads, [&](int64_t i, int) {
      run_task(units[tasks[i].unit], documents.k[tasks[i].run], tasks[i].number, done.get());
    });
  }

  void add_tasks(const Document& document, int64_t unit, std::vector<Task>& tasks) const {
    int64_t left = 0;
    for (int64_t run = document.k_end - 1; run >= document.k_begin; --run) {
      const Run& keys = documents.k[run];
      for (int64_t number = (keys.length - 1) / kKeyBlock; number >= 0 && keys.length > 0; --number) {
        const int64_t pairs = pairs_of(document, keys, number);
        if (pairs == 0 && a.accumulate) continue;  // nothing to add
        left += pairs + 1;                         // + 1: strictly more than what comes after
        tasks.push_back({unit, run, number, left});
      }
    }
  }

  // About how many (query, key) pairs a block of keys has; not 0 if any panel will be visited.
  int64_t pairs_of(const Document& document, const Run& keys, int64_t number) const {
    const int64_t k0 = number * kKeyBlock, k1 = std::min(k0 + kKeyBlock, keys.length);
    int64_t queries = 0;
    for (int64_t run = document.q_begin; run < document.q_end; ++run) {
      const Visible visible(s, documents.q[run], keys);
      const int64_t q0 = std::max<int64_t>(0, visible.first_query(k0));
      const int64_t q1 = std::min(documents.q[run].length - 1, visible.last_query(k1 - 1));
      if (q0 / W * W <= q1) queries += std::max<int64_t>(1, q1 - q0 + 1);
    }
    return queries * (k1 - k0);
  }

  const Document& document_of(const Unit& unit) const { return documents.list[unit.document]; }

  int64_t panel_index(const Unit& unit, int64_t head, const Run& queries, int64_t number) const {
    return unit.first_panel + head * document_of(unit).panels + queries.before + number;
  }

  Panel<C, E> panel_at(const Unit& unit, int64_t head, const Run& queries, int64_t number) const {
    E* base = static_cast<E*>(a.workspace) + panel_index(unit, head, queries, number) * layout.panel_size();
    return Panel<C, E>(layout, base, number * W, std::min<int64_t>(W, queries.length - number * W));
  }

  // Blocks of keys that add to a panel: how many lie before block `number` of `keys`, and how many there are.
  struct Turn {
    int64_t mine, all;
  };
  Turn turn_of(const Document& document, const Run& queries, const Panel<C, E>& panel, const Run* keys,
               int64_t number) const {
    Turn turn{0, 0};
    for (int64_t run = document.k_begin; run < document.k_end; ++run) {
      const Rows blocks = Visible(s, queries, documents.k[run]).blocks(panel.q0, panel.q0 + panel.lanes - 1);
      if (&documents.k[run] == keys) turn.mine = turn.all + number - blocks.begin;
      turn.all += blocks.end - blocks.begin;
    }
    return turn;
  }

  static const T* row_at(const Strided& x, int64_t batch, int64_t row, int64_t head) {
    return static_cast<const T*>(x.data) + batch * x.batch + row * x.row + head * x.head;
  }

  // Packs a panel of queries; returns its part of the sink's gradient.
  C prepare(const Unit& unit, int64_t member, const Run& queries, int64_t number) const {
    const Panel<C, E> panel = panel_at(unit, member, queries, number);
    const int64_t head = unit.kv * group + member, row = queries.row + panel.q0;
    if (turn_of(document_of(unit), queries, panel, nullptr, 0).all == 0) {  // no block of keys will come by
      for (int64_t i = 0; i < panel.lanes && !a.accumulate; ++i)
        std::fill_n(dq_at<T>(queries.batch, row + i, head), s.head_size, T{});
      return 0;
    }
    const T *q = row_at(a.q, queries.batch, row, head), *dout = row_at(a.dout, queries.batch, row, head);
    if constexpr (N == 1) {
      pack_rows<T, E>(q, a.q.row, panel.lanes, W, s.head_size, layout.width, panel.q_rows);
      pack_rows<T, E>(dout, a.dout.row, panel.lanes, W, s.value_size, layout.value_width, panel.dout_rows);
      const C dsink = take_statistics(queries, head, panel, panel.dout_rows, layout.value_width);
      transpose_panel<C>(panel.q_rows, layout.width, layout.depth, C(query_factor(s)), panel.q);
      transpose_panel<C>(panel.dout_rows, layout.value_width, layout.value_depth, C(1), panel.dout);
      return dsink;
    } else {
      alignas(64) E rows[kLanes<C> * 128];
      pack_rows<T, E>(q, a.q.row, panel.lanes, W, s.head_size, layout.depth, rows);
      pair_lanes(rows, layout.depth, layout.width, panel.q_rows);
      transpose_panel<C>(rows, layout.depth, layout.depth, C(query_factor(s)), panel.q);
      pack_rows<T, E>(dout, a.dout.row, panel.lanes, W, s.value_size, layout.value_depth, rows);
      const C dsink = take_statistics(queries, head, panel, rows, layout.value_depth);
      pair_lanes(rows, layout.value_depth, layout.value_width, panel.dout_rows);
      transpose_panel<C>(rows, layout.value_depth, layout.value_depth, C(1), panel.dout);
      return dsink;
    }
  }

#if defined(__AVX512F__)
  // Rows [kLanes] of bf16 as rows of pairs of lanes, [kLanes / 2][width].
  static void pair_lanes(const bf16_pair* rows, int64_t row_stride, int64_t width, bf16_pair* out) {
    for (int64_t i = 0; i < W; i += 2)
      pair_rows(reinterpret_cast<const bf16*>(rows + i * row_stride),
                reinterpret_cast<const bf16*>(rows + (i + 1) * row_stride), width, out + i / 2 * width);
  }
#endif

  // lse and delta of a panel; clears the rows of dO that lead nowhere. Returns the panel's part of the sink's gradient.
  C take_statistics(const Run& queries, int64_t head, const Panel<C, E>& panel, E* dout_rows, int64_t stride) const {
    const int64_t row = queries.row + panel.q0, place = (queries.batch * s.heads_q + head) * s.rows_q + row;
    const C* lse = static_cast<const C*>(a.lse) + place;
    const C* dlse = a.dlse ? static_cast<const C*>(a.dlse) + place : nullptr;
    const C* delta = a.delta ? static_cast<const C*>(a.delta) + place : nullptr;
    const C infinity = std::numeric_limits<C>::infinity();
    const C sink = s.sinks ? static_cast<const C*>(s.sinks)[head] * C(kLog2E) : C(0);
    std::fill(panel.lse, panel.lse + W, infinity);
    std::fill(panel.delta, panel.delta + W, C(0));
    C dsink = 0;
    for (int64_t i = 0; i < panel.lanes; ++i) {
      if (lse[i] == -infinity) {  // sees nothing: whatever its gradient is, it leads nowhere
        std::fill_n(dout_rows + i * stride, stride, E{});
        continue;
      }
      panel.lse[i] = lse[i] * C(kLog2E);
      panel.delta[i] = delta ? delta[i]
                             : row_dot<T, T>(row_at(a.out, queries.batch, row + i, head),
                                             row_at(a.dout, queries.batch, row + i, head), s.value_size) -
                                   (dlse ? dlse[i] : C(0));
      if (s.sinks) dsink -= std::exp2(std::min(sink - panel.lse[i], C(0))) * panel.delta[i];
    }
    return dsink;
  }

  void run_task(const Unit& unit, const Run& keys, int64_t number, std::atomic<int64_t>* done) const {
    static thread_local Scratch scratch;
    const Document& document = document_of(unit);
    const int64_t k0 = number * kKeyBlock, count = std::min(kKeyBlock, keys.length - k0);
    const KeyBlock<C, E> block(layout, scratch.get<C>(layout.task_size()), k0, count);
    const T* k = row_at(a.k, keys.batch, keys.row + k0, unit.kv);
    pack_columns<T, E>(k, a.k.row, count, s.head_size, block.k);
    pack_columns<T, E>(row_at(a.v, keys.batch, keys.row + k0, unit.kv), a.v.row, count, s.value_size, block.v);
    if constexpr (N == 2) pack_key_pairs(k, a.k.row, count, s.head_size, block.keys);
    std::fill(block.dk, block.s, C(0));

    for (int64_t head = 0; head < group; ++head)
      for (int64_t run = document.q_begin; run < document.q_end; ++run) {
        const Run& queries = documents.q[run];
        const Visible visible(s, queries, keys);
        const int64_t q0 = std::max<int64_t>(0, visible.first_query(k0));
        const int64_t q1 = std::min(queries.length - 1, visible.last_query(k0 + count - 1));
        for (int64_t i = q0 / W; i * W <= q1; ++i) {
          const Panel<C, E> panel = panel_at(unit, head, queries, i);
          const Rows blocks = visible.blocks(panel.q0, panel.q0 + panel.lanes - 1);
          if (number < blocks.begin || number >= blocks.end) continue;  // between two keys of a wide stride
          with_vectors<C>(panel.lanes, [&](auto nv) { visit<nv>(visible, block, panel); });
          if (!a.dq) continue;
          const Turn turn = turn_of(document, queries, panel, &keys, number);
          with_vectors<C>(panel.lanes, [&](auto nv) {
            add_dq<nv>(visible, block, panel, turn.mine, done[panel_index(unit, head, queries, i)]);
          });
          if (turn.mine == turn.all - 1) write_dq(queries, unit.kv * group + head, panel);
        }
      }
    for (int64_t r = 0; r < count; ++r) {
      const int64_t row = (keys.batch * s.rows_k + keys.row + k0 + r) * s.heads_k + unit.kv;
      write_gradient(block.dk + r * layout.width, C(s.scale), s.head_size, a.dk, row * s.head_size);
      write_gradient(block.dv + r * layout.value_width, C(1), s.value_size, a.dv, row * s.value_size);
    }
  }

  // values * factor, to their place in a gradient: rounded, or added.
  void write_gradient(const C* values, C factor, int64_t width, void* gradient, int64_t place) const {
    if (!gradient) return;
    if (!a.accumulate) return narrow_row<T, C>(values, factor, width, static_cast<T*>(gradient) + place);
    C* sum = static_cast<C*>(gradient) + place;
    for (int64_t j = 0; j < width; ++j) sum[j] += values[j] * factor;
  }

  // The keys of a block that a panel sees, counted within the block.
  Rows keys_seen(const Visible& visible, const KeyBlock<C, E>& block, const Panel<C, E>& panel) const {
    return {std::max(block.k0, visible.lo(panel.q0)) - block.k0,
            std::min(block.k0 + block.count, visible.hi(panel.q0 + panel.lanes - 1)) - block.k0};
  }

  // One panel of queries against one block of keys: P, dS, and their parts of dV and dK.
  template <int NV>
  void visit(const Visible& visible, const KeyBlock<C, E>& block, const Panel<C, E>& panel) const {
    const Rows keys = keys_seen(visible, block, panel);
    const int64_t begin = keys.begin / kRows * kRows, end = ceil_to(keys.end, kRows);
    columns_times_panel<C, NV>(block.k, begin, end, layout.depth, panel.q, block.s);
    columns_times_panel<C, NV>(block.v, begin, end, layout.value_depth, panel.dout, block.dp);
    score_gradients<C, NV>(ScoreGradients<C, NV, E>(s, visible, block, panel), begin, end);
    if (a.dv) scores_times_rows<C>(block.p, begin, end, panel.lanes, panel.dout_rows, layout.value_width, block.dv);
    if (a.dk)
      scores_times_rows<C>(block.ds, begin, end, panel.lanes, panel.q_rows, layout.width, block.dk, block.kSplit);
  }

  template <int NV>
  void add_dq(const Visible& visible, const KeyBlock<C, E>& block, const Panel<C, E>& panel, int64_t turn,
              std::atomic<int64_t>& done) const {
    const Rows keys = keys_seen(visible, block, panel);
    for (int spins = 0; done.load(std::memory_order_acquire) < turn; ++spins)
      if (spins > 100) sched_yield();
    // Pairs take in hidden keys beside visible ones: their dS is 0.
    const int64_t begin = keys.begin / N * N, end = ceil_to(keys.end, N);
    columns_transposed_times_scores<C, NV>(block.keys, layout.columns, begin, end, block.ds_keys, panel.dq, turn > 0,
                                           block.kSplit);
    done.store(turn + 1, std::memory_order_release);
  }

  void write_dq(const Run& queries, int64_t head, const Panel<C, E>& panel) const {
    alignas(64) C rows[kLanes<C> * 256];
    transpose<C>(panel.dq, W, layout.columns, panel.lanes, C(s.scale), rows, layout.columns);
    for (int64_t i = 0; i < panel.lanes; ++i)
      write_gradient(rows + i * layout.columns, C(1), s.head_size, a.dq,
                     dq_index(queries.batch, queries.row + panel.q0 + i, head));
  }

  int64_t dq_index(int64_t batch, int64_t row, int64_t head) const {
    return ((batch * s.rows_q + row) * s.heads_q + head) * s.head_size;
  }
  template <class U>
  U* dq_at(int64_t batch, int64_t row, int64_t head) const {
    return static_cast<U*>(a.dq) + dq_index(batch, row, head);
  }

  // Packed rows outside every document.
  static void zero_rows(void* data, int64_t width, const Rows& rows) {
    if (rows.begin < rows.end)
      std::fill_n(static_cast<T*>(data) + rows.begin * width, (rows.end - rows.begin) * width, T{});
  }
};

template <class T, class U>
void delta_rows(const AttentionDelta& a) {
  using C = compute_t<T>;
  const U* out = static_cast<const U*>(a.out.data);
  const T* dout = static_cast<const T*>(a.dout.data);
  const C* dlse = static_cast<const C*>(a.dlse);
  parallel_ranges(a.rows, 64, a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      for (int64_t head = 0; head < a.heads_q; ++head) {
        const C sum = row_dot<U, T>(out + row * a.out.row + head * a.out.head,
                                    dout + row * a.dout.row + head * a.dout.head, a.value_size);
        const int64_t place = head * a.rows + row;
        static_cast<C*>(a.delta)[place] = sum - (dlse ? dlse[place] : C(0));
      }
  });
}

}  // namespace

int64_t attention_backward_workspace(const AttentionShape& s) {
  int64_t bytes = 0;
  with_operands(s, [&](auto* dtype, auto* operand) {
    AttentionBackward arguments{};
    arguments.shape = s;
    bytes = Backward<std::decay_t<decltype(*dtype)>, std::decay_t<decltype(*operand)>>{arguments}.workspace_bytes();
  });
  return bytes;
}

void attention_backward(const AttentionBackward& a) {
  with_operands(a.shape, [&](auto* dtype, auto* operand) {
    Backward<std::decay_t<decltype(*dtype)>, std::decay_t<decltype(*operand)>>{a}.run();
  });
}

void attention_delta(const AttentionDelta& a) {
  with_dtype(a.dtype, [&](auto* tag) {
    using T = std::decay_t<decltype(*tag)>;
    a.wide_out ? delta_rows<T, compute_t<T>>(a) : delta_rows<T, T>(a);
  });
}

}  // namespace pyfast
