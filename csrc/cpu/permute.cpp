// Moving the rows of a mixture of experts: the gather into sorted order, the weighted sum back, and its gradients.
//
// Every result row is written by one task and summed in a fixed order (k ascending, columns by vectors), so results are
// the same bits for any number of threads. There is no scatter: a sum over slots gathers.
#include <algorithm>
#include <cstring>

#include "parallel.h"
#include "scratch.h"
#include "simd.h"

namespace pyfast {
namespace {

constexpr int64_t kGrainBytes = 32768;  // a thread should move at least as much

int64_t grain_of(int64_t row_bytes) { return std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, row_bytes)); }

// The first entry of map that is neither -1 nor in [0, limit), or -1.
int64_t first_outside(const int32_t* map, int64_t size, int64_t limit) {
  constexpr int64_t kBlock = 256;
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const int64_t end = std::min(size, begin + kBlock);
    int32_t outside = 0;
    for (int64_t i = begin; i < end; ++i) outside |= (map[i] < -1) | (map[i] >= limit);
    if (!outside) continue;
    for (int64_t i = begin; i < end; ++i)
      if (map[i] < -1 || map[i] >= limit) return i;
  }
  return -1;
}

// The rows of one token that are summed, dropped slots left out, and their weights.
template <class T>
struct Terms {
  const T** row;
  compute_t<T>* weight;
  int64_t count;
};

template <class T>
PF_INLINE void add_terms(const Terms<T>& terms, T* y, int64_t width) {
  using C = compute_t<T>;
  constexpr int L = Vec<C>::size;
  int64_t j = 0;
  for (; j + 2 * L <= width; j += 2 * L) {
    vec_t<C> a = zero<C>(), b = zero<C>();
    for (int64_t i = 0; i < terms.count; ++i) {
      const vec_t<C> w = broadcast<C>(terms.weight[i]);
      a += w * load(terms.row[i] + j);
      b += w * load(terms.row[i] + j + L);
    }
    store(y + j, a);
    store(y + j + L, b);
  }
  for (; j < width; ++j) {
    C sum = 0;
    for (int64_t i = 0; i < terms.count; ++i) sum += terms.weight[i] * C(widen(terms.row[i][j]));
    narrow(sum, y + j);
  }
}

template <class T>
void sum_rows(const GatherSum& a) {
  using C = compute_t<T>;
  parallel_ranges(a.tokens, grain_of(a.width * (a.k + 1) * sizeof(T)), a.threads, [&](int64_t begin, int64_t end) {
    static thread_local Scratch row_scratch, weight_scratch;
    Terms<T> terms{row_scratch.get<const T*>(a.k), weight_scratch.get<C>(a.k), 0};
    for (int64_t t = begin; t < end; ++t) {
      terms.count = 0;
      for (int64_t s = t * a.k; s < (t + 1) * a.k; ++s) {
        if (a.inverse[s] < 0) continue;
        terms.row[terms.count] = static_cast<const T*>(a.rows) + a.inverse[s] * a.rows_stride;
        terms.weight[terms.count++] = a.weights ? static_cast<const C*>(a.weights)[s] : C(1);
      }
      add_terms(terms, static_cast<T*>(a.y) + t * a.width, a.width);
    }
  });
}

// drow = weight dy, and the result <row, dy>; either of drow and row may be null.
template <class T>
PF_INLINE compute_t<T> scale_and_dot(const T* dy, const T* row, compute_t<T> weight, T* drow, int64_t width) {
  using C = compute_t<T>;
  constexpr int L = Vec<C>::size;
  vec_t<C> a = zero<C>(), b = zero<C>();
  const vec_t<C> w = broadcast<C>(weight);
  int64_t j = 0;
  for (; j + 2 * L <= width; j += 2 * L) {
    const vec_t<C> d0 = load(dy + j), d1 = load(dy + j + L);
    if (row) {
      a += d0 * load(row + j);
      b += d1 * load(row + j + L);
    }
    if (drow) {
      store(drow + j, w * d0);
      store(drow + j + L, w * d1);
    }
  }
  C rest = 0;
  for (; j < width; ++j) {
    const C d = widen(dy[j]);
    if (row) rest += d * C(widen(row[j]));
    if (drow) narrow(weight * d, drow + j);
  }
  return horizontal_sum<C>(a + b) + rest;
}

template <class T>
void sum_rows_backward(const GatherSumBackward& a) {
  using C = compute_t<T>;
  C* dweights = static_cast<C*>(a.dweights);
  if (dweights) std::fill(dweights, dweights + a.tokens * a.k, C(0));
  parallel_ranges(a.count, grain_of(3 * a.width * sizeof(T)), a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      T* drow = a.drows ? static_cast<T*>(a.drows) + r * a.width : nullptr;
      const int64_t token = a.gather[r], slot = a.slot[r];
      if (token < 0 || slot < 0) {
        if (drow) std::memset(static_cast<void*>(drow), 0, a.width * sizeof(T));
        continue;
      }
      const C weight = a.weights ? static_cast<const C*>(a.weights)[slot] : C(1);
      const T* row = dweights ? static_cast<const T*>(a.rows) + r * a.rows_stride : nullptr;
      const C dot = scale_and_dot(static_cast<const T*>(a.dy) + token * a.dy_stride, row, weight, drow, a.width);
      if (dweights) dweights[slot] = dot;
    }
  });
}

}  // namespace

int64_t gather_rows(const GatherRows& a) {
  const int64_t bad = first_outside(a.gather, a.count, a.tokens);
  if (bad >= 0) return bad;
  with_dtype(a.dtype, [&](auto* tag) {
    using T = std::decay_t<decltype(*tag)>;
    const size_t bytes = a.width * sizeof(T);
    parallel_ranges(a.count, grain_of(2 * bytes), a.threads, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        void* row = static_cast<T*>(a.rows) + r * a.width;
        if (a.gather[r] < 0)
          std::memset(row, 0, bytes);
        else
          std::memcpy(row, static_cast<const T*>(a.x) + a.gather[r] * a.x_stride, bytes);
      }
    });
  });
  return -1;
}

int64_t gather_sum(const GatherSum& a) {
  const int64_t bad = first_outside(a.inverse, a.tokens * a.k, a.count);
  if (bad >= 0) return bad;
  with_dtype(a.dtype, [&](auto* tag) { sum_rows<std::decay_t<decltype(*tag)>>(a); });
  return -1;
}

// Two lists, so the place of a bad entry is -1, or its index in gather, or R plus its index in slot.
int64_t gather_sum_backward(const GatherSumBackward& a) {
  const int64_t bad_token = first_outside(a.gather, a.count, a.tokens);
  if (bad_token >= 0) return bad_token;
  const int64_t bad_slot = first_outside(a.slot, a.count, a.tokens * a.k);
  if (bad_slot >= 0) return a.count + bad_slot;
  with_dtype(a.dtype, [&](auto* tag) { sum_rows_backward<std::decay_t<decltype(*tag)>>(a); });
  return -1;
}

}  // namespace pyfast
