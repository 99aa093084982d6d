// Rotary position embedding (Su et al. 2021), half-split: channel j turns with channel j + half.
//
//   y_j        = x_j cos_j - x_{j+half} sin_j
//   y_{j+half} = x_{j+half} cos_j + x_j sin_j        channels from 2 half on are copied
//
// The inverse (sin negated) is the gradient of the forward.
#include "parallel.h"
#include "simd.h"

namespace pyfast {
namespace {

constexpr int64_t kGrain = 16384;  // elements a thread should at least have

template <class T>
PF_INLINE void rotate_head(const T* x, T* y, const compute_t<T>* cos, const compute_t<T>* sin, compute_t<T> sign,
                           int64_t half, int64_t width) {
  using C = compute_t<T>;
  constexpr int L = Vec<C>::size;
  int64_t j = 0;
  for (; j + L <= half; j += L) {
    const vec_t<C> a = load(x + j), b = load(x + half + j), c = load(cos + j), s = load(sin + j) * sign;
    store(y + j, a * c - b * s);
    store(y + half + j, b * c + a * s);
  }
  for (; j < half; ++j) {
    const C a = widen(x[j]), b = widen(x[half + j]), c = cos[j], s = sin[j] * sign;
    narrow(a * c - b * s, y + j);
    narrow(b * c + a * s, y + half + j);
  }
  std::copy(x + 2 * half, x + width, y + 2 * half);
}

template <class T>
void rotate(const Rotary& a) {
  using C = compute_t<T>;
  const C sign = a.inverse ? C(-1) : C(1);
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, a.heads * a.width));
  parallel_ranges(a.batch * a.length, grain, a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t b = token / a.length, s = token % a.length;
      const int64_t position = a.positions ? a.positions[b * a.positions_batch_stride + s] : s;
      const C* cos = static_cast<const C*>(a.cos) + position * a.half;
      const C* sin = static_cast<const C*>(a.sin) + position * a.half;
      const T* x = static_cast<const T*>(a.x) + b * a.x_batch_stride + s * a.x_token_stride;
      T* y = static_cast<T*>(a.y) + token * a.heads * a.width;
      for (int64_t head = 0; head < a.heads; ++head)
        rotate_head(x + head * a.x_head_stride, y + head * a.width, cos, sin, sign, a.half, a.width);
    }
  });
}

}  // namespace

int64_t rotary(const Rotary& a) {
  if (a.positions) {
    const int64_t count = a.positions_batch_stride ? a.batch * a.length : a.length;
    for (int64_t i = 0; i < count; ++i)
      if (a.positions[i] < 0 || a.positions[i] >= a.table_rows) return i;
  }
  with_dtype(a.dtype, [&](auto* tag) { rotate<std::decay_t<decltype(*tag)>>(a); });
  return -1;
}

}  // namespace pyfast
