// Transposes of small squares in registers, the inner step of packing and unpacking panels.
#pragma once
#include "simd.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace pyfast {
namespace detail {

// out[i * out_stride + j] = in[j * in_stride + i] for i, j < kSquare.
#if defined(__AVX512F__)
template <class C>
constexpr int64_t kSquare = std::is_same_v<C, float> ? 16 : 4;

inline void transpose_square(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
  __m512 r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(in + i * in_stride);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  auto low = [](__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  auto high = [](__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // r[i + j], 128 bits q: column 4 q + j of rows i ... i + 3
    r[i] = low(t[i], t[i + 2]);
    r[i + 1] = high(t[i], t[i + 2]);
    r[i + 2] = low(t[i + 1], t[i + 3]);
    r[i + 3] = high(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512 even_a = _mm512_shuffle_f32x4(r[j], r[4 + j], 0x88), even_b = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0x88);
    const __m512 odd_a = _mm512_shuffle_f32x4(r[j], r[4 + j], 0xdd), odd_b = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0xdd);
    _mm512_storeu_ps(out + j * out_stride, _mm512_shuffle_f32x4(even_a, even_b, 0x88));
    _mm512_storeu_ps(out + (4 + j) * out_stride, _mm512_shuffle_f32x4(odd_a, odd_b, 0x88));
    _mm512_storeu_ps(out + (8 + j) * out_stride, _mm512_shuffle_f32x4(even_a, even_b, 0xdd));
    _mm512_storeu_ps(out + (12 + j) * out_stride, _mm512_shuffle_f32x4(odd_a, odd_b, 0xdd));
  }
}
#else
template <class C>
constexpr int64_t kSquare = 4;

inline void transpose_square(const float* in, int64_t in_stride, float* out, int64_t out_stride) {
#if defined(__SSE2__)
  __m128 r0 = _mm_loadu_ps(in), r1 = _mm_loadu_ps(in + in_stride);
  __m128 r2 = _mm_loadu_ps(in + 2 * in_stride), r3 = _mm_loadu_ps(in + 3 * in_stride);
  _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
  _mm_storeu_ps(out, r0);
  _mm_storeu_ps(out + out_stride, r1);
  _mm_storeu_ps(out + 2 * out_stride, r2);
  _mm_storeu_ps(out + 3 * out_stride, r3);
#else
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < 4; ++i) out[i * out_stride + j] = in[j * in_stride + i];
#endif
}
#endif
inline void transpose_square(const double* in, int64_t in_stride, double* out, int64_t out_stride) {
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < 4; ++i) out[i * out_stride + j] = in[j * in_stride + i];
}

// out[k * W + lane] = in[lane * in_stride + k] for 4 lanes and 4 values of k.
template <int W>
PF_INLINE void transpose4(const float* in, int64_t in_stride, float* out) {
#if defined(__SSE2__)
  __m128 r0 = _mm_loadu_ps(in), r1 = _mm_loadu_ps(in + in_stride);
  __m128 r2 = _mm_loadu_ps(in + 2 * in_stride), r3 = _mm_loadu_ps(in + 3 * in_stride);
  _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
  _mm_storeu_ps(out, r0);
  _mm_storeu_ps(out + W, r1);
  _mm_storeu_ps(out + 2 * W, r2);
  _mm_storeu_ps(out + 3 * W, r3);
#else
  for (int k = 0; k < 4; ++k)
    for (int lane = 0; lane < 4; ++lane) out[k * W + lane] = in[lane * in_stride + k];
#endif
}
template <int W>
PF_INLINE void transpose4(const double* in, int64_t in_stride, double* out) {
  for (int k = 0; k < 4; ++k)
    for (int lane = 0; lane < 4; ++lane) out[k * W + lane] = in[lane * in_stride + k];
}

}  // namespace detail
}  // namespace pyfast
