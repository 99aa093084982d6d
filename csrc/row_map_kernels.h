// Arguments of the kernels that sort the rows of a mixture of experts and move them; part of kernels.h.
//
// T tokens, K slots a token (slot s = t K + k), E experts, R = T K rows sorted by (expert, slot), H width of a row.
#pragma once
#include <cstdint>

namespace pyfast {

// experts [T, K], any strides, each -1 (dropped) or in [0, E). The maps are contiguous int32: offsets [E + 1], and of T K
// entries each gather (row -> token), slot (row -> slot) and inverse (slot -> row). gather and slot are -1 from row
// offsets[E] on, inverse is -1 where the slot is dropped.
struct RowMap {
  const void* experts;
  bool wide;  // int64 ids, otherwise int32
  int64_t tokens, k, token_stride, k_stride, num_experts;
  int32_t* offsets;
  int32_t* gather;
  int32_t* slot;
  int32_t* inverse;
  int threads;
};

// The tiles of `block` rows that cover [offsets[e], offsets[e + 1]) of each expert in turn: tiles [bound, 2] contiguous,
// (expert, first row) and (-1, -1) from *count on. offsets ascend.
struct TileList {
  const int32_t* offsets;  // [num_experts + 1]
  int64_t num_experts, block, bound;
  int32_t* tiles;
  int32_t* count;
};

// rows[r] = x[gather[r]], 0 where gather[r] is -1. x: rows of `width` contiguous elements; rows contiguous.
struct GatherRows {
  DType dtype;
  const void* x;
  const int32_t* gather;
  void* rows;
  int64_t tokens, count, width, x_stride;  // count: R
  int threads;
};

// y[t] = sum over k of weights[t, k] rows[inverse[t, k]], k ascending, slots of -1 left out; summed in float32 (float64
// for f64), rounded once. weights [T, K] contiguous in the sum's type, null: all 1. y contiguous.
struct GatherSum {
  DType dtype;
  const void* rows;
  const int32_t* inverse;
  const void* weights;
  void* y;
  int64_t tokens, k, count, width, rows_stride;
  int threads;
};

// drows[r] = weights[slot[r]] dy[gather[r]] and dweights[slot[r]] = <rows[r], dy[gather[r]]>; both 0 for what no row
// stands for. drows contiguous in the dtype of rows, dweights [T K] like weights; either may be null.
struct GatherSumBackward {
  DType dtype;
  const void* dy;
  const void* rows;
  const int32_t* gather;
  const int32_t* slot;
  const void* weights;
  void* drows;
  void* dweights;
  int64_t tokens, k, count, width, dy_stride, rows_stride;
  int threads;
};

}  // namespace pyfast
