// AdamW (Loshchilov and Hutter 2019) over flat memory: one pass, every value read once and written once.
//
//   g = grad_scale grad;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
//   w = w - (decay w + step_size m / (sqrt(v) inverse_root_bias + eps))
//
// with decay = lr weight_decay, step_size = lr / (1 - beta1^t), inverse_root_bias = (1 - beta2^t)^(-1/2), computed in
// double by the caller. A value's bits depend on its own inputs only: every value, the last partial vector too, goes
// through the one compiled loop in update(), so a flat buffer may be cut anywhere and given to any number of threads.
//
// Moments may be bf16: half of what moves. Rounded to nearest they would stop moving (a change of v by 5 % of g^2 is
// often less than half a bf16 step), so they are rounded up or down at random, with the chances that keep the mean. The
// random bits are a hash of the value's place in the whole buffer: they do not depend on threads or cuts either.
#include <cstring>

#include "parallel.h"
#include "simd.h"

namespace pyfast {
namespace {

constexpr int64_t kGrain = 16384;  // elements a thread should at least have
// Elements fetched ahead: of four or five streams the processor's own prefetchers do not keep up with each.
constexpr int64_t kAhead = 128;

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

uint64_t splitmix64(uint64_t x) {  // Steele et al. 2014
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// 32 random bits for each of the values at `low`, low + 1, ..., the low halves of indices with one high half: `keys` is a
// hash of that. The finalizer of MurmurHash3 (Appleby) with a key before and one in the middle.
PF_INLINE uint_vec random_bits(uint32_t low, uint64_t keys) {
  uint_vec lane;
  for (int i = 0; i < Vec<float>::size; ++i) lane[i] = uint32_t(i);
  uint_vec x = (lane + low) ^ uint32_t(keys);
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = ((x ^ (x >> 13)) + uint32_t(keys >> 32)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

// Store with 16 random bits added below the kept bits. What bf16 holds exactly, infinities among it, stays; NaN stays NaN.
PF_INLINE void store_randomly(bf16* target, vec_t<float> value, uint_vec random) {
  uint_vec bits;
  std::memcpy(&bits, &value, sizeof(bits));
  // not to NaN, which could become anything; one that arithmetic made is quiet, so that its upper half is NaN too
  bits = value == value ? bits + random : bits;
  store_upper_halves(target, bits >> 16);
}

// P: storage of the parameter, G: of the gradient, M: of the moments. `master` holds the weights in C, or is null: then param does.
template <class P, class G, class M>
struct Arrays {
  using C = compute_t<P>;
  P* param;
  const G* grad;
  M* exp_avg;
  M* exp_avg_sq;
  C* master;
  uint32_t first;  // low half of the first value's index
  uint64_t keys;   // for indices with its high half, which all have
};

// size is a multiple of the vector's length.
template <class P, class G, class M, bool kMaster>
__attribute__((noinline)) void update(const Arrays<P, G, M>& a, int64_t size, const AdamW& s) {
  using C = compute_t<P>;
  constexpr int L = Vec<C>::size;
  const C beta1 = s.beta1, rest1 = 1.0 - s.beta1, beta2 = s.beta2, rest2 = 1.0 - s.beta2;
  const C decay = s.decay, step_size = s.step_size, inverse_root_bias = s.inverse_root_bias, eps = s.eps;
  const C grad_scale = s.grad_scale;
  for (int64_t i = 0; i < size; i += L) {
    __builtin_prefetch(a.grad + i + kAhead, 0);
    __builtin_prefetch(a.exp_avg + i + kAhead, 1);
    __builtin_prefetch(a.exp_avg_sq + i + kAhead, 1);
    if constexpr (kMaster)
      __builtin_prefetch(a.master + i + kAhead, 1);
    else
      __builtin_prefetch(a.param + i + kAhead, 1);
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
    if constexpr (std::is_same_v<M, C>) {
      store(a.exp_avg + i, m);
      store(a.exp_avg_sq + i, v);
    } else {
      const uint_vec random = random_bits(a.first + uint32_t(i), a.keys);
      store_randomly(a.exp_avg + i, m, random & 0xffffu);
      store_randomly(a.exp_avg_sq + i, v, random >> 16);
    }
    if constexpr (kMaster) store(a.master + i, w);
    store(a.param + i, w);
  }
}

template <class P, class G, class M, bool kMaster>
void update_range(const Arrays<P, G, M>& a, int64_t size, const AdamW& s) {
  using C = compute_t<P>;
  constexpr int L = Vec<C>::size;
  const int64_t tail = size % L, whole = size - tail;
  update<P, G, M, kMaster>(a, whole, s);
  if (!tail) return;
  P param[L] = {};
  G grad[L] = {};
  M exp_avg[L] = {}, exp_avg_sq[L] = {};
  C master[L] = {};
  std::memcpy(param, a.param + whole, tail * sizeof(P));
  std::memcpy(grad, a.grad + whole, tail * sizeof(G));
  std::memcpy(exp_avg, a.exp_avg + whole, tail * sizeof(M));
  std::memcpy(exp_avg_sq, a.exp_avg_sq + whole, tail * sizeof(M));
  if (kMaster) std::memcpy(master, a.master + whole, tail * sizeof(C));
  update<P, G, M, kMaster>({param, grad, exp_avg, exp_avg_sq, master, a.first + uint32_t(whole), a.keys}, L, s);
  std::memcpy(a.param + whole, param, tail * sizeof(P));
  std::memcpy(a.exp_avg + whole, exp_avg, tail * sizeof(M));
  std::memcpy(a.exp_avg_sq + whole, exp_avg_sq, tail * sizeof(M));
  if (kMaster) std::memcpy(a.master + whole, master, tail * sizeof(C));
}

// Index of the value at `position`; shortens *end to where its run of indices ends, or their high half changes.
uint64_t index_of(const AdamW& s, int64_t position, int64_t* end) {
  const int64_t place = s.first + position;
  const auto keep_high_half = [&](uint64_t index) {
    *end = int64_t(std::min<uint64_t>(*end - position, (uint64_t(1) << 32) - uint32_t(index))) + position;
    return index;
  };
  if (!s.places) return keep_high_half(uint64_t(place));
  int64_t low = 0, high = s.place_count;  // the last start <= place lies in [low, high)
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (s.places[2 * middle] <= place ? low : high) = middle;
  }
  if (high < s.place_count) *end = std::min(*end, s.places[2 * high] - s.first);
  return keep_high_half(uint64_t(s.places[2 * low + 1] + (place - s.places[2 * low])));
}

template <class P, class G, class M>
void run(const AdamW& s) {
  using C = compute_t<P>;
  parallel_ranges(s.size, kGrain, s.threads, [&](int64_t begin, int64_t end) {
    for (int64_t from = begin, to; from < end; from = to) {
      to = end;
      const uint64_t index = std::is_same_v<M, C> ? 0 : index_of(s, from, &to);
      C* master = static_cast<C*>(s.master);
      Arrays<P, G, M> a{static_cast<P*>(s.param) + from, static_cast<const G*>(s.grad) + from,
                        static_cast<M*>(s.exp_avg) + from, static_cast<M*>(s.exp_avg_sq) + from,
                        master ? master + from : nullptr, uint32_t(index),
                        splitmix64(s.key ^ (index >> 32))};
      if (master && !std::is_same_v<P, C>)
        update_range<P, G, M, !std::is_same_v<P, C>>(a, to - from, s);
      else
        update_range<P, G, M, false>(a, to - from, s);
    }
  });
}

}  // namespace

void adamw(const AdamW& s) {
  with_dtype(s.dtype, [&](auto* tag) {
    using P = std::decay_t<decltype(*tag)>;
    using C = compute_t<P>;
    if constexpr (std::is_same_v<C, float>) {
      if (s.moments_are_bf16) return s.grad_is_wide ? run<P, C, bf16>(s) : run<P, P, bf16>(s);
    }
    if (s.grad_is_wide)
      run<P, C, C>(s);
    else
      run<P, P, C>(s);
  });
}

}  // namespace pyfast
