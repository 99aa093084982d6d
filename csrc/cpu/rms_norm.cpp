// RMSNorm (Zhang and Sennrich 2019), forward and backward.
//
// forward   y_j = x_j r w_j,  r = (mean(x^2) + eps)^(-1/2)
// backward  dx_j = r (w_j dy_j - x_j r^2 / H * sum_i dy_i w_i x_i),  dw_j = sum_rows dy_j x_j r
//
// dw is a sum over rows: rows are cut into a number of blocks that depends on the shape only, each block sums its rows
// in order, and the blocks are added in order, so the bits do not depend on the number of threads.
#include <memory>

#include "parallel.h"
#include "simd.h"

namespace pyfast {
namespace {

constexpr int64_t kGrain = 16384;  // elements a thread should at least have

template <class T>
void forward(const RmsNormForward& a) {
  using C = compute_t<T>;
  constexpr int L = Vec<C>::size;
  const T* weight = static_cast<const T*>(a.weight);
  parallel_ranges(a.rows, std::max<int64_t>(1, kGrain / a.width), a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
      T* y = static_cast<T*>(a.y) + row * a.width;
      vec_t<C> s0 = zero<C>(), s1 = zero<C>();
      int64_t j = 0;
      for (; j + 2 * L <= a.width; j += 2 * L) {
        vec_t<C> x0 = load(x + j), x1 = load(x + j + L);
        s0 += x0 * x0;
        s1 += x1 * x1;
      }
      C sum = horizontal_sum<C>(s0 + s1);
      for (; j < a.width; ++j) sum += C(widen(x[j])) * C(widen(x[j]));
      const C r = C(1) / std::sqrt(sum / C(a.width) + C(a.eps));
      if (a.rstd) static_cast<C*>(a.rstd)[row] = r;
      for (j = 0; j + L <= a.width; j += L) store(y + j, load(x + j) * r * load(weight + j));
      for (; j < a.width; ++j) narrow(C(widen(x[j])) * r * C(widen(weight[j])), y + j);
    }
  });
}

template <class T>
void backward_rows(const RmsNormBackward& a, int64_t begin, int64_t end, compute_t<T>* dweight) {
  using C = compute_t<T>;
  constexpr int L = Vec<C>::size;
  const T* weight = static_cast<const T*>(a.weight);
  if (dweight) std::fill(dweight, dweight + a.width, C(0));
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    const T* dy = static_cast<const T*>(a.dy) + row * a.dy_stride;
    const C r = static_cast<const C*>(a.rstd)[row];
    vec_t<C> s = zero<C>();
    int64_t j = 0;
    for (; j + L <= a.width; j += L) {
      vec_t<C> xv = load(x + j), g = load(dy + j);
      if (dweight) store(dweight + j, load(dweight + j) + g * xv * r);
      s += g * load(weight + j) * xv;
    }
    C dot = horizontal_sum<C>(s);
    for (; j < a.width; ++j) {
      C xv = widen(x[j]), g = widen(dy[j]);
      if (dweight) dweight[j] += g * xv * r;
      dot += g * C(widen(weight[j])) * xv;
    }
    if (!a.dx) continue;
    T* dx = static_cast<T*>(a.dx) + row * a.width;
    const C scale = r * r * dot / C(a.width);
    for (j = 0; j + L <= a.width; j += L)
      store(dx + j, (load(dy + j) * load(weight + j) - load(x + j) * scale) * r);
    for (; j < a.width; ++j)
      narrow((C(widen(dy[j])) * C(widen(weight[j])) - C(widen(x[j])) * scale) * r, dx + j);
  }
}

template <class T>
void backward(const RmsNormBackward& a) {
  using C = compute_t<T>;
  const int64_t blocks = std::max<int64_t>(1, std::min<int64_t>(64, a.rows * a.width / kGrain));
  std::unique_ptr<C[]> partial(a.dweight ? new C[blocks * a.width] : nullptr);
  parallel_tasks(blocks, a.threads, [&](int64_t block, int) {
    backward_rows<T>(a, a.rows * block / blocks, a.rows * (block + 1) / blocks,
                     partial ? partial.get() + block * a.width : nullptr);
  });
  if (!a.dweight) return;
  C* dweight = static_cast<C*>(a.dweight);
  std::copy(partial.get(), partial.get() + a.width, dweight);
  for (int64_t block = 1; block < blocks; ++block)
    for (int64_t j = 0; j < a.width; ++j) dweight[j] += partial[block * a.width + j];
}

}  // namespace

void rms_norm_forward(const RmsNormForward& a) {
  with_dtype(a.dtype, [&](auto* tag) { forward<std::decay_t<decltype(*tag)>>(a); });
}

void rms_norm_backward(const RmsNormBackward& a) {
  with_dtype(a.dtype, [&](auto* tag) { backward<std::decay_t<decltype(*tag)>>(a); });
}

}  // namespace pyfast
