// What the expert MLP's forward and backward share: how pre-activations are kept, the sum over slots, block sizes.
//
// Pre-activations (gate, up) of row r of expert e are kept in panels, the order of the products (moe_tile.h), but without
// unused lanes: the panel of rows [s, s + m) of an expert, m = kWide but for its last one, is [2F][m] from element 2F s on.
#pragma once
#include "moe_tile.h"
#include "vector_math.h"

namespace pyfast {

// How a bfloat16 pre-activation is kept: 16 bits, of which bfloat16 spends 8 on an exponent far wider than activations
// are. With 6 (2^-39 to 2^24; less is 0, more is the largest) the 9 bits of mantissa make the router's gradient, a dot
// product with the activation, 4 times as accurate. All ones but the sign is NaN.
struct e6m9 {
  uint16_t bits;
};
template <class T>
using kept_t = std::conditional_t<std::is_same_v<T, bf16>, e6m9, T>;

namespace detail {

constexpr uint32_t kE6Bias = 87u << 23, kE6Least = 88u << 23, kE6Nan = 0x7fffu;  // float's exponent 127 - 40

PF_INLINE uint_vec as_bits(vec_t<float> value) {
  uint_vec bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

PF_INLINE vec_t<float> from_bits(uint_vec bits) {
  vec_t<float> value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace detail

template <class T>
PF_INLINE vec_t<compute_t<T>> load_kept(const T* source) {
  return load(source);
}
template <class T>
PF_INLINE void store_kept(T* target, vec_t<compute_t<T>> value) {
  store(target, value);
}

PF_INLINE vec_t<float> load_kept(const e6m9* source) {
  const uint_vec bits = detail::as_bits(load(reinterpret_cast<const bf16*>(source)));  // in the upper half
  const uint_vec magnitude = (bits >> 16) & detail::kE6Nan;
  uint_vec value = (magnitude << 14) + detail::kE6Bias;
  value = magnitude == 0u ? uint_vec{} : value;
  value = magnitude == detail::kE6Nan ? uint_vec{} + 0x7fc00000u : value;
  return detail::from_bits(value | (bits & 0x80000000u));
}

PF_INLINE void store_kept(e6m9* target, vec_t<float> value) {
  const uint_vec bits = detail::as_bits(value), magnitude = bits & 0x7fffffffu;
  uint_vec code = (magnitude - detail::kE6Bias + 0x1fffu + ((magnitude >> 14) & 1u)) >> 14;  // to nearest even
  code = magnitude < detail::kE6Least ? uint_vec{} : code;
  code = code > detail::kE6Nan - 1 ? uint_vec{} + (detail::kE6Nan - 1) : code;
  code = magnitude > 0x7f800000u ? uint_vec{} + detail::kE6Nan : code;
  const uint_vec upper = ((bits >> 16) & 0x8000u) | code;
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtepi32_epi16(__m512i(upper)));
#elif defined(__AVX2__)
  __m256i packed = _mm256_packus_epi32(__m256i(upper), __m256i(upper));  // in each 128-bit lane
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 8)));
#else
  half_bits half = __builtin_convertvector(upper, half_bits);
  std::memcpy(target, &half, sizeof(half));
#endif
}

// Whether products are of bf16 pairs; the activation and the gradients by the pre-activation are then rounded to bf16 for
// the next product, in pairs of neighbours in F.
inline bool rows_are_bf16(const MoeMlpShape& s) { return bfloat16_dot() && s.dtype == DType::bf16 && s.ffn % 2 == 0; }

// body(T*, E*): the dtype, and what the operands of products are made of (bf16_pair.h).
template <class Body>
PF_INLINE void with_operands(const MoeMlpShape& s, Body&& body) {
#if defined(__AVX512F__)
  if (rows_are_bf16(s)) return body(static_cast<bf16*>(nullptr), static_cast<bf16_pair*>(nullptr));
#endif
  with_dtype(s.dtype, [&](auto* tag) {
    using T = std::decay_t<decltype(*tag)>;
    body(tag, static_cast<compute_t<T>*>(nullptr));
  });
}

// The operands of row(s) of a panel: one vector of C, or of pairs two.
PF_INLINE void store_operands(float* place, const vec_t<float> (&rows)[1]) { store(place, rows[0]); }
PF_INLINE void store_operands(double* place, const vec_t<double> (&rows)[1]) { store(place, rows[0]); }
#if defined(__AVX512F__)
PF_INLINE void store_operands(bf16_pair* place, const vec_t<float> (&rows)[2]) {
  _mm512_storeu_si512(place, pairs_of(rounded(rows[0]), rounded(rows[1])));
}
#endif

// s = 1 / (1 + e^-gate), and silu(gate) = gate s.
template <class C>
PF_INLINE vec_t<C> sigmoid(vec_t<C> gate) {
  return C(1) / (C(1) + exp<C>(-gate));
}

// out [T, H] = sum over k, in order, of weights[t, k] * rows[inverse[t, k]]; all 1 without weights. One rounding.
template <class T>
void sum_over_slots(const MoeMlpShape& s, const compute_t<T>* weights, const compute_t<T>* rows, T* out) {
  using C = compute_t<T>;
  constexpr int64_t L = Vec<C>::size;
  parallel_ranges(s.tokens, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, s.width * s.top_k)), s.threads,
                  [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int32_t* sources = s.inverse + t * s.top_k;
      T* y = out + t * s.width;
      auto weight = [&](int64_t k) { return weights ? weights[t * s.top_k + k] : C(1); };
      int64_t j = 0;
      for (; j + L <= s.width; j += L) {
        vec_t<C> sum = zero<C>();
        for (int64_t k = 0; k < s.top_k; ++k)
          if (sources[k] >= 0) sum += weight(k) * load(rows + sources[k] * s.width + j);
        store(y + j, sum);
      }
      for (; j < s.width; ++j) {
        C sum = 0;
        for (int64_t k = 0; k < s.top_k; ++k)
          if (sources[k] >= 0) sum = std::fma(weight(k), rows[sources[k] * s.width + j], sum);
        narrow(sum, y + j);
      }
    }
  });
}

// Rows of a block: with H, F in the hundreds its panels stay in L2, and a weight is read once in kMlpRows rows.
constexpr int64_t kMlpRows = 128;

}  // namespace pyfast
