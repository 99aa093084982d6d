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
// multiples of kKeyBlock in its sequence), never on which queries or heads share its task: the same bits for any number
// of threads.
#include <vector>

#include "attention_pack.h"
#include "attention_scores.h"
#include "parallel.h"
#include "scratch.h"

namespace pyfast {
namespace {

constexpr int64_t kTaskLanes = 192;  // queries x heads a task holds: their Q and O must stay in L2 beside K and V

struct Unit {
  int64_t z, kv;
  int64_t first_block;  // of its blocks of keys, within the chunk
};

struct Task {
  int64_t unit;
  int64_t head, heads;  // query heads [head, head + heads)
  int64_t q0, q1;          // queries of sequence z
  int64_t cost;            // visible (query, key) pairs, about
};

void longest_first(std::vector<Task>& tasks) {
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& x, const Task& y) { return x.cost > y.cost; });
}

// State of one panel of queries, for one head.
template <class C>
struct Panel {
  int64_t q0, lanes;
  C *q, *o, *m, *l;  // [head size][kLanes], [value size][kLanes], [kLanes], [kLanes]
};

template <class C>
struct KeyBlock {
  int64_t k0, count;
  C *k, *v;  // packed columns
};

// One panel against the keys [lo, hi) of a block: scores, softmax, values.
template <class C, int NV>
void attend(const Visible& visible, const KeyBlock<C>& block, const Panel<C>& panel, int64_t depth, int64_t value_width,
            C softcap, int64_t lo, int64_t hi, C* s) {
  constexpr int W = kLanes<C>, L = Vec<C>::size;
  const int64_t begin = lo - block.k0, end = hi - block.k0;
  columns_times_panel<C, NV>(block.k, begin / kRows * kRows, ceil_to(end, kRows), depth, panel.q, s);

  const int64_t last_query = panel.q0 + panel.lanes - 1;
  const int64_t full_lo = visible.lo(last_query), full_hi = visible.hi(panel.q0);  // keys that all lanes see
  const C infinity = std::numeric_limits<C>::infinity();
  vec_t<C> top[NV];
  for (int v = 0; v < NV; ++v) top[v] = load(panel.m + v * L);
  for (int64_t r = begin; r < end; ++r) {
    const int64_t key = block.k0 + r;
    C* row = s + r * W;
    if (softcap > 0)
      for (int v = 0; v < NV; ++v) store(row + v * L, capped<C>(load(row + v * L), softcap));
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
    base[v] = top[v] == -infinity ? zero<C>() : top[v];  // -inf - -inf would be NaN
    const vec_t<C> before = load(panel.m + v * L);
    shrink[v] = exp2_softmax<C>(before - base[v]);
    for (int i = 0; i < L; ++i) moved |= shrink[v][i] != C(1);
    sum[v] = zero<C>();
  }
  for (int64_t r = begin; r < end; ++r)
    for (int v = 0; v < NV; ++v) {
      const vec_t<C> p = exp2_softmax<C>(load(s + r * W + v * L) - base[v]);
      sum[v] += p;
      store(s + r * W + v * L, p);
    }
  for (int v = 0; v < NV; ++v) {
    store(panel.m + v * L, top[v]);
    store(panel.l + v * L, load(panel.l + v * L) * shrink[v] + sum[v]);
  }
  if (moved)
    for (int64_t d = 0; d < value_width; ++d)
      for (int v = 0; v < NV; ++v) store(panel.o + d * W + v * L, load(panel.o + d * W + v * L) * shrink[v]);
  columns_transposed_times_scores<C, NV>(block.v, value_width, begin, end, s, panel.o, true);
}

template <class T>
struct Forward {
  using C = compute_t<T>;
  static constexpr int W = kLanes<C>;
  const AttentionForward& a;
  const AttentionShape& s = a.shape;
  const int64_t depth = ceil_to(s.head_size, kRows), value_width = ceil_to(s.value_size, kRows);
  const int64_t group = s.heads_q / s.heads_k;

  int64_t panel_size() const { return (depth + value_width + 2) * W; }
  int64_t block_size() const { return (depth + value_width) * kKeyBlock; }

