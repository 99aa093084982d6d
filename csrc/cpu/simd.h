// One SIMD vocabulary for all kernels, written on GCC/Clang vector extensions; the width follows the compiler's flags.
//
//   Vec<float>::type v          the widest vector of the target: 16 (AVX-512), 8 (AVX2), 4 (SSE2, NEON) floats
//   load<float>(p), store(p, v) unaligned; p may point to bf16 / f16 storage: then load widens and store rounds
//   v * a + b                   becomes one fma (compiled with -ffp-contract=fast)
//
// bf16 and f16 exist in memory only: arithmetic is float (double for double), see Compute<T>.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../kernels.h"
#if defined(__F16C__)
#include <immintrin.h>
#endif

#define PF_INLINE inline __attribute__((always_inline))

namespace pyfast {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

template <class T>
struct Compute {
  using type = float;
};
template <>
struct Compute<double> {
  using type = double;
};
template <class T>
using compute_t = typename Compute<T>::type;

template <class C>
struct Vec {
  static constexpr int size = kVectorBytes / sizeof(C);
  typedef C type __attribute__((vector_size(kVectorBytes)));
};
template <class C>
using vec_t = typename Vec<C>::type;

typedef int32_t int_vec __attribute__((vector_size(kVectorBytes)));
typedef uint32_t uint_vec __attribute__((vector_size(kVectorBytes)));
typedef int64_t long_vec __attribute__((vector_size(kVectorBytes)));
typedef uint16_t half_bits __attribute__((vector_size(kVectorBytes / 2)));

template <class C>
PF_INLINE vec_t<C> broadcast(C value) {
  return value - vec_t<C>{};  // value - 0 keeps the sign of zero, unlike value + 0
}
template <class C>
PF_INLINE vec_t<C> zero() {
  return vec_t<C>{};
}

// ---- scalar conversions ---------------------------------------------------------------------------------------------

PF_INLINE float widen(bf16 value) {
  uint32_t bits = uint32_t(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

PF_INLINE float widen(f16 value) {
#if defined(__F16C__)
  return _cvtsh_ss(value.bits);
#else
  uint32_t sign = uint32_t(value.bits & 0x8000u) << 16;
  uint32_t rest = value.bits & 0x7fffu;
  float magnitude;
  if (rest >= 0x7c00u) {  // inf, nan
    uint32_t bits = 0x7f800000u | ((rest & 0x3ffu) << 13);
    std::memcpy(&magnitude, &bits, 4);
  } else {  // shift the exponent by multiplying: right for subnormals too
    uint32_t bits = rest << 13;
    std::memcpy(&magnitude, &bits, 4);
    magnitude *= 0x1p112f;
  }
  uint32_t bits;
  std::memcpy(&bits, &magnitude, 4);
  bits |= sign;
  std::memcpy(&magnitude, &bits, 4);
  return magnitude;
#endif
}

PF_INLINE float widen(float value) { return value; }
PF_INLINE double widen(double value) { return value; }

// Round to nearest even, NaN stays NaN.
PF_INLINE void narrow(float value, bf16* out) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u)
    out->bits = uint16_t((bits >> 16) | 0x40u);
  else
    out->bits = uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

PF_INLINE void narrow(float value, f16* out) {
#if defined(__F16C__)
  out->bits = uint16_t(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
#else
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    out->bits = uint16_t(sign | 0x7e00u);
  } else if (magnitude >= 0x477ff000u) {  // rounds to 65536 or more
    out->bits = uint16_t(sign | 0x7c00u);
  } else if (magnitude < 0x38800000u) {  // subnormal: let the float adder round at 2^-24
    float shifted;
    std::memcpy(&shifted, &magnitude, 4);
    shifted += 0.5f;
    uint32_t sum;
    std::memcpy(&sum, &shifted, 4);
    out->bits = uint16_t(sign | (sum - 0x3f000000u));
  } else {
    uint32_t odd = (magnitude >> 13) & 1u;
    out->bits = uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
  }
#endif
}

PF_INLINE void narrow(float value, float* out) { *out = value; }
PF_INLINE void narrow(double value, double* out) { *out = value; }

// ---- vector loads and stores ----------------------------------------------------------------------------------------

template <class T>
PF_INLINE vec_t<compute_t<T>> load(const T* source) {
  vec_t<compute_t<T>> result;
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
    std::memcpy(&result, source, sizeof(result));
  } else if constexpr (std::is_same_v<T, bf16>) {
    // The intrinsics: GCC 12 widens and narrows generic 16-bit vectors by halves and shuffles.
#if defined(__AVX512F__)
    uint_vec bits = uint_vec(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)))) << 16;
