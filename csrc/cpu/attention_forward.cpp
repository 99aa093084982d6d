// Attention forward: blocked online softmax (Rabe and Staats 2021; Dao et al. 2022), exact, any dtype, sums in C.
//
// K and V are widened and packed once per kv head. A task is a range of queries of a few query heads that share a kv
// head. It walks over the blocks of keys its queries see, and at each block over its panels:
//
//   S^T = K Q^T                 [keys, queries] of one panel, base-2 exponents
//   m' = max(m, rowmax S), P = 2^(S - m'), l = l 2^(m - m') + sum P
//   O^T = O^T 2^(m - m') + V^T P^T
//
// and finally out = O / l, lse = m + log l. A query's numbers depend on the blocks of keys only (which start at
// multiples of kKeyBlock in their run), never on which queries or heads share its task: the same bits for any number
// of threads. The attention over earlier keys is carried on by starting from O = out, m = lse, l = 1.
#include <vector>

#include "attention_pack.h"
#include "attention_scores.h"
#include "parallel.h"
#include "scratch.h"

namespace pyfast {
namespace {

constexpr int64_t kTaskLanes = 192;  // queries x heads a task holds: their Q and O must stay in L2 beside K and V

struct Unit {
  int64_t document, kv;
  int64_t first_block;  // of its blocks of keys, within the chunk
};

struct Task {
  int64_t unit, run;    // of the queries
  int64_t head, heads;  // query heads [head, head + heads)
  int64_t q0, q1;       // queries of the run
  int64_t cost;         // visible (query, key) pairs, about
};

void longest_first(std::vector<Task>& tasks) {
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& x, const Task& y) { return x.cost > y.cost; });
}

// State of one panel of queries, for one head.
template <class C, class E>
struct Panel {
  int64_t q0, lanes;
  E* q;           // [depth][kLanes]
  C *o, *m, *l;   // [value size][kLanes], [kLanes], [kLanes]; m in base-2 exponents
};

// Packed columns: of k along its width, of v along the keys.
template <class E>
struct KeyBlock {
  int64_t k0, count;
  E *k, *v;
};

// P^T = 2^(factor S^T - base) over the rows [begin, end), in place; adds up the sums.
template <class C, int NV>
void weights(C factor, const vec_t<C> (&base)[NV], int64_t begin, int64_t end, C* s, C*, vec_t<C> (&sum)[NV]) {
  constexpr int W = kLanes<C>, L = Vec<C>::size;
  for (int64_t r = begin; r < end; ++r)
    for (int v = 0; v < NV; ++v) {
      const vec_t<C> p = exp2_softmax<C>(load(s + r * W + v * L) * factor - base[v]);
      sum[v] += p;
      store(s + r * W + v * L, p);
    }
}

#if defined(__AVX512F__)
// The same, as pairs of rows 2 i and 2 i + 1 in row i; what pairs hold beyond [begin, end) is 0.
template <class C, int NV>
void weights(C factor, const vec_t<C> (&base)[NV], int64_t begin, int64_t end, C* s, bf16_pair* pairs,
             vec_t<C> (&sum)[NV]) {
  constexpr int W = kLanes<C>, L = Vec<C>::size;
  for (int64_t r = begin / 2 * 2; r < end; r += 2)
    for (int v = 0; v < NV; ++v) {
      vec_t<C> p[2];
      for (int i = 0; i < 2; ++i) {
        p[i] = exp2_softmax<C>(load(s + (r + i) * W + v * L) * factor - base[v]);
        if (r + i < begin || r + i >= end) p[i] = zero<C>();
        sum[v] += p[i];
      }
      _mm512_storeu_si512(pairs + r / 2 * W + v * L, pairs_of(rounded(p[0]), rounded(p[1])));
    }
}
#endif

