// SwiGLU (Shazeer 2020), forward and backward; s = 1 / (1 + e^-gate).
//
// forward   y = gate s up
// backward  dgate = dy up s (1 + gate (1 - s)),  dup = dy gate s
//
// The last, partial vector of a row goes through the same code in padded buffers: one formula, one exp.
#include <cstring>

#include "parallel.h"
#include "vector_math.h"

namespace pyfast {
namespace {

constexpr int64_t kGrain = 8192;  // elements a thread should at least have

template <class T>
PF_INLINE void forward_vector(const T* gate, const T* up, T* y) {
  using C = compute_t<T>;
  const vec_t<C> g = load(gate);
  store(y, g / (C(1) + exp<C>(-g)) * load(up));
}

template <class T>
PF_INLINE void backward_vector(const T* dy, const T* gate, const T* up, T* dgate, T* dup) {
  using C = compute_t<T>;
  const vec_t<C> g = load(gate), d = load(dy);
  const vec_t<C> s = C(1) / (C(1) + exp<C>(-g));
  const vec_t<C> silu = g * s;
  store(dgate, d * load(up) * (s + silu * (C(1) - s)));
  store(dup, d * silu);
}

template <class T>
void forward(const SwigluForward& a) {
  constexpr int L = Vec<compute_t<T>>::size;
  const int64_t tail = a.width % L, whole = a.width - tail;
  parallel_ranges(a.rows, std::max<int64_t>(1, kGrain / a.width), a.threads, [&](int64_t begin, int64_t end) {
    T g[L] = {}, u[L] = {}, out[L];
    for (int64_t row = begin; row < end; ++row) {
      const T* gate = static_cast<const T*>(a.gate) + row * a.gate_stride;
      const T* up = static_cast<const T*>(a.up) + row * a.up_stride;
      T* y = static_cast<T*>(a.y) + row * a.width;
      for (int64_t j = 0; j < whole; j += L) forward_vector(gate + j, up + j, y + j);
      if (!tail) continue;
      std::memcpy(g, gate + whole, tail * sizeof(T));
      std::memcpy(u, up + whole, tail * sizeof(T));
      forward_vector(g, u, out);
      std::memcpy(y + whole, out, tail * sizeof(T));
    }
  });
}

template <class T>
void backward(const SwigluBackward& a) {
  constexpr int L = Vec<compute_t<T>>::size;
  const int64_t tail = a.width % L, whole = a.width - tail;
  parallel_ranges(a.rows, std::max<int64_t>(1, kGrain / a.width), a.threads, [&](int64_t begin, int64_t end) {
    T d[L] = {}, g[L] = {}, u[L] = {}, dg[L], du[L];
    for (int64_t row = begin; row < end; ++row) {
      const T* dy = static_cast<const T*>(a.dy) + row * a.dy_stride;
      const T* gate = static_cast<const T*>(a.gate) + row * a.gate_stride;
      const T* up = static_cast<const T*>(a.up) + row * a.up_stride;
      T* dgate = static_cast<T*>(a.dgate) + row * a.d_stride;
      T* dup = static_cast<T*>(a.dup) + row * a.d_stride;
      for (int64_t j = 0; j < whole; j += L) backward_vector(dy + j, gate + j, up + j, dgate + j, dup + j);
      if (!tail) continue;
      std::memcpy(d, dy + whole, tail * sizeof(T));
      std::memcpy(g, gate + whole, tail * sizeof(T));
      std::memcpy(u, up + whole, tail * sizeof(T));
      backward_vector(d, g, u, dg, du);
      std::memcpy(dgate + whole, dg, tail * sizeof(T));
      std::memcpy(dup + whole, du, tail * sizeof(T));
    }
  });
}

}  // namespace

void swiglu_forward(const SwigluForward& a) {
  if (a.width == 0) return;
  with_dtype(a.dtype, [&](auto* tag) { forward<std::decay_t<decltype(*tag)>>(a); });
}

void swiglu_backward(const SwigluBackward& a) {
  if (a.width == 0) return;
  with_dtype(a.dtype, [&](auto* tag) { backward<std::decay_t<decltype(*tag)>>(a); });
}

}  // namespace pyfast
