// Attention backward (Dao 2023, algorithm 2), one pass, deterministic.
//
// With L = lse, P = exp(S - L), delta = rowsum(dO * O) - dL, and everything transposed as in the forward:
//
//   S^T = K Q^T   dP^T = V dO^T   dS^T = P^T * (dP^T - delta)   (* 1 - tanh^2 under a softcap)
//   dV += P^T dO   dK += dS^T Q * scale   dQ^T += K^T dS^T * scale   dsink = -sum exp(sink - L) delta
//
// First every panel of queries is prepared: Q and dO packed both ways, delta. Then a task is one block of keys of one
// unit (a kv head of a sequence): it keeps dK and dV of the block and adds its part of dQ into the panels. The blocks of a unit add to a panel in ascending order, each waiting for the one before: tasks are
// queued in that order too, so nobody waits for a task that no thread has begun. The last block writes dQ out.
// Every sum has one order: the same bits for any number of threads. S and dP are computed once.
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

// Sizes, and where a panel's parts lie.
template <class C>
struct Layout {
  static constexpr int W = kLanes<C>;
  int64_t depth, value_depth;  // head sizes padded to kRows: along the depth of panels and columns
  int64_t width, value_width;  // padded to vectors: rows of Q, dO, dK, dV

  explicit Layout(const AttentionShape& s)
      : depth(ceil_to(s.head_size, kRows)),
        value_depth(ceil_to(s.value_size, kRows)),
        width(ceil_to(s.head_size, std::max(Vec<C>::size, kRows))),
        value_width(ceil_to(s.value_size, std::max(Vec<C>::size, kRows))) {}

  int64_t panel_size() const { return (2 * depth + value_depth + width + value_width + 2) * W; }
  int64_t task_size() const {
    return (depth + value_depth + width + value_width + 2 * W) * kKeyBlock;
  }
};

template <class C>
struct Panel {
  int64_t q0, lanes;
  C *q, *dout;            // [depth][kLanes], [value_depth][kLanes]; q scaled
  C *dq;                  // [depth][kLanes], sum over key blocks
  C *q_rows, *dout_rows;  // [kLanes][width], [kLanes][value_width]; unscaled
  C *lse, *delta;         // [kLanes]; lse in base 2, +inf where a query sees nothing

  Panel(const Layout<C>& layout, C* base, int64_t q0_, int64_t lanes_) : q0(q0_), lanes(lanes_) {
    constexpr int W = kLanes<C>;
    q = base;
    dq = q + layout.depth * W;
    dout = dq + layout.depth * W;
    q_rows = dout + layout.value_depth * W;
    dout_rows = q_rows + layout.width * W;
    lse = dout_rows + layout.value_width * W;
    delta = lse + W;
  }
};

// One block of keys with its gradients.
template <class C>
struct KeyBlock {
  int64_t k0, count;
  C *k, *v;    // packed columns
  C *dk, *dv;  // [kKeyBlock][width], [kKeyBlock][value_width]
  C *p, *ds;   // [kKeyBlock][kLanes]
};

struct Unit {
  int64_t z, kv;
  int64_t first_panel;  // of its group x panels, within the chunk
  int64_t panels;       // of one query head
};

struct Task {
  int64_t unit, block;
  int64_t left;  // work of this and the later blocks of the unit: descending order keeps the blocks of a unit in order
};

void longest_first(std::vector<Task>& tasks) {
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& x, const Task& y) { return x.left > y.left; });
}

// P^T and dS^T from S^T and dP^T (in place: p holds S, ds holds dP) for key rows [begin, end); masked entries become 0.
template <class C, int NV>
void score_gradients(const Visible& visible, const KeyBlock<C>& block, const Panel<C>& panel, C softcap, int64_t begin,
                     int64_t end) {
  constexpr int W = kLanes<C>, L = Vec<C>::size;
  const int64_t last_query = panel.q0 + panel.lanes - 1;
  const int64_t full_lo = visible.lo(last_query), full_hi = visible.hi(panel.q0);
  vec_t<C> lse[NV], delta[NV];
  for (int v = 0; v < NV; ++v) lse[v] = load(panel.lse + v * L), delta[v] = load(panel.delta + v * L);
  for (int64_t r = begin; r < end; ++r) {
    const int64_t key = block.k0 + r;
    const bool all = key >= full_lo && key < full_hi;
    const LaneRange see = r < block.count ? lanes_that_see(visible, key, panel.q0) : LaneRange{1 << 20, -1};
    for (int v = 0; v < NV; ++v) {
      C *p = block.p + r * W + v * L, *ds = block.ds + r * W + v * L;
      vec_t<C> score = load(p), slope = load(ds) - delta[v];
      if (softcap > 0) {
        const vec_t<C> t = tanh<C>(score);
        score = t * (softcap * C(kLog2E));
        slope *= C(1) - t * t;
      }
      vec_t<C> x = score - lse[v];
      x = x > C(0) ? zero<C>() : x;  // P <= 1 but for rounding
      vec_t<C> weight = exp2_softmax<C>(x), gradient = weight * slope;
      if (!all) {
        const vec_t<C> lane = lane_numbers<C>(v);
        weight = lane < C(see.first) ? zero<C>() : weight;
        weight = lane > C(see.last) ? zero<C>() : weight;
        gradient = weight == C(0) ? zero<C>() : gradient;
      }
      store(p, weight);
      store(ds, gradient);
    }
  }
}