// One panel against the keys [lo, hi) of a block: scores, softmax, values.
template <class C, int NV, class E>
void attend(const AttentionShape& shape, const Visible& visible, const KeyBlock<E>& block, const Panel<C, E>& panel,
            int64_t depth, int64_t value_width, int64_t lo, int64_t hi, C* s) {
  constexpr int W = kLanes<C>, L = Vec<C>::size, N = kValues<C, E>;
  const int64_t begin = lo - block.k0, end = hi - block.k0;
  columns_times_panel<C, NV>(block.k, begin / kRows * kRows, ceil_to(end, kRows), depth, panel.q, s);

  const int64_t last_query = panel.q0 + panel.lanes - 1;
  const int64_t full_lo = visible.lo(last_query), full_hi = visible.hi(panel.q0);  // keys that all lanes see
  const C infinity = std::numeric_limits<C>::infinity(), softcap = C(shape.softcap);
  const C before_cap = score_factor<C, E>(shape), factor = softcap > 0 ? C(1) : before_cap;
  vec_t<C> top[NV];
  for (int v = 0; v < NV; ++v) top[v] = broadcast<C>(-infinity);
  for (int64_t r = begin; r < end; ++r) {
    const int64_t key = block.k0 + r;
    C* row = s + r * W;
    if (softcap > 0)
      for (int v = 0; v < NV; ++v) store(row + v * L, capped<C>(load(row + v * L) * before_cap, softcap));
    if (key < full_lo || key >= full_hi) {
      const LaneRange see = lanes_that_see(visible, key, panel.q0);
      for (int v = 0; v < NV; ++v) {
        const vec_t<C> lane = lane_numbers<C>(v);
        vec_t<C> x = load(row + v * L);
        x = lane < C(see.first) ? broadcast<C>(-infinity) : x;
        x = lane > C(see.last) ? broadcast<C>(-infinity) : x;
        store(row + v * L, x);
      }
    }
    for (int v = 0; v < NV; ++v) top[v] = select_max<C>(load(row + v * L), top[v]);
  }

  vec_t<C> sum[NV], base[NV], shrink[NV];
  bool moved = false;
  for (int v = 0; v < NV; ++v) {
    const vec_t<C> before = load(panel.m + v * L);
    top[v] = select_max<C>(top[v] * factor, before);
    base[v] = top[v] == -infinity ? zero<C>() : top[v];  // -inf - -inf would be NaN
    shrink[v] = exp2_softmax<C>(before - base[v]);
    for (int i = 0; i < L; ++i) moved |= shrink[v][i] != C(1);
    sum[v] = zero<C>();
  }
  E* p = reinterpret_cast<E*>(s);
  weights<C, NV>(factor, base, begin, end, s, p, sum);
  for (int v = 0; v < NV; ++v) {
    store(panel.m + v * L, top[v]);
    store(panel.l + v * L, load(panel.l + v * L) * shrink[v] + sum[v]);
  }
  if (moved)
    for (int64_t d = 0; d < value_width; ++d)
      for (int v = 0; v < NV; ++v) store(panel.o + d * W + v * L, load(panel.o + d * W + v * L) * shrink[v]);
  columns_transposed_times_scores<C, NV>(block.v, value_width, begin / N * N, ceil_to(end, N), p, panel.o, true);
}

template <class T, class E>
struct Forward {
  using C = compute_t<T>;
  static constexpr int W = kLanes<C>;
  const AttentionForward& a;
  const AttentionShape& s = a.shape;
  const Documents documents{s, W};
  const int64_t depth = depth_of<C, E>(s.head_size), value_width = ceil_to(s.value_size, kRows);
  const int64_t group = s.heads_q / s.heads_k, all_units = int64_t(documents.list.size()) * s.heads_k;

  static_assert(sizeof(E) == sizeof(C));  // sizes below are in either
  int64_t panel_size() const { return (depth + value_width + 2) * W; }
  int64_t block_size() const { return (depth + value_width / kValues<C, E>) * kKeyBlock; }
  int64_t bytes_of(int64_t document) const {
    return documents.list[document].blocks * block_size() * int64_t(sizeof(C));
  }
  int64_t workspace_bytes() const {
    return workspace_of_chunks(s.heads_k, all_units, [&](int64_t document) { return bytes_of(document); });
  }

  void run() const {
    for (int64_t first = 0, last; first < all_units; first = last) {
      last = chunk_end(s.heads_k, all_units, first, [&](int64_t document) { return bytes_of(document); });
      run_chunk(first, last);
    }
    if (!a.resume)
      for (const Rows& rows : documents.loose_q) empty_rows(rows.begin, rows.end);
  }

  struct Block {
    int64_t unit, run, number;  // number within the run
  };

