// What happens to a block of scores S^T [keys, queries] between the matrix products: softcap, mask.
//
// Scores are wanted as base-2 exponents, or, under a softcap, as fractions of the cap: `query_factor` is multiplied into
// q when it is packed, where that rounds nothing that matters, or into the scores, where q stays bf16 (`score_factor`).
#pragma once
#include "attention_mask.h"
#include "attention_tile.h"
#include "parallel.h"
#include "vector_math.h"

namespace pyfast {

inline double query_factor(const AttentionShape& s) {
  return s.softcap > 0 ? s.scale / s.softcap : s.scale * kLog2E;
}

// What is left to multiply scores by. Its sign went into q: the largest score stays the largest.
template <class C, class E>
C score_factor(const AttentionShape& s) {
  return kValues<C, E> == 1 ? C(1) : C(std::abs(query_factor(s)));
}

// body(T*, E*): the dtype, and what the operands of its products are made of (see attention_tile.h).
template <class Body>
PF_INLINE void with_operands(const AttentionShape& s, Body&& body) {
  with_dtype(s.dtype, [&](auto* tag) {
    using T = std::decay_t<decltype(*tag)>;
#if defined(__AVX512F__)
    // A factor must not turn the -inf of a hidden key into NaN.
    const double factor = std::abs(query_factor(s));
    if (std::is_same_v<T, bf16> && g_runtime->bfloat16_dot && float(factor) > 0 && factor < 1e30)
      return body(static_cast<bf16*>(nullptr), static_cast<bf16_pair*>(nullptr));
#endif
    body(tag, static_cast<compute_t<T>*>(nullptr));
  });
}

// From what the product gives to base-2 exponents: softcap * tanh(scale q k / softcap) * log2 e.
template <class C>
PF_INLINE vec_t<C> capped(vec_t<C> score, C softcap) {
  return tanh<C>(score) * (softcap * C(kLog2E));
}

// 0, 1, 2, ... in C: lane numbers for comparisons (exact; a panel has few lanes).
template <class C>
PF_INLINE vec_t<C> lane_numbers(int vector) {
  vec_t<C> numbers;
  for (int i = 0; i < Vec<C>::size; ++i) numbers[i] = C(vector * Vec<C>::size + i);
  return numbers;
}

// The lanes [first, last] that see key j, for the panel whose lane 0 is query q0; -1 and kLanes stand for outside.
struct LaneRange {
  int64_t first, last;
};
inline LaneRange lanes_that_see(const Visible& visible, int64_t j, int64_t q0) {
  auto near = [](int64_t lane) { return std::max<int64_t>(-1, std::min<int64_t>(lane, 1 << 20)); };
  return {near(visible.first_query(j) - q0), near(visible.last_query(j) - q0)};
}

}  // namespace pyfast