#elif defined(__AVX2__)
    uint_vec bits = uint_vec(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)))) << 16;
#else
    half_bits half;
    std::memcpy(&half, source, sizeof(half));
    uint_vec bits = __builtin_convertvector(half, uint_vec) << 16;
#endif
    std::memcpy(&result, &bits, sizeof(result));
  } else {
#if defined(__AVX512F__)
    __m512 wide = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
    std::memcpy(&result, &wide, sizeof(result));
#elif defined(__F16C__)
    __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
    std::memcpy(&result, &wide, sizeof(result));
#else
    for (int i = 0; i < Vec<float>::size; ++i) result[i] = widen(source[i]);
#endif
  }
  return result;
}

// The low 16 bits of each value, the others of which are 0.
PF_INLINE void store_upper_halves(bf16* target, uint_vec halves) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtepi32_epi16(__m512i(halves)));
#elif defined(__AVX2__)
  __m256i packed = _mm256_packus_epi32(__m256i(halves), __m256i(halves));  // in each 128-bit lane
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 8)));
#else
  half_bits half = __builtin_convertvector(halves, half_bits);
  std::memcpy(target, &half, sizeof(half));
#endif
}

template <class T>
PF_INLINE void store(T* target, vec_t<compute_t<T>> value) {
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
    std::memcpy(target, &value, sizeof(value));
  } else if constexpr (std::is_same_v<T, bf16>) {
    uint_vec bits;
    std::memcpy(&bits, &value, sizeof(bits));
    uint_vec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint_vec quiet = (bits >> 16) | 0x40u;
    auto is_nan = value != value;  // all ones where NaN
    uint_vec nan_mask;
    std::memcpy(&nan_mask, &is_nan, sizeof(nan_mask));
    uint_vec chosen = (quiet & nan_mask) | (rounded & ~nan_mask);
    store_upper_halves(target, chosen);
  } else {
#if defined(__AVX512F__)
    __m512 wide;
    std::memcpy(&wide, &value, sizeof(wide));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    __m256 wide;
    std::memcpy(&wide, &value, sizeof(wide));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < Vec<float>::size; ++i) narrow(value[i], target + i);
#endif
  }
}

// Sum of the lanes, by halves: a fixed order.
template <class C>
PF_INLINE C horizontal_sum(vec_t<C> value) {
  C lanes[Vec<C>::size];
  std::memcpy(lanes, &value, sizeof(lanes));
  for (int half = Vec<C>::size / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

template <class C>
PF_INLINE vec_t<C> select_max(vec_t<C> a, vec_t<C> b) {
  return a > b ? a : b;
}

template <class C>
PF_INLINE C horizontal_max(vec_t<C> value) {
  C lanes[Vec<C>::size];
  std::memcpy(lanes, &value, sizeof(lanes));
  for (int half = Vec<C>::size / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  return lanes[0];
}

// ---- choosing the code for a dtype ----------------------------------------------------------------------------------

// Calls body with a null pointer of the storage type: with_dtype(d, [&](auto* tag) { using T = std::decay_t<decltype(*tag)>; ... })
template <class Body>
PF_INLINE void with_dtype(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::f32: return body(static_cast<float*>(nullptr));
    case DType::f64: return body(static_cast<double*>(nullptr));
    case DType::bf16: return body(static_cast<bf16*>(nullptr));
    case DType::f16: return body(static_cast<f16*>(nullptr));
  }
}

}  // namespace pyfast
