// One token's row of logits: loading, noise, softmax, sigmoid and the best k, on the vectors of simd.h.
//
// Rows are copied to `padded(E)` values of C, filled up with -inf, so that loops have no tail.
#pragma once
#include <limits>

#include "scratch.h"
#include "simd.h"
#include "vector_math.h"

namespace pyfast {
namespace route {

template <class C>
constexpr C kInfinity = std::numeric_limits<C>::infinity();
constexpr double kTiny = 1e-20;  // added to a sum of sigmoids before dividing by it, as DeepSeek-V3 does

template <class C>
PF_INLINE int64_t padded(int64_t size) {
  return (size + Vec<C>::size - 1) / Vec<C>::size * Vec<C>::size;
}

// 0, 1, 2, ...
template <class C>
PF_INLINE vec_t<C> iota() {
  vec_t<C> v;
  for (int i = 0; i < Vec<C>::size; ++i) v[i] = C(i);
  return v;
}

// Uniform in [0, 1), 24 bits, from a counter: the finaliser of SplitMix64 (Steele, Lea and Flood 2014).
PF_INLINE double uniform(int64_t key, int64_t token, int64_t expert) {
  uint64_t z = uint64_t(key) + (uint64_t(token) * 65536u + uint64_t(expert) + 1u) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  return double(int64_t(z >> 40)) * 0x1p-24;
}

template <class C>
PF_INLINE C noise_factor(int64_t key, int64_t token, int64_t expert, double jitter) {
  // In the middle of its 24-bit step, so never 0: that times a logit of -inf would be NaN.
  return C(1.0 + jitter * (2.0 * uniform(key, token, expert) - 1.0 + 0x1p-24));
}

// The lanes of a comparison's result, as bits.
template <class C, class Mask>
PF_INLINE uint32_t lanes_of(Mask mask) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<C, float>)
    return _mm512_movepi32_mask(__m512i(mask));
  else
    return _mm512_movepi64_mask(__m512i(mask));
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<C, float>)
    return uint32_t(_mm256_movemask_ps(__m256(mask)));
  else
    return uint32_t(_mm256_movemask_pd(__m256d(mask)));
#else
  uint32_t bits = 0;
  for (int i = 0; i < Vec<C>::size; ++i) bits |= uint32_t(mask[i] != 0) << i;
  return bits;
#endif
}

template <class C>
PF_INLINE bool has_nan(const C* x, int64_t size) {
  auto nan = load(x) != load(x);
  for (int64_t j = Vec<C>::size; j < size; j += Vec<C>::size) nan |= load(x + j) != load(x + j);
  return lanes_of<C>(nan) != 0;
}

// x[0, padded(size)) from storage; `readable` values may be read from source on.
template <class T, class C>
PF_INLINE void load_row(const T* source, int64_t size, int64_t readable, C* x) {
  constexpr int L = Vec<C>::size;
  int64_t j = 0;
  for (; j + L <= size; j += L) store(x + j, load(source + j));
  if (j == size) return;
  const C rest = C(size - j);
  if (j + L <= readable) {
    store(x + j, iota<C>() < rest ? load(source + j) : broadcast<C>(-kInfinity<C>));
    return;
  }
  for (int64_t i = j; i < j + L; ++i) x[i] = i < size ? C(widen(source[i])) : -kInfinity<C>;
}

template <class C>
PF_INLINE C row_max(const C* x, int64_t size) {
  vec_t<C> top = load(x);
  for (int64_t j = Vec<C>::size; j < size; j += Vec<C>::size) top = select_max<C>(load(x + j), top);
  return horizontal_max<C>(top);
}

// What a softmax over x needs: p_j = exp(x_j - reference) * inverse. Rows of nothing but -inf: p = 0, lse = -inf.
template <class C>
struct Softmax {
  C reference, sum, inverse;
  C lse() const { return reference + std::log(sum); }
};

// With e: exp(x - reference) is left there.
template <class C>
PF_INLINE Softmax<C> softmax_of(const C* x, int64_t size, C* e) {
  constexpr int L = Vec<C>::size;
  const C largest = row_max<C>(x, size);
  Softmax<C> s;
  s.reference = largest == -kInfinity<C> ? C(0) : largest;
  vec_t<C> sum = zero<C>();
  for (int64_t j = 0; j < size; j += L) {
    const vec_t<C> value = exp<C>(load(x + j) - s.reference);
    if (e) store(e + j, value);
    sum += value;
  }
  s.sum = horizontal_sum<C>(sum);
  s.inverse = s.sum == C(0) ? C(0) : C(1) / s.sum;
  return s;
}

// 1 / (1 + exp(-x)), accurate at both ends; slope: e / (1 + e)^2 with e = exp(-|x|).
template <class C>
PF_INLINE vec_t<C> sigmoid(vec_t<C> x, vec_t<C>* slope) {
  const vec_t<C> e = exp<C>(x < C(0) ? x : -x), inverse = C(1) / (C(1) + e);
  if (slope) *slope = e * inverse * inverse;
  return (x < C(0) ? e : broadcast<C>(C(1))) * inverse;
}

// The greatest lane; NaN lanes must be none.
template <class C>
PF_INLINE C greatest_lane(vec_t<C> v) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<C, float>)
    return _mm512_reduce_max_ps(__m512(v));
  else
    return _mm512_reduce_max_pd(__m512d(v));
#else
  return horizontal_max<C>(v);
#endif
}

// The first index with keys[index] == value, which must exist; NaN is left there. By whole vectors: a scalar store would
// stall the vector load that follows.
template <class C>
PF_INLINE int64_t take_first_equal(C* keys, C value) {
  constexpr int L = Vec<C>::size;
  for (int64_t j = 0;; j += L) {
    const vec_t<C> v = load(keys + j);
    if (const uint32_t lanes = lanes_of<C>(v == broadcast<C>(value))) {
      const int lane = __builtin_ctz(lanes);
      store(keys + j, iota<C>() == broadcast<C>(C(lane)) ? broadcast<C>(std::numeric_limits<C>::quiet_NaN()) : v);
      return j + lane;
    }
  }
}

// The k greatest of keys[0, size) in descending order, ties to the lowest index, one after the other: no branch depends
// on the numbers but where the next one is found. NaN keys are never taken, and mark what was; k of them must be no NaN.
template <class C>
PF_INLINE void best_of(C* keys, int64_t size, int64_t k, int32_t* ids) {
  constexpr int L = Vec<C>::size;
  for (int64_t i = 0; i < k; ++i) {
    vec_t<C> top = broadcast<C>(-kInfinity<C>);
    for (int64_t j = 0; j < size; j += L) top = select_max<C>(load(keys + j), top);  // NaN > top is false
    ids[i] = int32_t(take_first_equal(keys, greatest_lane<C>(top)));
  }
}

}  // namespace route
}  // namespace pyfast
