// Panels of bfloat16 pairs for gemm_kernel.h: [panel][steps][W], a step being two neighbours in depth (a zero after the
// last of an odd depth). From bf16 that moves bits, from float each value is rounded once.
#pragma once
#include <algorithm>

#include "bf16_pair.h"
#include "transpose.h"

namespace pyfast {
namespace detail {

// `lanes` x `depth` values of any strides.
template <int W, class T>
void pack_pairs(const T* in, int64_t lane_stride, int64_t depth_stride, int64_t lanes, int64_t depth, bf16_pair* out);

#if defined(__AVX512F__)

PF_INLINE uint16_t bits_of(bf16 value) { return value.bits; }
PF_INLINE uint16_t bits_of(float value) {
  bf16 result;
  narrow(value, &result);
  return result.bits;
}

// The first `count` of 16 values, zeros after them; nothing else is read.
PF_INLINE __m256i first_halves(const bf16* p, int64_t count) {
  return _mm256_maskz_loadu_epi16(__mmask16((1u << count) - 1), p);
}
PF_INLINE __m256i first_halves(const float* p, int64_t count) {
  return rounded(vec_t<float>(_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p)));
}
template <class T>
PF_INLINE __m256i halves_upto(const T* p, int64_t count) {
  return count >= 16 ? halves(p) : first_halves(p, std::max<int64_t>(count, 0));
}

// Lanes whose depth is contiguous: lane(i) -> const T*.
template <int W, class T, class Lane>
void pack_deep_pairs(Lane&& lane, int lanes, int64_t depth, bf16_pair* out) {
  constexpr int kSteps = 16;
  alignas(64) float square[W * kSteps], turned[W * kSteps];  // bits of pairs: moved, never computed with
  std::fill(square + lanes * kSteps, square + W * kSteps, 0.f);
  const T* source[W];
  for (int i = 0; i < lanes; ++i) source[i] = lane(i);
  for (int64_t k = 0; k < depth; k += 2 * kSteps, out += kSteps * W) {
    const int64_t count = depth - k, steps = std::min<int64_t>(kSteps, (count + 1) / 2);
    for (int i = 0; i < lanes; ++i) {
      const T* p = source[i] + k;
      const __m256i low = halves_upto(p, count), high = halves_upto(p + (count > 16 ? 16 : 0), count - 16);
      _mm512_store_si512(square + i * kSteps, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
    }
    float* target = steps == kSteps ? reinterpret_cast<float*>(out) : turned;
    if constexpr (W % 16 == 0) {
      for (int i = 0; i < W; i += 16) transpose_square(square + i * kSteps, kSteps, target + i, W);
    } else {
      for (int j = 0; j < kSteps; j += 4)
        for (int i = 0; i < W; i += 4) transpose4<W>(square + i * kSteps + j, kSteps, target + j * W + i);
    }
    if (target == turned) std::memcpy(static_cast<void*>(out), turned, size_t(steps) * W * sizeof(*out));
  }
}

// Lanes that are contiguous: row(k) -> const T* gives all of them at depth k. Panels lie `panel_stride` apart.
template <int W, class T, class Row>
void pack_wide_pairs(Row&& row, int64_t lanes, int64_t depth, bf16_pair* out, int64_t panel_stride) {
  constexpr int64_t kAhead = 4;
  for (int64_t k = 0; k < depth; k += 2, out += W) {
    const T *first = row(k), *second = k + 1 < depth ? row(k + 1) : nullptr;
    for (int64_t next = k + kAhead; next < std::min(depth, k + kAhead + 2); ++next) {
      const T* ahead = row(next);
      for (int64_t i = 0; i < lanes; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(ahead + i);
    }
    bf16_pair* panel = out;
    for (int64_t i = 0; i < lanes; i += W, panel += panel_stride)
#pragma GCC unroll 2
      for (int j = 0; j < W; j += 16) {
        const int64_t count = std::min<int64_t>(lanes - i - j, W - j);
        const int64_t from = count > 0 ? i + j : 0;
        const __m256i low = halves_upto(first + from, count);
        const __m256i high = second ? halves_upto(second + from, count) : _mm256_setzero_si256();
        if (W - j >= 16)
          _mm512_storeu_si512(panel + j, pairs_of(low, high));
        else
          _mm512_mask_storeu_epi32(panel + j, __mmask16((1u << ((W - j) & 15)) - 1), pairs_of(low, high));
      }
  }
}

template <int W, class T>
void pack_pairs(const T* in, int64_t lane_stride, int64_t depth_stride, int64_t lanes, int64_t depth, bf16_pair* out) {
  const int64_t steps = (depth + 1) / 2;
  if (lane_stride == 1 && depth_stride != 1) {
    pack_wide_pairs<W, T>([&](int64_t k) { return in + k * depth_stride; }, lanes, depth, out, steps * W);
    return;
  }
  for (int64_t first = 0; first < lanes; first += W, out += W * steps) {
    const T* panel = in + first * lane_stride;
    const int count = int(std::min<int64_t>(W, lanes - first));
    if (depth_stride == 1) {
      pack_deep_pairs<W, T>([&](int i) { return panel + i * lane_stride; }, count, depth, out);
      continue;
    }
    for (int64_t k = 0; k < steps; ++k)
      for (int i = 0; i < W; ++i) {
        const T* p = panel + i * lane_stride + 2 * k * depth_stride;
        const uint32_t low = i < count ? bits_of(p[0]) : 0;
        const uint32_t high = i < count && 2 * k + 1 < depth ? bits_of(p[depth_stride]) : 0;
        out[k * W + i].bits = low | high << 16;
      }
  }
}

#endif

}  // namespace detail
}  // namespace pyfast