template <class T>
struct Backward {
  using C = compute_t<T>;
  static constexpr int W = kLanes<C>;
  const AttentionBackward& a;
  const AttentionShape& s = a.shape;
  const Layout<C> layout{s};
  const int64_t group = s.heads_q / s.heads_k;

  int64_t panels_of(int64_t z) const { return (sequence_at(s, z).q_len + W - 1) / W; }

  int64_t bytes_of(int64_t z) const {
    return panels_of(z) * group * layout.panel_size() * int64_t(sizeof(C));
  }
  int64_t workspace_bytes() const {
    return workspace_of_chunks(s, [&](int64_t z) { return bytes_of(z); });
  }

  void run() const {
    std::vector<C> dsinks(s.sinks ? s.heads_q : 0, C(0));
    for (int64_t first = 0, last; first < s.batch * s.heads_k; first = last) {
      last = chunk_end(s, first, [&](int64_t z) { return bytes_of(z); });
      run_chunk(first, last, dsinks);
    }
    if (s.sinks) std::copy(dsinks.begin(), dsinks.end(), static_cast<C*>(a.dsinks));
    if (!s.cu_q) return;
    zero_rows(a.dq, s.heads_q * s.head_size, 0, s.cu_q[0]);
    zero_rows(a.dq, s.heads_q * s.head_size, s.cu_q[s.batch], s.rows_q);
    for (auto [data, size] : {std::pair{a.dk, s.head_size}, std::pair{a.dv, s.value_size}}) {
      zero_rows(data, s.heads_k * size, 0, s.cu_k[0]);
      zero_rows(data, s.heads_k * size, s.cu_k[s.batch], s.rows_k);
    }
  }

  void run_chunk(int64_t first, int64_t last, std::vector<C>& dsinks) const {
    std::vector<Unit> units;
    std::vector<Task> tasks;
    struct PanelIndex {
      int32_t unit, panel;  // panel of the unit: head of the group * panels + number
    };
    std::vector<PanelIndex> all;
    for (int64_t u = first; u < last; ++u) {
      const Unit unit{u / s.heads_k, u % s.heads_k, int64_t(all.size()), panels_of(u / s.heads_k)};
      for (int64_t i = 0; i < group * unit.panels; ++i) all.push_back({int32_t(units.size()), int32_t(i)});
      add_tasks(unit, int64_t(units.size()), tasks);
      units.push_back(unit);
    }
    longest_first(tasks);

    std::vector<C> sink_parts(s.sinks ? all.size() : 0);
    parallel_tasks(int64_t(all.size()), s.threads, [&](int64_t i, int) {
      const C part = prepare(units[all[i].unit], all[i].panel);
      if (s.sinks) sink_parts[i] = part;
    });
    for (size_t i = 0; i < sink_parts.size(); ++i) {
      const Unit& unit = units[all[i].unit];
      dsinks[unit.kv * group + all[i].panel / unit.panels] += sink_parts[i];
    }

    // done[panel]: blocks of keys up to here have been added to the panel's dq.
    std::unique_ptr<std::atomic<int64_t>[]> done(new std::atomic<int64_t>[all.size() + 1]);
    for (size_t i = 0; i < all.size(); ++i) done[i].store(-1, std::memory_order_relaxed);
    parallel_tasks(int64_t(tasks.size()), s.threads,
                   [&](int64_t i, int) { run_task(units[tasks[i].unit], tasks[i].block, done.get()); });
  }

  void add_tasks(const Unit& unit, int64_t index, std::vector<Task>& tasks) const {
    const Sequence sequence = sequence_at(s, unit.z);
    const Visible visible(s, sequence);
    const int64_t blocks = (sequence.k_len + kKeyBlock - 1) / kKeyBlock;
    int64_t left = 0;
    for (int64_t block = blocks - 1; block >= 0; --block) {
      const int64_t k0 = block * kKeyBlock, k1 = std::min(k0 + kKeyBlock, sequence.k_len);
      const int64_t q0 = std::max<int64_t>(0, visible.first_query(k0));
      const int64_t q1 = std::min(sequence.q_len - 1, visible.last_query(k1 - 1));
      left += std::max<int64_t>(0, q1 - q0 + 1) * (k1 - k0) + 1;  // + 1: strictly more than what comes after
      tasks.push_back({index, block, left});
    }
  }

