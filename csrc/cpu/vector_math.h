// Elementary functions on the vectors of simd.h: exp2, exp and tanh, for float and double.
//
// 2^x = 2^n 2^f with n = round(x), f in [-1/2, 1/2]: 2^f is a minimax polynomial (relative error 2e-9 in float, 3.4e-18
// in double, so that rounding is all that is left), 2^n is put together from its exponent bits. NaN stays NaN.
#pragma once
#include "simd.h"

namespace pyfast {

constexpr double kLog2E = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;

namespace detail {

template <class C>
struct FloatBits;
template <>
struct FloatBits<float> {
  using ints = int_vec;
  static constexpr int mantissa = 23, bias = 127;
  static constexpr float round = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  static constexpr float least = -150.0f, most = 129.0f;
};
template <>
struct FloatBits<double> {
  using ints = long_vec;
  static constexpr int mantissa = 52, bias = 1023;
  static constexpr double round = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double least = -1080.0, most = 1025.0;
};
template <class C>
using ints_t = typename FloatBits<C>::ints;

// (2^f - 1) / f on [-1/2, 1/2].
template <class C>
PF_INLINE vec_t<C> exp2_slope(vec_t<C> f) {
  vec_t<C> p;
  if constexpr (std::is_same_v<C, float>) {
    p = broadcast<C>(0.00015353362068858489034f);
    p = p * f + 0.0013398874393981390061f;
    p = p * f + 0.0096184373569574205587f;
    p = p * f + 0.055503324711908571697f;
    p = p * f + 0.24022647913636852127f;
    p = p * f + 0.69314720285503164763f;
  } else {
    p = broadcast<C>(4.4347712982003767083e-10);
    p = p * f + 7.0737832485031332991e-9;
    p = p * f + 1.0178199571842137974e-7;
    p = p * f + 1.3215435282308487999e-6;
    p = p * f + 0.000015252733493127489347;
    p = p * f + 0.0001540353045711209086;
    p = p * f + 0.0013333558146774620517;
    p = p * f + 0.0096181291075941200896;
    p = p * f + 0.055504108664820083227;
    p = p * f + 0.2402265069591013126;
    p = p * f + 0.69314718055994532581;
  }
  return p;
}

// The nearest integer to x, as a vector of C and (through *shifted) in the low bits of an integer vector.
template <class C>
PF_INLINE vec_t<C> nearest(vec_t<C> x, ints_t<C>* low_bits) {
  const vec_t<C> shifted = x + FloatBits<C>::round;
  std::memcpy(low_bits, &shifted, sizeof(shifted));
  return shifted - FloatBits<C>::round;
}

// 2^n from n in the low bits (-bias <= n <= bias); n = -bias gives exactly 0.
template <class C>
PF_INLINE vec_t<C> power_of_two(ints_t<C> low_bits) {
  const ints_t<C> bits = (low_bits + FloatBits<C>::bias) << FloatBits<C>::mantissa;
  vec_t<C> result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

// p 2^n for any n in range of `least` and `most`: in two factors, so that neither over- nor underflows.
template <class C>
PF_INLINE vec_t<C> scale_by_power(vec_t<C> p, vec_t<C> n) {
  ints_t<C> half_bits_n, rest_bits;
  const vec_t<C> half = nearest<C>(n * C(0.5), &half_bits_n);
  nearest<C>(n - half, &rest_bits);
  return p * power_of_two<C>(half_bits_n) * power_of_two<C>(rest_bits);
}

template <class C>
PF_INLINE vec_t<C> clamp(vec_t<C> x, C least, C most) {
  x = x < least ? broadcast<C>(least) : x;  // written so that NaN stays
  return x > most ? broadcast<C>(most) : x;
}

}  // namespace detail

// 2^x for x < 127 (1023 in double), what a softmax needs: x below -126.5 (-1022.5) gives exactly 0.
template <class C>
PF_INLINE vec_t<C> exp2_softmax(vec_t<C> x) {
  const C least = -C(detail::FloatBits<C>::bias);
  x = x < least ? broadcast<C>(least) : x;
  detail::ints_t<C> bits;
  const vec_t<C> f = x - detail::nearest<C>(x, &bits);
  return (detail::exp2_slope<C>(f) * f + C(1)) * detail::power_of_two<C>(bits);
}

template <class C>
PF_INLINE vec_t<C> exp2(vec_t<C> x) {
  x = detail::clamp<C>(x, detail::FloatBits<C>::least, detail::FloatBits<C>::most);
  detail::ints_t<C> bits;
  const vec_t<C> n = detail::nearest<C>(x, &bits), f = x - n;
  return detail::scale_by_power<C>(detail::exp2_slope<C>(f) * f + C(1), n);
}

// e^x = 2^n e^r, r = x - n ln 2 with ln 2 in two parts, the first short enough for n * high to be exact.
template <class C>
PF_INLINE vec_t<C> exp(vec_t<C> x) {
  constexpr bool single = std::is_same_v<C, float>;
  constexpr C high = single ? C(0.693359375) : C(6.93147180369123816490e-01);
  constexpr C low = single ? C(-2.12194440054690582e-4) : C(1.90821492927058770002e-10);
  x = detail::clamp<C>(x, detail::FloatBits<C>::least * C(0.7), detail::FloatBits<C>::most * C(0.7));
  detail::ints_t<C> bits;
  const vec_t<C> n = detail::nearest<C>(x * C(kLog2E), &bits);
  const vec_t<C> r = (x - n * high) - n * low;
  const vec_t<C> f = r * C(kLog2E);
  return detail::scale_by_power<C>(detail::exp2_slope<C>(f) * f + C(1), n);
}

// tanh |x| = t / (t + 2), t = e^(2|x|) - 1 = 2^n (2^f - 1) + (2^n - 1): no cancellation near 0.
template <class C>
PF_INLINE vec_t<C> tanh(vec_t<C> x) {
  vec_t<C> y = (x < C(0) ? -x : x) * C(2 * kLog2E);
  y = y > C(60) ? broadcast<C>(C(60)) : y;
  detail::ints_t<C> bits;
  const vec_t<C> f = y - detail::nearest<C>(y, &bits), power = detail::power_of_two<C>(bits);
  const vec_t<C> t = power * (detail::exp2_slope<C>(f) * f) + (power - C(1));
  const vec_t<C> r = t / (t + C(2));
  return x < C(0) ? -r : r;
}

}  // namespace pyfast
