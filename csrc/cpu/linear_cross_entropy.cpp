// The passes over a chunk of logits between the matrix products of the fused linear + cross entropy.
//
// forward   x = softcap tanh(logit / softcap),  lse = m + log sum_j exp(x_j - m),  m = max_j x_j
// backward  dlogit_j = g (exp(x_j - lse) (1 + 2 z lse) - [j = target]) (1 - (x_j / softcap)^2)
//
// A row belongs to one task and is summed in a fixed order: the same bits for any number of threads.
#include "parallel.h"
#include "simd.h"
#include "vector_math.h"

namespace pyfast {
namespace {

constexpr int64_t kGrain = 16384;  // elements a thread should at least have

// body(vector) -> vector for each vector of row[0, cols), the last one filled up with `padding`; results are stored.
template <class C, class Body>
PF_INLINE void update_row(C* row, int64_t cols, C padding, Body&& body) {
  constexpr int L = Vec<C>::size;
  int64_t j = 0;
  for (; j + L <= cols; j += L) store(row + j, body(load(row + j)));
  if (j == cols) return;
  C rest[L];
  std::fill(rest, rest + L, padding);
  std::copy(row + j, row + cols, rest);
  store(rest, body(load(rest)));
  std::copy(rest, rest + (cols - j), row + j);
}

template <class C>
void row_forward(const CrossEntropyRows& a, int64_t r) {
  constexpr C kLowest = -std::numeric_limits<C>::infinity();
  C* row = static_cast<C*>(a.logits) + r * a.stride;
  const C cap = C(a.softcap), inverse_cap = cap > 0 ? C(1) / cap : C(0);
  vec_t<C> top = broadcast<C>(kLowest);
  if (cap > 0)
    update_row<C>(row, a.cols, kLowest, [&](vec_t<C> x) {
      x = tanh<C>(x * inverse_cap) * cap;
      top = select_max<C>(x, top);
      return x;
    });
  else
    update_row<C>(row, a.cols, kLowest, [&](vec_t<C> x) { return top = select_max<C>(x, top), x; });
  const C largest = horizontal_max<C>(top);
  const int64_t target = a.target[r] - a.start;
  const C picked = target >= 0 && target < a.cols ? row[target] : C(0);
  const C reference = largest == kLowest ? C(0) : largest;  // no column, or nothing but -inf: exp gives zeros, lse -inf
  vec_t<C> sum = zero<C>();
  if (a.exponentials) {
    update_row<C>(row, a.cols, kLowest, [&](vec_t<C> x) {
      x = exp<C>(x - reference);
      sum += x;
      return x;
    });
  } else {
    update_row<C>(row, a.cols, kLowest, [&](vec_t<C> x) { return sum += exp<C>(x - reference), x; });
  }
  static_cast<C*>(a.lse)[r] = reference + std::log(horizontal_sum<C>(sum));
  static_cast<C*>(a.picked)[r] = picked;
  static_cast<C*>(a.largest)[r] = reference;
}

template <class C>
void row_gradient(const CrossEntropyGradient& a, int64_t r) {
  C* row = static_cast<C*>(a.logits) + r * a.stride;
  const C lse = static_cast<const C*>(a.lse)[r], grad = a.grad ? static_cast<const C*>(a.grad)[r] : C(1);
  const C slope = grad * (C(1) + C(2 * a.z_loss) * lse);
  const C cap = C(a.softcap), inverse_cap = cap > 0 ? C(1) / cap : C(0);
  const int64_t target = a.target[r] - a.start;
  const bool here = target >= 0 && target < a.cols;
  const C x_target = here ? row[target] : C(0);
  if (a.largest) {
    const C factor = std::exp(static_cast<const C*>(a.largest)[r] - lse) * slope;
    update_row<C>(row, a.cols, C(0), [&](vec_t<C> e) { return e * factor; });
    if (here) row[target] -= grad;
    return;
  }
  update_row<C>(row, a.cols, C(0), [&](vec_t<C> x) {
    const vec_t<C> t = x * inverse_cap;
    return exp<C>(x - lse) * slope * (C(1) - t * t);
  });
  if (here) row[target] -= grad * (C(1) - x_target * inverse_cap * x_target * inverse_cap);
}

template <class C>
void forward(const CrossEntropyRows& a) {
  parallel_ranges(a.rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, a.cols)), a.threads,
                  [&](int64_t begin, int64_t end) {
                    for (int64_t r = begin; r < end; ++r) row_forward<C>(a, r);
                  });
}

template <class C>
void gradient(const CrossEntropyGradient& a) {
  parallel_ranges(a.rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, a.cols)), a.threads,
                  [&](int64_t begin, int64_t end) {
                    for (int64_t r = begin; r < end; ++r) row_gradient<C>(a, r);
                  });
}

}  // namespace

void cross_entropy_rows(const CrossEntropyRows& a) {
  a.dtype == DType::f64 ? forward<double>(a) : forward<float>(a);
}

void cross_entropy_gradient(const CrossEntropyGradient& a) {
  a.dtype == DType::f64 ? gradient<double>(a) : gradient<float>(a);
}

}  // namespace pyfast