  void run_chunk(int64_t first, int64_t last) const {
    std::vector<Unit> units;
    std::vector<Block> blocks;
    int64_t place = 0;
    for (int64_t unit = first; unit < last; ++unit) {
      const Document& document = documents.list[unit / s.heads_k];
      units.push_back({unit / s.heads_k, unit % s.heads_k, place});
      place += document.blocks;
      for (int64_t run = document.k_begin; run < document.k_end; ++run)
        for (int64_t number = 0; number * kKeyBlock < documents.k[run].length; ++number)
          if (seen(document, documents.k[run], number)) blocks.push_back({unit - first, run, number});
    }
    parallel_tasks(int64_t(blocks.size()), s.threads, [&](int64_t i, int) {
      pack_block(units[blocks[i].unit], documents.k[blocks[i].run], blocks[i].number);
    });
    const std::vector<Task> list = tasks(units);
    parallel_tasks(int64_t(list.size()), s.threads,
                   [&](int64_t index, int) { run_task(units[list[index].unit], list[index]); });
  }

  // Whether a block of keys is seen by any query of its document.
  bool seen(const Document& document, const Run& keys, int64_t number) const {
    for (int64_t run = document.q_begin; run < document.q_end; ++run) {
      if (documents.q[run].length == 0) continue;
      const Rows blocks = Visible(s, documents.q[run], keys).blocks(0, documents.q[run].length - 1);
      if (number >= blocks.begin && number < blocks.end) return true;
    }
    return false;
  }

  std::vector<Task> tasks(const std::vector<Unit>& units) const {
    const int64_t panels = (kTaskLanes + W - 1) / W;
    const int64_t heads = std::min(group, panels), head_chunks = (group + heads - 1) / heads;
    int64_t rows = std::max<int64_t>(1, panels / heads) * W;
    // Few long sequences on many threads: smaller tasks.
    while (s.threads > 1 && rows > W && int64_t(units.size()) * head_chunks * (s.rows_q / rows) < 2 * s.threads)
      rows = std::max<int64_t>(1, rows / W / 2) * W;
    std::vector<Task> list;
    for (size_t u = 0; u < units.size(); ++u) {
      const Document& document = documents.list[units[u].document];
      for (int64_t run = document.q_begin; run < document.q_end; ++run)
        for (int64_t q0 = 0; q0 < documents.q[run].length; q0 += rows) {
          const int64_t q1 = std::min(q0 + rows, documents.q[run].length);
          const int64_t cost = pairs(document, documents.q[run], q0, q1);
          if (cost == 0 && a.resume && !s.sinks) continue;  // nothing to add
          for (int64_t first = 0; first < group; first += heads)
            list.push_back(
                {int64_t(u), run, units[u].kv * group + first, std::min(heads, group - first), q0, q1, cost});
        }
    }
    longest_first(list);
    return list;
  }

  // About how many (query, key) pairs queries [q0, q1) of a run see; 0 exactly if there are none.
  int64_t pairs(const Document& document, const Run& queries, int64_t q0, int64_t q1) const {
    int64_t keys = 0;
    for (int64_t run = document.k_begin; run < document.k_end; ++run) {
      const Visible visible(s, queries, documents.k[run]);
      keys += std::max<int64_t>(0, visible.hi(q1 - 1) - visible.lo(q0));
    }
    return (q1 - q0) * keys;
  }

  KeyBlock<E> block_at(const Unit& unit, const Run& keys, int64_t number) const {
    E* k = static_cast<E*>(a.workspace) + (unit.first_block + keys.before + number) * block_size();
    return {number * kKeyBlock, std::min(kKeyBlock, keys.length - number * kKeyBlock), k, k + depth * kKeyBlock};
  }

  void pack_block(const Unit& unit, const Run& keys, int64_t number) const {
    const KeyBlock<E> block = block_at(unit, keys, number);
    const int64_t row = keys.row + block.k0;
    pack_columns<T, E>(row_at(a.k, keys.batch, row, unit.kv), a.k.row, block.count, s.head_size, block.k);
    const T* values = row_at(a.v, keys.batch, row, unit.kv);
    if constexpr (kValues<C, E> == 2)
      pack_key_pairs(values, a.v.row, block.count, s.value_size, block.v);
    else
      pack_columns<T, E>(values, a.v.row, block.count, s.value_size, block.v);
  }

