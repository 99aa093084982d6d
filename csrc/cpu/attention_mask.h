// Which keys a query sees, and which sequences there are: the only place that knows causal, window and cu_seqlens.
#pragma once
#include <algorithm>

#include "../kernels.h"

namespace pyfast {

// One batch entry or one packed document: rows [q_start, q_start + q_len) see keys [k_start, k_start + k_len).
struct Sequence {
  int64_t batch, q_start, q_len, k_start, k_len;
};

inline Sequence sequence_at(const AttentionShape& s, int64_t z) {
  if (!s.cu_q) return {z, 0, s.rows_q, 0, s.rows_k};
  return {0, s.cu_q[z], s.cu_q[z + 1] - s.cu_q[z], s.cu_k[z], s.cu_k[z + 1] - s.cu_k[z]};
}

// A unit is one kv head of one sequence, with the query heads that share it: unit = sequence * heads_k + kv head.
// Units are worked on in chunks [first, result) whose workspace stays under this, or one at a time.
constexpr int64_t kChunkBytes = 64 << 20;

template <class BytesOfSequence>
int64_t chunk_end(const AttentionShape& s, int64_t first, BytesOfSequence&& bytes_of) {
  int64_t unit = first, bytes = 0;
  for (; unit < s.batch * s.heads_k; ++unit) {
    bytes += bytes_of(unit / s.heads_k);
    if (bytes > kChunkBytes && unit > first) break;
  }
  return unit;
}

// The largest chunk's bytes.
template <class BytesOfSequence>
int64_t workspace_of_chunks(const AttentionShape& s, BytesOfSequence&& bytes_of) {
  int64_t most = 0;
  for (int64_t first = 0, last; first < s.batch * s.heads_k; first = last) {
    last = chunk_end(s, first, bytes_of);
    int64_t bytes = 0;
    for (int64_t unit = first; unit < last; ++unit) bytes += bytes_of(unit / s.heads_k);
    most = std::max(most, bytes);
  }
  return most;
}

// Query i of a sequence stands at position i + offset (bottom-right) and sees the keys [lo(i), hi(i)).
// Both ends grow with i, so a range of queries sees [lo(first), hi(last)), and all of it sees [lo(last), hi(first)).
struct Visible {
  int64_t offset, left, right, k_len;

  Visible(const AttentionShape& s, const Sequence& sequence)
      : offset(sequence.k_len - sequence.q_len),
        left(s.window_left < 0 ? kUnbounded : s.window_left),
        right(s.causal ? 0 : s.window_right < 0 ? kUnbounded : s.window_right),
        k_len(sequence.k_len) {}

  int64_t lo(int64_t i) const { return std::max<int64_t>(0, i + offset - left); }
  int64_t hi(int64_t i) const { return std::min(k_len, i + offset + right + 1); }
  bool none(int64_t i) const { return lo(i) >= hi(i); }

  // The queries that see key j: [first_query(j), last_query(j)].
  int64_t first_query(int64_t j) const { return j - offset - right; }
  int64_t last_query(int64_t j) const { return j - offset + left; }

 private:
  static constexpr int64_t kUnbounded = int64_t(1) << 40;
};

}  // namespace pyfast
