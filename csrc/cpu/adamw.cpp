// AdamW (Loshchilov and Hutter 2019) over flat memory: one pass, every value read once and written once.
//
//   g = grad_scale grad;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
//   w = w - (decay w + step_size m / (sqrt(v) inverse_root_bias + eps))
//
// with decay = lr weight_decay, step_size = lr / (1 - beta1^t), inverse_root_bias = (1 - beta2^t)^(-1/2), computed in
// double by the caller. A value's bits depend on its own inputs only: every value, the last partial vector too, goes
// through the one compiled loop in update(), so a flat buffer may be cut anywhere and given to any number of threads.
#include <cstring>

#include "parallel.h"
#include "simd.h"

namespace pyfast {
namespace {

constexpr int64_t kGrain = 16384;  // elements a thread should at least have

template <class C>
PF_INLINE vec_t<C> square_root(vec_t<C> x) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<C, float>) return vec_t<C>(_mm512_sqrt_ps(__m512(x)));
  else return vec_t<C>(_mm512_sqrt_pd(__m512d(x)));
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<C, float>) return vec_t<C>(_mm256_sqrt_ps(__m256(x)));
  else return vec_t<C>(_mm256_sqrt_pd(__m256d(x)));
#else
  for (int i = 0; i < Vec<C>::size; ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

// a * b + c, rounded once where the machine has an fma. Written out where c is a product too: of two products compilers
// fuse either one, and a choice that differs between the instances of update() would be a difference in the bits.
template <class C>
PF_INLINE vec_t<C> multiply_add(vec_t<C> a, vec_t<C> b, vec_t<C> c) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<C, float>) return vec_t<C>(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
  else return vec_t<C>(_mm512_fmadd_pd(__m512d(a), __m512d(b), __m512d(c)));
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<C, float>) return vec_t<C>(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
  else return vec_t<C>(_mm256_fmadd_pd(__m256d(a), __m256d(b), __m256d(c)));
#elif defined(__ARM_FEATURE_FMA)
  for (int i = 0; i < Vec<C>::size; ++i) c[i] = std::fma(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

// P: storage of the parameter, G: of the gradient. `master` holds the weights in C, or is null: then param does.
template <class P, class G>
struct Arrays {
  using C = compute_t<P>;
  P* param;
  const G* grad;
  C* exp_avg;
  C* exp_avg_sq;
  C* master;
};

// size is a multiple of the vector's length.
template <class P, class G, bool kMaster>
__attribute__((noinline)) void update(const Arrays<P, G>& a, int64_t size, const AdamW& s) {
  using C = compute_t<P>;
  constexpr int L = Vec<C>::size;
  const C beta1 = s.beta1, rest1 = 1.0 - s.beta1, beta2 = s.beta2, rest2 = 1.0 - s.beta2;
  const C decay = s.decay, step_size = s.step_size, inverse_root_bias = s.inverse_root_bias, eps = s.eps;
  const C grad_scale = s.grad_scale;
  for (int64_t i = 0; i < size; i += L) {
    const vec_t<C> g = load(a.grad + i) * grad_scale;
    const vec_t<C> m = multiply_add<C>(load(a.exp_avg + i), broadcast<C>(beta1), g * rest1);
    const vec_t<C> v = multiply_add<C>(load(a.exp_avg_sq + i), broadcast<C>(beta2), g * (g * rest2));
    vec_t<C> w;
    if constexpr (kMaster)
      w = load(a.master + i);
    else
      w = load(a.param + i);
    // Not (1 - decay) w: rounding that factor would change a small decay by percents.
    w -= w * decay + m * step_size / (square_root<C>(v) * inverse_root_bias + eps);
    store(a.exp_avg + i, m);
    store(a.exp_avg_sq + i, v);
    if constexpr (kMaster) store(a.master + i, w);
    store(a.param + i, w);
  }
}

template <class P, class G, bool kMaster>
void update_range(const Arrays<P, G>& a, int64_t size, const AdamW& s) {
  using C = compute_t<P>;
  constexpr int L = Vec<C>::size;
  const int64_t tail = size % L, whole = size - tail;
  update<P, G, kMaster>(a, whole, s);
  if (!tail) return;
  P param[L] = {};
  G grad[L] = {};
  C exp_avg[L] = {}, exp_avg_sq[L] = {}, master[L] = {};
  std::memcpy(param, a.param + whole, tail * sizeof(P));
  std::memcpy(grad, a.grad + whole, tail * sizeof(G));
  std::memcpy(exp_avg, a.exp_avg + whole, tail * sizeof(C));
  std::memcpy(exp_avg_sq, a.exp_avg_sq + whole, tail * sizeof(C));
  if (kMaster) std::memcpy(master, a.master + whole, tail * sizeof(C));
  update<P, G, kMaster>({param, grad, exp_avg, exp_avg_sq, master}, L, s);
  std::memcpy(a.param + whole, param, tail * sizeof(P));
  std::memcpy(a.exp_avg + whole, exp_avg, tail * sizeof(C));
  std::memcpy(a.exp_avg_sq + whole, exp_avg_sq, tail * sizeof(C));
  if (kMaster) std::memcpy(a.master + whole, master, tail * sizeof(C));
}

template <class P, class G>
void run(const AdamW& s) {
  using C = compute_t<P>;
  parallel_ranges(s.size, kGrain, s.threads, [&](int64_t begin, int64_t end) {
    C* master = static_cast<C*>(s.master);
    Arrays<P, G> a{static_cast<P*>(s.param) + begin, static_cast<const G*>(s.grad) + begin,
                   static_cast<C*>(s.exp_avg) + begin, static_cast<C*>(s.exp_avg_sq) + begin,
                   master ? master + begin : nullptr};
    if constexpr (!std::is_same_v<P, C>) {
      if (master) return update_range<P, G, true>(a, end - begin, s);
    }
    update_range<P, G, false>(a, end - begin, s);
  });
}

}  // namespace

void adamw(const AdamW& s) {
  with_dtype(s.dtype, [&](auto* tag) {
    using P = std::decay_t<decltype(*tag)>;
    if (s.grad_is_wide)
      run<P, compute_t<P>>(s);
    else
      run<P, P>(s);
  });
}

}  // namespace pyfast