  Panel<C> panel_at(const Unit& unit, int64_t index) const {
    const int64_t q0 = index % unit.panels * W;
    return Panel<C>(layout, static_cast<C*>(a.workspace) + (unit.first_panel + index) * layout.panel_size(), q0,
                    std::min<int64_t>(W, sequence_at(s, unit.z).q_len - q0));
  }

  static const T* row_at(const Strided& x, int64_t batch, int64_t row, int64_t head) {
    return static_cast<const T*>(x.data) + batch * x.batch + row * x.row + head * x.head;
  }

  // Packs a panel of queries; returns its part of the sink's gradient.
  C prepare(const Unit& unit, int64_t index) const {
    const Sequence sequence = sequence_at(s, unit.z);
    const Visible visible(s, sequence);
    const Panel<C> panel = panel_at(unit, index);
    const int64_t head = unit.kv * group + index / unit.panels, row = sequence.q_start + panel.q0;
    const int64_t lse_row = (sequence.batch * s.heads_q + head) * s.rows_q + row;
    const C* lse = static_cast<const C*>(a.lse) + lse_row;
    const C* dlse = a.dlse ? static_cast<const C*>(a.dlse) + lse_row : nullptr;
    const C infinity = std::numeric_limits<C>::infinity();
    const C sink = s.sinks ? static_cast<const C*>(s.sinks)[head] * C(kLog2E) : C(0);

    pack_rows<T, C>(row_at(a.q, sequence.batch, row, head), a.q.row, panel.lanes, W, s.head_size, layout.width,
                    panel.q_rows);
    pack_rows<T, C>(row_at(a.dout, sequence.batch, row, head), a.dout.row, panel.lanes, W, s.value_size,
                    layout.value_width, panel.dout_rows);
    std::fill(panel.lse, panel.lse + W, infinity);
    std::fill(panel.delta, panel.delta + W, C(0));
    C dsink = 0;
    for (int64_t i = 0; i < panel.lanes; ++i) {
      C* dout = panel.dout_rows + i * layout.value_width;
      if (lse[i] == -infinity) {  // sees nothing: whatever its gradient is, it leads nowhere
        std::fill(dout, dout + layout.value_width, C(0));
        continue;
      }
      panel.lse[i] = lse[i] * C(kLog2E);
      panel.delta[i] = dot(row_at(a.out, sequence.batch, row + i, head), dout) - (dlse ? dlse[i] : C(0));
      if (s.sinks) dsink -= std::exp2(std::min(sink - panel.lse[i], C(0))) * panel.delta[i];
    }
    transpose<C>(panel.q_rows, layout.width, W, layout.depth, C(query_factor(s)), panel.q, W);
    transpose<C>(panel.dout_rows, layout.value_width, W, layout.value_depth, C(1), panel.dout, W);
    if (visible.lo(panel.q0) >= visible.hi(panel.q0 + panel.lanes - 1))  // no block of keys will write it
      for (int64_t i = 0; i < panel.lanes; ++i)
        std::memset(static_cast<void*>(dq_at(sequence.batch, row + i, head)), 0, size_t(s.head_size) * sizeof(T));
    return dsink;
  }

  C dot(const T* out, const C* dout) const {
    constexpr int L = Vec<C>::size;
    vec_t<C> sum = zero<C>();
    int64_t j = 0;
    for (; j + L <= s.value_size; j += L) sum += load(out + j) * load(dout + j);
    C total = horizontal_sum<C>(sum);
    for (; j < s.value_size; ++j) total += C(widen(out[j])) * dout[j];
    return total;
  }