  void run_task(const Unit& unit, const Task& task) const {
    static thread_local Scratch scratch;
    const Document& document = documents.list[unit.document];
    const Run& queries = documents.q[task.run];
    const int64_t panels = (task.q1 - task.q0 + W - 1) / W;
    C* scores = scratch.get<C>(panels * task.heads * panel_size() + kKeyBlock * W);
    C* states = scores + kKeyBlock * W;
    auto panel_at = [&](int64_t h, int64_t p) {
      C* base = states + (h * panels + p) * panel_size();
      const int64_t q0 = task.q0 + p * W;
      C *o = base + depth * W, *m = o + value_width * W;
      return Panel<C, E>{q0, std::min<int64_t>(W, task.q1 - q0), reinterpret_cast<E*>(base), o, m, m + W};
    };
    for (int64_t h = 0; h < task.heads; ++h)
      for (int64_t p = 0; p < panels; ++p)
        if (touched(document, queries, panel_at(h, p))) start(queries, task.head + h, panel_at(h, p));

    for (int64_t run = document.k_begin; run < document.k_end; ++run) {
      const Visible visible(s, queries, documents.k[run]);
      const Rows blocks = visible.blocks(task.q0, task.q1 - 1);
      for (int64_t number = blocks.begin; number < blocks.end; ++number) {
        const KeyBlock<E> block = block_at(unit, documents.k[run], number);
        for (int64_t h = 0; h < task.heads; ++h)
          for (int64_t p = 0; p < panels; ++p) {
            const Panel<C, E> panel = panel_at(h, p);
            const int64_t from = std::max(block.k0, visible.lo(panel.q0));
            const int64_t to = std::min(block.k0 + block.count, visible.hi(panel.q0 + panel.lanes - 1));
            if (from >= to) continue;
            with_vectors<C>(panel.lanes, [&](auto nv) {
              attend<C, nv>(s, visible, block, panel, depth, value_width, from, to, scores);
            });
          }
      }
    }
    for (int64_t h = 0; h < task.heads; ++h)
      for (int64_t p = 0; p < panels; ++p)
        if (touched(document, queries, panel_at(h, p))) finish(document, queries, task.head + h, panel_at(h, p));
  }

  // A panel to which nothing is added keeps its state bit for bit, whatever else its task does.
  bool touched(const Document& document, const Run& queries, const Panel<C, E>& panel) const {
    if (!a.resume || s.sinks) return true;
    for (int64_t run = document.k_begin; run < document.k_end; ++run) {
      const Rows blocks = Visible(s, queries, documents.k[run]).blocks(panel.q0, panel.q0 + panel.lanes - 1);
      if (blocks.begin < blocks.end) return true;
    }
    return false;
  }

  static const T* row_at(const Strided& x, int64_t batch, int64_t row, int64_t head) {
    return static_cast<const T*>(x.data) + batch * x.batch + row * x.row + head * x.head;
  }

  // Q^T packed and scaled, and what is summed already.
  void start(const Run& queries, int64_t head, const Panel<C, E>& panel) const {
    alignas(64) E rows[kLanes<C> * 256];
    pack_rows<T, E>(row_at(a.q, queries.batch, queries.row + panel.q0, head), a.q.row, panel.lanes, W, s.head_size,
                    depth, rows);
    transpose_panel<C>(rows, depth, depth, C(query_factor(s)), panel.q);
    std::fill(panel.o, panel.o + value_width * W, C(0));
    std::fill(panel.m, panel.m + W, -std::numeric_limits<C>::infinity());
    std::fill(panel.l, panel.l + W, C(0));
    if (a.resume) take_state(queries, head, panel);
    if (s.sinks) take_sink(static_cast<const C*>(s.sinks)[head] * C(kLog2E), panel);
  }

  void take_state(const Run& queries, int64_t head, const Panel<C, E>& panel) const {
    alignas(64) C rows[kLanes<C> * 256];
    const int64_t row = queries.row + panel.q0;
    const C* lse = lse_at(queries.batch, head, row);
    std::fill(rows, rows + W * value_width, C(0));
    for (int64_t i = 0; i < panel.lanes; ++i) {
      if (lse[i] == -std::numeric_limits<C>::infinity()) continue;
      std::copy_n(wide_at(queries.batch, row + i, head), s.value_size, rows + i * value_width);
      panel.m[i] = lse[i] * C(kLog2E);
      panel.l[i] = C(1);
    }
    transpose<C>(rows, value_width, W, value_width, C(1), panel.o, W);
  }

