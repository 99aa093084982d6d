// Pairs of bfloat16, the operands of AVX512-BF16: one instruction adds the two products of two pairs to a float, exact
// products, twice the rate of fmas. A depth in pairs is half as deep; all else is as with fmas.
//
// Kernels are templates by what their operands are made of: E, either C itself or bf16_pair. The library is compiled for
// AVX-512 without BF16, so pairs are for where bfloat16_dot() says that the processor has it.
#pragma once
#include "parallel.h"
#include "simd.h"

namespace pyfast {

struct bf16_pair {
  uint32_t bits;  // the lower half comes first
};

template <class C, class E>
constexpr int kValues = std::is_same_v<E, bf16_pair> ? 2 : 1;  // of C that an E stands for

// The dtype that sums of products of E are kept in.
template <class E>
using sum_t = std::conditional_t<std::is_same_v<E, bf16_pair>, float, E>;

#if defined(__AVX512F__)
constexpr bool kHasPairs = true;
#else
constexpr bool kHasPairs = false;
#endif

inline bool bfloat16_dot() { return kHasPairs && g_runtime && g_runtime->bfloat16_dot; }

// Overloads, not templates: bf16_pair has no vector type of its own.
PF_INLINE vec_t<float> operands(const float* p) { return load(p); }
PF_INLINE vec_t<double> operands(const double* p) { return load(p); }
PF_INLINE vec_t<float> repeated(const float* p) { return broadcast<float>(*p); }
PF_INLINE vec_t<double> repeated(const double* p) { return broadcast<double>(*p); }
template <class C>
PF_INLINE void add_products(vec_t<C>& sum, const vec_t<C>& a, const vec_t<C>& b) {
  sum += a * b;
}

#if defined(__AVX512F__)
PF_INLINE __m512i operands(const bf16_pair* p) { return _mm512_loadu_si512(p); }
PF_INLINE __m512i repeated(const bf16_pair* p) {
  int32_t bits;
  std::memcpy(&bits, p, 4);  // may be two values of a row that starts anywhere
  return _mm512_set1_epi32(bits);
}
template <class C>
PF_INLINE void add_products(vec_t<float>& sum, const __m512i& a, const __m512i& b) {
  // As assembly: the rest of the library must run without AVX512-BF16, and is compiled so.
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(b), "v"(a));
}

// Halves of pairs (16 bf16 each) to pairs.
PF_INLINE __m512i pairs_of(__m256i first, __m256i second) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(first), _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
}

PF_INLINE __m256i rounded(vec_t<float> value) {
  __m256i result;
  asm("vcvtneps2bf16 %1, %0" : "=v"(result) : "v"(value));
  return result;
}

PF_INLINE vec_t<float> widened(__m256i values) {
  return vec_t<float>(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16)));
}

// 16 values as bf16, from a whole vector or from the first `count`, zeros after them.
PF_INLINE __m256i halves(const bf16* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
PF_INLINE __m256i halves(const float* p) { return rounded(load(p)); }
template <class T>
PF_INLINE __m256i halves(const T* p, int64_t count) {
  alignas(64) T part[16] = {};
  std::memcpy(part, p, size_t(count) * sizeof(T));
  return halves(part);
}
#endif

}  // namespace pyfast