  int64_t blocks_of(int64_t z) const { return (sequence_at(s, z).k_len + kKeyBlock - 1) / kKeyBlock; }
  int64_t bytes_of(int64_t z) const { return blocks_of(z) * block_size() * int64_t(sizeof(C)); }
  int64_t workspace_bytes() const {
    return workspace_of_chunks(s, [&](int64_t z) { return bytes_of(z); });
  }

  void run() const {
    for (int64_t first = 0, last; first < s.batch * s.heads_k; first = last) {
      last = chunk_end(s, first, [&](int64_t z) { return bytes_of(z); });
      run_chunk(first, last);
    }
    if (s.cu_q) {
      empty_rows(0, s.cu_q[0]);
      empty_rows(s.cu_q[s.batch], s.rows_q);
    }
  }

  void run_chunk(int64_t first, int64_t last) const {
    std::vector<Unit> units;
    std::vector<int32_t> unit_of_block;
    for (int64_t unit = first; unit < last; ++unit) {
      units.push_back({unit / s.heads_k, unit % s.heads_k, int64_t(unit_of_block.size())});
      unit_of_block.resize(unit_of_block.size() + blocks_of(unit / s.heads_k), int32_t(unit - first));
    }
    parallel_tasks(int64_t(unit_of_block.size()), s.threads, [&](int64_t block, int) {
      const Unit& unit = units[unit_of_block[block]];
      pack_block(unit, block - unit.first_block);
    });
    const std::vector<Task> list = tasks(units);
    parallel_tasks(int64_t(list.size()), s.threads,
                   [&](int64_t index, int) { run_task(units[list[index].unit], list[index]); });
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
      const Sequence sequence = sequence_at(s, units[u].z);
      const Visible visible(s, sequence);
      for (int64_t q0 = 0; q0 < sequence.q_len; q0 += rows) {
        const int64_t q1 = std::min(q0 + rows, sequence.q_len);
        const int64_t cost = (q1 - q0) * std::max<int64_t>(0, visible.hi(q1 - 1) - visible.lo(q0));
        for (int64_t first = 0; first < group; first += heads)
          list.push_back(
              {int64_t(u), units[u].kv * group + first, std::min(heads, group - first), q0, q1, cost});
      }
    }
    longest_first(list);
    return list;
  }

  KeyBlock<C> block_at(const Unit& unit, int64_t index, int64_t k_len) const {
    C* k = static_cast<C*>(a.workspace) + (unit.first_block + index) * block_size();
    return {index * kKeyBlock, std::min(kKeyBlock, k_len - index * kKeyBlock), k, k + depth * kKeyBlock};
  }

  void pack_block(const Unit& unit, int64_t index) const {
    const Sequence sequence = sequence_at(s, unit.z);
    const KeyBlock<C> block = block_at(unit, index, sequence.k_len);
    const int64_t row = sequence.k_start + block.k0;
    pack_columns<T, C>(row_at(a.k, sequence.batch, row, unit.kv), a.k.row, block.count, s.head_size, block.k);
    pack_columns<T, C>(row_at(a.v, sequence.batch, row, unit.kv), a.v.row, block.count, s.value_size, block.v);
  }

  void run_task(const Unit& unit, const Task& task) const {
    static thread_local Scratch scratch;
    const Sequence sequence = sequence_at(s, unit.z);
    const Visible visible(s, sequence);
    const int64_t panels = (task.q1 - task.q0 + W - 1) / W;
    C* scores = scratch.get<C>(panels * task.heads * panel_size() + kKeyBlock * W);
    C* states = scores + kKeyBlock * W;
    auto panel_at = [&](int64_t h, int64_t p) {
      C* base = states + (h * panels + p) * panel_size();
      const int64_t q0 = task.q0 + p * W;
      return Panel<C>{q0, std::min<int64_t>(W, task.q1 - q0), base, base + depth * W, base + (depth + value_width) * W,
                      base + (depth + value_width + 1) * W};
    };
    for (int64_t h = 0; h < task.heads; ++h)
      for (int64_t p = 0; p < panels; ++p) start(sequence, task.head + h, panel_at(h, p));

    const int64_t lo = visible.lo(task.q0), hi = visible.hi(task.q1 - 1);
    for (int64_t k0 = lo / kKeyBlock * kKeyBlock; k0 < hi; k0 += kKeyBlock) {
      const KeyBlock<C> block = block_at(unit, k0 / kKeyBlock, sequence.k_len);
      for (int64_t h = 0; h < task.heads; ++h)
        for (int64_t p = 0; p < panels; ++p) {
          const Panel<C> panel = panel_at(h, p);
          const int64_t from = std::max(k0, visible.lo(panel.q0));
          const int64_t to = std::min(k0 + block.count, visible.hi(panel.q0 + panel.lanes - 1));
          if (from >= to) continue;
          with_vectors<C>(panel.lanes, [&](auto nv) {
            attend<C, nv>(visible, block, panel, depth, value_width, C(s.softcap), from, to, scores);
          });
        }
    }
    for (int64_t h = 0; h < task.heads; ++h)
      for (int64_t p = 0; p < panels; ++p) finish(visible, sequence, task.head + h, panel_at(h, p));
  }

  static const T* row_at(const Strided& x, int64_t batch, int64_t row, int64_t head) {
    return static_cast<const T*>(x.data) + batch * x.batch + row * x.row + head * x.head;
  }

  // Q^T packed and scaled; nothing summed yet, or the sink: one more logit that has no value.
  void start(const Sequence& sequence, int64_t head, const Panel<C>& panel) const {
    alignas(64) C rows[kLanes<C> * 256];
    pack_rows<T, C>(row_at(a.q, sequence.batch, sequence.q_start + panel.q0, head), a.q.row, panel.lanes, W,
                    s.head_size, depth, rows);
    transpose<C>(rows, depth, W, depth, C(query_factor(s)), panel.q, W);
    std::fill(panel.o, panel.o + value_width * W, C(0));
    const C* sinks = static_cast<const C*>(s.sinks);
    std::fill(panel.m, panel.m + W, sinks ? sinks[head] * C(kLog2E) : -std::numeric_limits<C>::infinity());
    std::fill(panel.l, panel.l + W, sinks ? C(1) : C(0));
  }

  void finish(const Visible& visible, const Sequence& sequence, int64_t head, const Panel<C>& panel) const {
    constexpr int L = Vec<C>::size;
    const C infinity = std::numeric_limits<C>::infinity();
    alignas(64) C share[W];
    C* lse = lse_at(sequence.batch, head, sequence.q_start + panel.q0);
    for (int64_t i = 0; i < panel.lanes; ++i) {
      const bool none = visible.none(panel.q0 + i) || panel.l[i] == C(0);
      share[i] = none ? C(0) : C(1) / panel.l[i];
      lse[i] = none ? -infinity : panel.m[i] * C(kLn2) + std::log(panel.l[i]);
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
      narrow_row<T, C>(rows + i * value_width, C(1), s.value_size,
                       out_at(sequence.batch, sequence.q_start + panel.q0 + i, head));
  }

  T* out_at(int64_t batch, int64_t row, int64_t head) const {
    return static_cast<T*>(a.out) + ((batch * s.rows_q + row) * s.heads_q + head) * s.value_size;
  }
  C* lse_at(int64_t batch, int64_t head, int64_t row) const {
    return static_cast<C*>(a.lse) + (batch * s.heads_q + head) * s.rows_q + row;
  }

  // Packed rows outside every document.
  void empty_rows(int64_t begin, int64_t end) const {
    if (begin >= end) return;
    std::memset(static_cast<void*>(out_at(0, begin, 0)), 0, size_t(end - begin) * s.heads_q * s.value_size * sizeof(T));
    for (int64_t head = 0; head < s.heads_q; ++head)
      std::fill(lse_at(0, head, begin), lse_at(0, head, end), -std::numeric_limits<C>::infinity());
  }
};

}  // namespace

int64_t attention_forward_workspace(const AttentionShape& s) {
  int64_t bytes = 0;
  with_dtype(s.dtype, [&](auto* tag) {
    AttentionForward arguments{};
    arguments.shape = s;
    bytes = Forward<std::decay_t<decltype(*tag)>>{arguments}.workspace_bytes();
  });
  return bytes;
}

void attention_forward(const AttentionForward& a) {
  with_dtype(a.shape.dtype, [&](auto* tag) { Forward<std::decay_t<decltype(*tag)>>{a}.run(); });
}

}  // namespace pyfast