  // One more logit that has no value.
  void take_sink(C sink, const Panel<C, E>& panel) const {
    alignas(64) C shrink[W];
    if (sink == -std::numeric_limits<C>::infinity()) return;
    for (int64_t i = 0; i < W; ++i) {
      const C top = std::max(panel.m[i], sink);
      shrink[i] = std::exp2(panel.m[i] - top);
      panel.l[i] = panel.l[i] * shrink[i] + std::exp2(sink - top);
      panel.m[i] = top;
    }
    if (!a.resume) return;  // O is 0
    for (int64_t d = 0; d < value_width; ++d)
      for (int64_t i = 0; i < W; ++i) panel.o[d * W + i] *= shrink[i];
  }

  // Whether a query has seen any key, now or, if it is carried on, earlier.
  bool sees_a_key(const Document& document, const Run& queries, int64_t i, C earlier_lse) const {
    if (a.resume && earlier_lse > -std::numeric_limits<C>::infinity()) return true;
    for (int64_t run = document.k_begin; run < document.k_end; ++run)
      if (!Visible(s, queries, documents.k[run]).none(i)) return true;
    return false;
  }

  void finish(const Document& document, const Run& queries, int64_t head, const Panel<C, E>& panel) const {
    constexpr int L = Vec<C>::size;
    alignas(64) C share[W];
    const int64_t row = queries.row + panel.q0;
    C* lse = lse_at(queries.batch, head, row);
    for (int64_t i = 0; i < panel.lanes; ++i) {
      // A sink alone is not enough: without keys there is no output that it could take a part of.
      const bool none = panel.l[i] == C(0) || (s.sinks && !sees_a_key(document, queries, panel.q0 + i, lse[i]));
      share[i] = none ? C(0) : C(1) / panel.l[i];
      lse[i] = none ? -std::numeric_limits<C>::infinity() : panel.m[i] * C(kLn2) + std::log(panel.l[i]);
    }
    std::fill(share + panel.lanes, share + W, C(0));
    for (int64_t d = 0; d < value_width; ++d)
      for (int v = 0; v < kVectors; ++v) {
        C* o = panel.o + d * W + v * L;
        const vec_t<C> factor = load(share + v * L);
        store(o, factor == C(0) ? zero<C>() : load(o) * factor);  // chosen, not multiplied: v may hold inf
      }
    alignas(64) C rows[kLanes<C> * 256];
    transpose<C>(panel.o, W, value_width, W, C(1), rows, value_width);
    for (int64_t i = 0; i < panel.lanes; ++i)
      if (a.wide)
        std::copy_n(rows + i * value_width, s.value_size, wide_at(queries.batch, row + i, head));
      else
        narrow_row<T, C>(rows + i * value_width, C(1), s.value_size, out_at(queries.batch, row + i, head));
  }

  int64_t out_index(int64_t batch, int64_t row, int64_t head) const {
    return ((batch * s.rows_q + row) * s.heads_q + head) * s.value_size;
  }
  T* out_at(int64_t batch, int64_t row, int64_t head) const {
    return static_cast<T*>(a.out) + out_index(batch, row, head);
  }
  C* wide_at(int64_t batch, int64_t row, int64_t head) const {
    return static_cast<C*>(a.out) + out_index(batch, row, head);
  }
  C* lse_at(int64_t batch, int64_t head, int64_t row) const {
    return static_cast<C*>(a.lse) + (batch * s.heads_q + head) * s.rows_q + row;
  }

  // Packed rows outside every document.
  void empty_rows(int64_t begin, int64_t end) const {
    if (begin >= end) return;
    const int64_t size = (end - begin) * s.heads_q * s.value_size;
    if (a.wide)
      std::fill_n(wide_at(0, begin, 0), size, C(0));
    else
      std::fill_n(out_at(0, begin, 0), size, T{});
    for (int64_t head = 0; head < s.heads_q; ++head)
      std::fill(lse_at(0, head, begin), lse_at(0, head, end), -std::numeric_limits<C>::infinity());
  }
};

}  // namespace

int64_t attention_forward_workspace(const AttentionShape& s) {
  int64_t bytes = 0;
  with_operands(s, [&](auto* dtype, auto* operand) {
    AttentionForward arguments{};
    arguments.shape = s;
    bytes = Forward<std::decay_t<decltype(*dtype)>, std::decay_t<decltype(*operand)>>{arguments}.workspace_bytes();
  });
  return bytes;
}

void attention_forward(const AttentionForward& a) {
  with_operands(a.shape, [&](auto* dtype, auto* operand) {
    Forward<std::decay_t<decltype(*dtype)>, std::decay_t<decltype(*operand)>>{a}.run();
  });
}

}  // namespace pyfast
