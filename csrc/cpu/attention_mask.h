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
