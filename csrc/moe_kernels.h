// Arguments of the mixture-of-experts kernels (included by kernels.h).
//
// T tokens, K slots a token, R rows sorted by expert, E experts, H model width, F expert width. Rows of expert e are
// [offsets[e], offsets[e + 1]); rows outside [offsets[0], offsets[E]) belong to nobody.
#pragma once
#include <cstdint>

namespace pyfast {

enum class DType : int32_t;

// A matrix [rows, columns], its rows taken in the order of `gather` (as they stand where that is null). Strides in
// elements; with a gather the columns are contiguous.
struct ExpertRows {
  DType dtype;
  const void* data;
  int64_t row_stride, col_stride;
  const int32_t* gather;
};

// [E, rows, columns], any strides in elements.
struct ExpertMatrices {
  DType dtype;
  void* data;
  int64_t expert_stride, row_stride, col_stride;
};

struct ExpertOffsets {
  const int64_t* offsets;  // [E + 1], checked
  int64_t experts;
};

// y[r] = w[e] x[r] + bias[e]: w [E, out, in]; y [rows, out] contiguous in x's dtype, 0 where no expert is.
struct GroupedGemm {
  ExpertRows x;
  ExpertMatrices w;
  ExpertOffsets groups;
  const void* bias;  // [E, out] contiguous, x's dtype; may be null
  void* y;
  int64_t rows, out, in;
  int threads;
};

// dw[e] (+)= sum over e's rows of left[r]^T right[r]; dw [E, left width, right width], columns contiguous, in float32
// (float64 for f64), or in the dtype of left when not accumulating.
struct GroupedWeightGradient {
  ExpertRows left, right;
  ExpertOffsets groups;
  ExpertMatrices dw;
  int64_t left_width, right_width;
  bool accumulate;
  int threads;
};

// dbias [E, width] contiguous float32 (float64 for f64) = the sums of dy over each expert's rows.
struct GroupedBiasGradient {
  ExpertRows dy;
  ExpertOffsets groups;
  void* dbias;
  int64_t width;
  int threads;
};

// What the expert MLP's forward and backward share. `weights` [T, K] contiguous, float32 (float64 for f64).
struct MoeMlpShape {
  DType dtype;
  int64_t tokens, top_k, width, ffn;  // T, K, H, F
  ExpertOffsets groups;
  const int32_t* gather;   // [R] row -> token
  const int32_t* slot;     // [R] row -> slot
  const int32_t* inverse;  // [T K] slot -> row, -1: dropped
  const void* weights;
  ExpertMatrices w_gate_up, w_down;
  int threads;
};

// y [T, H] contiguous. pre [R, 2F] elements of the dtype in an order of its own (moe_mlp.h); may be null. rows [R, H]:
// workspace of float32 (float64 for f64).
struct MoeMlpForward {
  MoeMlpShape shape;
  ExpertRows x;  // without gather
  void* y;
  void* pre;
  void* rows;
};

// pre null: computed again. dx [T, H] and dweights [T, K] contiguous; may be null. dh [rows, 2F] and activation [rows, F]
// (the latter times the router's weight), float32 (float64 for f64, bfloat16 if moe_mlp_rows_are_bf16()): with `keep_rows` of all R rows, for
// grouped_weight_gradient; else workspace of moe_mlp_backward_rows() rows, and the gradients of the weights are computed
// here (data null: not wanted). dx_rows [R, H]: workspace like those, null without dx.
struct MoeMlpBackward {
  MoeMlpShape shape;
  ExpertRows x, dy;  // without gather
  const void* pre;
  void* dx;
  void* dweights;
  void* dh;
  void* activation;
  void* dx_rows;
  ExpertMatrices dw_gate_up, dw_down;
  bool accumulate, keep_rows;
};

}  // namespace pyfast
