// Elementary functions on SIMD vectors, float and double.
//
//   exp(x)   relative error <= 2e-7 (float), <= 1 unit in the last place or so (double); exp(-inf) = 0,
//            overflow is +inf, subnormal results are right, NaN stays NaN.
#pragma once
#include "simd.h"

namespace pyfast {
namespace detail {

template <class C>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  using int_type = int_vec;
  static constexpr float lowest = -104.0f, highest = 89.0f;      // beyond: 0, inf
  static constexpr float round_magic = 12582912.0f;              // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  static constexpr int mantissa_bits = 23, exponent_bias = 127;
  // (e^r - 1 - r) / r^2 on [-ln2/2, ln2/2], highest power first (the coefficients of Cephes' expf).
  static constexpr float polynomial[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                         4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
};

template <>
struct ExpConstants<double> {
  using int_type = long_vec;
  static constexpr double lowest = -746.0, highest = 710.0;
  static constexpr double round_magic = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double ln2_high = 6.93145751953125e-1, ln2_low = 1.42860682030941723212e-6;
  static constexpr int mantissa_bits = 52, exponent_bias = 1023;
  // 1/13!, 1/12!, ... 1/2!: the first term left out is below 1e-17 of the result.
  static constexpr double polynomial[] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0,
                                          1.0 / 362880.0,     1.0 / 40320.0,     1.0 / 5040.0,     1.0 / 720.0,
                                          1.0 / 120.0,        1.0 / 24.0,        1.0 / 6.0,        1.0 / 2.0};
};

template <class C, class Int>
PF_INLINE vec_t<C> power_of_two(Int exponent) {
  Int bits = (exponent + ExpConstants<C>::exponent_bias) << ExpConstants<C>::mantissa_bits;
  vec_t<C> result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

}  // namespace detail

template <class C>
PF_INLINE vec_t<C> exp(vec_t<C> x) {
  using K = detail::ExpConstants<C>;
  using Int = typename K::int_type;
  const vec_t<C> lowest = broadcast<C>(K::lowest), highest = broadcast<C>(K::highest);
  const vec_t<C> magic = broadcast<C>(K::round_magic);
  x = lowest > x ? lowest : x;  // a NaN compares false and stays
  x = highest < x ? highest : x;

  // x = n ln2 + r; the low bits of n + magic hold n as an integer.
  const vec_t<C> shifted = x * C(1.44269504088896340736) + magic;
  const vec_t<C> n = shifted - magic;
  const vec_t<C> r = (x - n * K::ln2_high) - n * K::ln2_low;

  vec_t<C> p = broadcast<C>(K::polynomial[0]);
  constexpr int terms = sizeof(K::polynomial) / sizeof(C);
#pragma GCC unroll 16
  for (int i = 1; i < terms; ++i) p = p * r + K::polynomial[i];
  p = p * (r * r) + r + C(1);

  // 2^n in two factors: one alone would leave the exponent's range where the result is subnormal or overflows.
  Int n_bits, magic_bits;
  std::memcpy(&n_bits, &shifted, sizeof(n_bits));
  std::memcpy(&magic_bits, &magic, sizeof(magic_bits));
  const Int whole = n_bits - magic_bits, half = whole >> 1;
  return p * detail::power_of_two<C>(half) * detail::power_of_two<C>(Int(whole - half));
}

}  // namespace pyfast
