// Rows of any dtype and alignment: widened to the type that sums are kept in, moved 16 bytes at a time where they can be.
#pragma once
#include "launch.h"

template <class T>
struct Sum {
  using type = float;
};
template <>
struct Sum<double> {
  using type = double;
};
template <class T>
using sum_t = typename Sum<T>::type;

__device__ inline float widen(float value) { return value; }
__device__ inline double widen(double value) { return value; }
__device__ inline float widen(__half value) { return __half2float(value); }
__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

// Rounds to the nearest, ties to even.
__device__ inline void narrow(float value, float* out) { *out = value; }
__device__ inline void narrow(double value, double* out) { *out = value; }
__device__ inline void narrow(float value, __half* out) { *out = __float2half_rn(value); }
__device__ inline void narrow(float value, __nv_bfloat16* out) { *out = __float2bfloat16_rn(value); }

// V neighbouring values, read and written by one instruction.
template <class T, int V>
struct alignas(sizeof(T) * V) Pack {
  T value[V];
};

template <int V, class T>
__device__ inline Pack<T, V> load(const T* source) {
  return *reinterpret_cast<const Pack<T, V>*>(source);
}
template <int V, class T>
__device__ inline void store(T* target, const Pack<T, V>& pack) {
  *reinterpret_cast<Pack<T, V>*>(target) = pack;
}

// Whether rows of `width` elements, `stride` apart from `base` on, can be moved 16 bytes at a time.
template <class T>
bool aligned(const void* base, int64_t width, int64_t stride) {
  return base == nullptr || (reinterpret_cast<uintptr_t>(base) | uintptr_t(width * sizeof(T)) |
                             uintptr_t(stride * sizeof(T))) % 16 == 0;
}

// Calls body with a null pointer of the element type for a DType of csrc/kernels.h.
template <class Body>
void with_dtype(int dtype, Body&& body) {
  switch (dtype) {
    case 0: return body(static_cast<float*>(nullptr));
    case 1: return body(static_cast<double*>(nullptr));
    case 2: return body(static_cast<__nv_bfloat16*>(nullptr));
    case 3: return body(static_cast<__half*>(nullptr));
  }
}
