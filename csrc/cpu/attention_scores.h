// What happens to a block of scores S^T [keys, queries] between the matrix products: softcap, mask.
//
// Scores leave the product q k^T in the unit that `query_factor` chose: base-2 exponents, or, under a softcap, fractions of
// the cap.
#pragma once
#include "attention_mask.h"
#include "attention_tile.h"
#include "vector_math.h"

namespace pyfast {

// q is multiplied by this when it is packed.
inline double query_factor(const AttentionShape& s) {
  return s.softcap > 0 ? s.scale / s.softcap : s.scale * kLog2E;
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
