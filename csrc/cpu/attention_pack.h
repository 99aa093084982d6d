// Between tensors in memory (any strides but the last, any dtype) and the blocks of attention_tile.h.
#pragma once
#include <algorithm>

#include "attention_tile.h"

namespace pyfast {

// Widen `width` contiguous elements; zeros up to `padded`.
template <class T, class C>
PF_INLINE void widen_row(const T* source, int64_t width, int64_t padded, C* out) {
  constexpr int L = Vec<C>::size;
  int64_t j = 0;
  for (; j + L <= width; j += L) store(out + j, load(source + j));
  for (; j < width; ++j) out[j] = widen(source[j]);
  for (; j < padded; ++j) out[j] = C(0);
}

// out = values * factor, rounded to T once.
template <class T, class C>
PF_INLINE void narrow_row(const C* values, C factor, int64_t width, T* out) {
  constexpr int L = Vec<C>::size;
  int64_t j = 0;
  for (; j + L <= width; j += L) store(out + j, load(values + j) * factor);
  for (; j < width; ++j) narrow(values[j] * factor, out + j);
}

// Rows of K or V into groups of columns; rows up to a multiple of kRows and columns up to `padded` are zeros.
template <class T, class C>
void pack_columns(const T* source, int64_t row_stride, int64_t rows, int64_t width, C* out) {
  const int64_t padded = ceil_to(width, kRows), all_rows = ceil_to(rows, kRows);
  alignas(64) C row[256];
  for (int64_t r = 0; r < all_rows; ++r) {
    if (r < rows)
      widen_row(source + r * row_stride, width, padded, row);
    else
      std::fill(row, row + padded, C(0));
    for (int64_t j = 0; j < padded; j += kRows)
      std::memcpy(out + j * kKeyBlock + r * kRows, row + j, kRows * sizeof(C));
  }
}

// Rows of Q or dO, [lanes][padded]: rows from `count` to `lanes` and columns from `width` to `padded` are zeros.
template <class T, class C>
void pack_rows(const T* source, int64_t row_stride, int64_t count, int64_t lanes, int64_t width, int64_t padded,
               C* out) {
  for (int64_t r = 0; r < count; ++r) widen_row(source + r * row_stride, width, padded, out + r * padded);
  std::fill(out + count * padded, out + lanes * padded, C(0));
}

namespace detail {

// out[j * out_stride + i] = in[i * in_stride + j] * factor for i, j < 4.
template <class C>
PF_INLINE void transpose4(const C* in, int64_t in_stride, C factor, C* out, int64_t out_stride) {
  typedef C quad __attribute__((vector_size(4 * sizeof(C))));
  quad r[4], t[4];
  for (int i = 0; i < 4; ++i) {
    std::memcpy(&r[i], in + i * in_stride, sizeof(quad));
    r[i] = r[i] * factor;
  }
#if defined(__clang__)
#define PF_PICK(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
  typedef std::conditional_t<sizeof(C) == 4, int32_t, int64_t> Index;
  typedef Index index_quad __attribute__((vector_size(4 * sizeof(C))));
#define PF_PICK(a, b, i, j, k, l) __builtin_shuffle(a, b, index_quad{i, j, k, l})
#endif
  t[0] = PF_PICK(r[0], r[1], 0, 4, 1, 5);
  t[1] = PF_PICK(r[2], r[3], 0, 4, 1, 5);
  t[2] = PF_PICK(r[0], r[1], 2, 6, 3, 7);
  t[3] = PF_PICK(r[2], r[3], 2, 6, 3, 7);
  r[0] = PF_PICK(t[0], t[1], 0, 1, 4, 5);
  r[1] = PF_PICK(t[0], t[1], 2, 3, 6, 7);
  r[2] = PF_PICK(t[2], t[3], 0, 1, 4, 5);
  r[3] = PF_PICK(t[2], t[3], 2, 3, 6, 7);
#undef PF_PICK
  for (int j = 0; j < 4; ++j) std::memcpy(out + j * out_stride, &r[j], sizeof(quad));
}

}  // namespace detail

// out [cols, out_stride] = in^T * factor, in [rows, in_stride]: rows x cols values.
template <class C>
void transpose(const C* in, int64_t in_stride, int64_t rows, int64_t cols, C factor, C* out, int64_t out_stride) {
  const int64_t rows4 = rows / 4 * 4, cols4 = cols / 4 * 4;
  for (int64_t j = 0; j < cols4; j += 4)
    for (int64_t i = 0; i < rows4; i += 4)
      detail::transpose4(in + i * in_stride + j, in_stride, factor, out + j * out_stride + i, out_stride);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = i < rows4 ? cols4 : 0; j < cols; ++j) out[j * out_stride + i] = in[i * in_stride + j] * factor;
}

}  // namespace pyfast
