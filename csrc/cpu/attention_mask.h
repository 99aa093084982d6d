// Which keys a query sees, and whose rows are where: the only place that knows causal, window, cu_seqlens and runs.
#pragma once
#include <algorithm>
#include <vector>

#include "../kernels.h"
#include "attention_tile.h"

namespace pyfast {

// Rows [row, row + length) of one side, the tokens start, start + stride, ... of a document. The document's rows are
// cut into pieces (panels of queries, blocks of keys), run by run; `before` counts those of its earlier runs.
struct Run {
  int64_t batch, row, length, start, stride, before;
};

// Queries and keys that may see each other: runs [q_begin, q_end) of the queries, [k_begin, k_end) of the keys.
struct Document {
  int64_t q_begin, q_end, k_begin, k_end;
  int64_t panels, blocks;
};

struct Rows {
  int64_t begin, end;
};

// The documents of a call. Rows of no document are listed apart.
struct Documents {
  std::vector<Run> q, k;
  std::vector<Document> list;
  std::vector<Rows> loose_q, loose_k;

  Documents(const AttentionShape& s, int64_t lanes) {
    if (s.runs_q)
      from_runs(s);
    else if (s.cu_q)
      from_starts(s);
    else
      for (int64_t z = 0; z < s.batch; ++z) add({z, 0, s.rows_q, s.rows_k - s.rows_q, 1, 0}, {z, 0, s.rows_k, 0, 1, 0});
    for (Document& document : list) {
      document.panels = count(q, document.q_begin, document.q_end, lanes);
      document.blocks = count(k, document.k_begin, document.k_end, kKeyBlock);
    }
  }

 private:
  void add(const Run& queries, const Run& keys) {
    const int64_t i = int64_t(q.size());
    q.push_back(queries);
    k.push_back(keys);
    list.push_back({i, i + 1, i, i + 1, 0, 0});
  }

  void from_starts(const AttentionShape& s) {
    for (int64_t z = 0; z < s.batch; ++z) {
      const int64_t rows_q = s.cu_q[z + 1] - s.cu_q[z], rows_k = s.cu_k[z + 1] - s.cu_k[z];
      add({0, s.cu_q[z], rows_q, rows_k - rows_q, 1, 0}, {0, s.cu_k[z], rows_k, 0, 1, 0});
    }
    loose_q = {{0, s.cu_q[0]}, {s.cu_q[s.batch], s.rows_q}};
    loose_k = {{0, s.cu_k[0]}, {s.cu_k[s.batch], s.rows_k}};
  }

  struct Named {
    int64_t document;
    Run run;
  };

  // The runs with rows, by document.
  static std::vector<Named> named(const int64_t* runs, int64_t count, int64_t rows, std::vector<Rows>& loose) {
    std::vector<Named> result;
    int64_t row = 0;
    for (const int64_t* run = runs; run < runs + 4 * count; row += run[2], run += 4) {
      if (run[0] < 0)
        loose.push_back({row, row + run[2]});
      else if (run[2] > 0)
        result.push_back({run[0], {0, row, run[2], run[1], run[3], 0}});
    }
    loose.push_back({row, rows});
    std::stable_sort(result.begin(), result.end(), [](auto& x, auto& y) { return x.document < y.document; });
    return result;
  }

  void from_runs(const AttentionShape& s) {
    const std::vector<Named> queries = named(s.runs_q, s.count_q, s.rows_q, loose_q);
    const std::vector<Named> keys = named(s.runs_k, s.count_k, s.rows_k, loose_k);
    for (size_t i = 0, j = 0; i < queries.size() || j < keys.size();) {
      const int64_t document = j == keys.size()      ? queries[i].document
                               : i == queries.size() ? keys[j].document
                                                     : std::min(queries[i].document, keys[j].document);
      Document d{int64_t(q.size()), 0, int64_t(k.size()), 0, 0, 0};
      for (; i < queries.size() && queries[i].document == document; ++i) q.push_back(queries[i].run);
      for (; j < keys.size() && keys[j].document == document; ++j) k.push_back(keys[j].run);
      d.q_end = int64_t(q.size()), d.k_end = int64_t(k.size());
      list.push_back(d);
    }
  }

  static int64_t count(std::vector<Run>& runs, int64_t begin, int64_t end, int64_t piece) {
    int64_t pieces = 0;
    for (int64_t i = begin; i < end; ++i) {
      runs[i].before = pieces;
      pieces += (runs[i].length + piece - 1) / piece;
    }
    return pieces;
  }
};

// A unit is one kv head of one document, with the query heads that share it: unit = document * heads_k + kv head.
// Units are worked on in chunks [first, result) whose workspace stays under this, or one at a time.
constexpr int64_t kChunkBytes = 64 << 20;

template <class BytesOfDocument>
int64_t chunk_end(int64_t heads_k, int64_t units, int64_t first, BytesOfDocument&& bytes_of) {
  int64_t unit = first, bytes = 0;
  for (; unit < units; ++unit) {
    bytes += bytes_of(unit / heads_k);
    if (bytes > kChunkBytes && unit > first) break;
  }
  return unit;
}

// The largest chunk's bytes.
template <class BytesOfDocument>
int64_t workspace_of_chunks(int64_t heads_k, int64_t units, BytesOfDocument&& bytes_of) {
  int64_t most = 0;
  for (int64_t first = 0, last; first < units; first = last) {
    last = chunk_end(heads_k, units, first, bytes_of);
    int64_t bytes = 0;
    for (int64_t unit = first; unit < last; ++unit) bytes += bytes_of(unit / heads_k);
    most = std::max(most, bytes);
  }
  return most;
}

// Query i of one run sees the keys [lo(i), hi(i)) of another, both counted within their runs.
// Both ends grow with i, so a range of queries sees [lo(first), hi(last)), and all of it sees [lo(last), hi(first)).
struct Visible {
  int64_t left, right, k_len;
  int64_t offset, q_stride, k_stride;  // query i stands at i * q_stride + offset from key 0

  Visible(const AttentionShape& s, const Run& q, const Run& k)
      : left(s.window_left < 0 ? kUnbounded : s.window_left),
        right(s.causal ? 0 : s.window_right < 0 ? kUnbounded : s.window_right),
        k_len(k.length),
        offset(q.start - k.start),
        q_stride(q.stride),
        k_stride(k.stride) {}

  int64_t lo(int64_t i) const { return std::max<int64_t>(0, up(i * q_stride + offset - left, k_stride)); }
  int64_t hi(int64_t i) const { return std::min(k_len, down(i * q_stride + offset + right, k_stride) + 1); }
  bool none(int64_t i) const { return lo(i) >= hi(i); }

  // The queries that see key j: [first_query(j), last_query(j)].
  int64_t first_query(int64_t j) const { return up(j * k_stride - offset - right, q_stride); }
  int64_t last_query(int64_t j) const { return down(j * k_stride - offset + left, q_stride); }

  // The blocks of keys [begin, end) that queries from `first` to `last` see some key of.
  Rows blocks(int64_t first, int64_t last) const {
    const int64_t begin = lo(first), end = hi(last);
    return begin < end ? Rows{begin / kKeyBlock, (end - 1) / kKeyBlock + 1} : Rows{0, 0};
  }

 private:
  static constexpr int64_t kUnbounded = int64_t(1) << 40;

  static int64_t down(int64_t x, int64_t y) { return y == 1 ? x : x / y - (x % y < 0); }
  static int64_t up(int64_t x, int64_t y) { return y == 1 ? x : x / y + (x % y > 0); }
};

}  // namespace pyfast