  void run_task(const Unit& unit, int64_t index, std::atomic<int64_t>* done) const {
    static thread_local Scratch scratch;
    const Sequence sequence = sequence_at(s, unit.z);
    const Visible visible(s, sequence);
    const int64_t k0 = index * kKeyBlock, count = std::min(kKeyBlock, sequence.k_len - k0);
    C* k = scratch.get<C>(layout.task_size());
    C *v = k + layout.depth * kKeyBlock, *dk = v + layout.value_depth * kKeyBlock;
    C *dv = dk + layout.width * kKeyBlock, *p = dv + layout.value_width * kKeyBlock, *ds = p + W * kKeyBlock;
    const KeyBlock<C> block{k0, count, k, v, dk, dv, p, ds};
    pack_columns<T, C>(row_at(a.k, sequence.batch, sequence.k_start + k0, unit.kv), a.k.row, count, s.head_size, k);
    pack_columns<T, C>(row_at(a.v, sequence.batch, sequence.k_start + k0, unit.kv), a.v.row, count, s.value_size, v);
    std::fill(dk, p, C(0));

    const int64_t q0 = std::max<int64_t>(0, visible.first_query(k0));
    const int64_t q1 = std::min(sequence.q_len - 1, visible.last_query(k0 + count - 1));
    for (int64_t h = 0; h < group; ++h)
      for (int64_t i = q0 / W; i * W <= q1; ++i) {
        const Panel<C> panel = panel_at(unit, h * unit.panels + i);
        with_vectors<C>(panel.lanes, [&](auto nv) {
          visit<nv>(visible, block, panel, done[unit.first_panel + h * unit.panels + i]);
        });
        if (visible.hi(panel.q0 + panel.lanes - 1) <= k0 + count) write_dq(sequence, unit.kv * group + h, panel);
      }
    for (int64_t r = 0; r < count; ++r) {
      const int64_t row = (sequence.batch * s.rows_k + sequence.k_start + k0 + r) * s.heads_k + unit.kv;
      narrow_row<T, C>(dk + r * layout.width, C(s.scale), s.head_size, static_cast<T*>(a.dk) + row * s.head_size);
      narrow_row<T, C>(dv + r * layout.value_width, C(1), s.value_size, static_cast<T*>(a.dv) + row * s.value_size);
    }
  }

  // One panel of queries against one block of keys.
  template <int NV>
  void visit(const Visible& visible, const KeyBlock<C>& block, const Panel<C>& panel, std::atomic<int64_t>& done) const {
    const int64_t first_key = visible.lo(panel.q0);
    const int64_t lo = std::max(block.k0, first_key) - block.k0;
    const int64_t hi = std::min(block.k0 + block.count, visible.hi(panel.q0 + panel.lanes - 1)) - block.k0;
    const int64_t begin = lo / kRows * kRows, end = ceil_to(hi, kRows);
    columns_times_panel<C, NV>(block.k, begin, end, layout.depth, panel.q, block.p);
    columns_times_panel<C, NV>(block.v, begin, end, layout.value_depth, panel.dout, block.ds);
    score_gradients<C, NV>(visible, block, panel, C(s.softcap), begin, end);
    scores_times_rows<C>(block.p, begin, end, panel.lanes, panel.dout_rows, layout.value_width, block.dv);
    scores_times_rows<C>(block.ds, begin, end, panel.lanes, panel.q_rows, layout.width, block.dk);

    const int64_t number = block.k0 / kKeyBlock;
    const bool first = number == first_key / kKeyBlock;
    if (!first)
      for (int spins = 0; done.load(std::memory_order_acquire) < number - 1; ++spins)
        if (spins > 100) sched_yield();
    columns_transposed_times_scores<C, NV>(block.k, layout.depth, lo, hi, block.ds, panel.dq, !first);
    done.store(number, std::memory_order_release);
  }

  void write_dq(const Sequence& sequence, int64_t head, const Panel<C>& panel) const {
    alignas(64) C rows[kLanes<C> * 256];
    transpose<C>(panel.dq, W, layout.depth, panel.lanes, C(s.scale), rows, layout.depth);
    for (int64_t i = 0; i < panel.lanes; ++i)
      narrow_row<T, C>(rows + i * layout.depth, C(1), s.head_size,
                       dq_at(sequence.batch, sequence.q_start + panel.q0 + i, head));
  }

  T* dq_at(int64_t batch, int64_t row, int64_t head) const {
    return static_cast<T*>(a.dq) + ((batch * s.rows_q + row) * s.heads_q + head) * s.head_size;
  }

  // Packed rows outside every document.
  static void zero_rows(void* data, int64_t width, int64_t begin, int64_t end) {
    if (begin < end)
      std::memset(static_cast<void*>(static_cast<T*>(data) + begin * width), 0, size_t(end - begin) * width * sizeof(T));
  }
};

}  // namespace

int64_t attention_backward_workspace(const AttentionShape& s) {
  int64_t bytes = 0;
  with_dtype(s.dtype, [&](auto* tag) {
    AttentionBackward arguments{};
    arguments.shape = s;
    bytes = Backward<std::decay_t<decltype(*tag)>>{arguments}.workspace_bytes();
  });
  return bytes;
}

void attention_backward(const AttentionBackward& a) {
  with_dtype(a.shape.dtype, [&](auto* tag) { Backward<std::decay_t<decltype(*tag)>>{a}.run(); });
}

}  // namespace pyfast
