// The table of CPU kernels: plain C structs and function pointers, no torch, no Python.
//
// Every file in csrc/cpu is compiled once per instruction set into its own shared library (so that no inline function
// compiled for AVX-512 can be picked by the linker for an older machine). Each library exports pyfast_kernels();
// bindings.cpp loads the best one the processor can run and calls through the table.
//
// Pointers are raw, sizes and strides are in elements, 64-bit. Kernels never throw and never allocate results.
#pragma once
#include <cstdint>

namespace pyfast {

enum class DType : int32_t { f32 = 0, f64 = 1, bf16 = 2, f16 = 3 };

// What a kernel needs from the process: torch's own OpenMP runtime, found at import (bindings.cpp).
struct Runtime {
  void (*parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags);  // GOMP_parallel
  int (*thread_num)();                                                                   // omp_get_thread_num
  int (*num_threads)();                                                                  // omp_get_num_threads
  bool bfloat16_dot;  // kernels of "avx512" may use AVX512-BF16
};

// y = x * rstd * weight, rstd = 1/sqrt(mean(x^2) + eps); rows of `width` contiguous elements, row stride in elements.
struct RmsNormForward {
  DType dtype;
  const void* x;
  const void* weight;
  void* y;
  void* rstd;  // [rows] float32 (float64 for f64), saved for backward; may be null
  int64_t rows, width, x_stride;
  double eps;
  int threads;
};

// dx [rows, width] contiguous in x's dtype; dweight [width] in float32 (float64 for f64), summed over rows in a fixed order.
struct RmsNormBackward {
  DType dtype;
  const void* dy;
  const void* x;
  const void* weight;
  const void* rstd;
  void* dx;       // may be null
  void* dweight;  // may be null
  int64_t rows, width, dy_stride, x_stride;
  int threads;
};

// out [m, n] (+)= scale * A [m, k] B [k, n]; element (i, j) of A at a[i * a_row_stride + j * a_col_stride]. All f64, or any
// mix of f32, bf16, f16: then sums are float, rounded once. Columns of out are contiguous. With `round_factors` a f32 factor
// of a bf16 one may be rounded to bf16, where that is faster.
struct Gemm {
  DType a_dtype, b_dtype, out_dtype;
  const void* a;
  int64_t a_row_stride, a_col_stride;
  const void* b;
  int64_t b_row_stride, b_col_stride;
  void* out;
  int64_t out_row_stride;
  int64_t m, n, k;
  double scale;
  bool accumulate, round_factors;
  int threads;
};

// Half-split rotary embedding of x [batch, length, heads, width] (last dimension contiguous) into y, contiguous: channel
// j < half turns with j + half, the rest is copied. Tables [table_rows, half] contiguous, float32 (float64 for f64).
struct Rotary {
  DType dtype;
  const void* x;
  const void* cos;
  const void* sin;
  const int64_t* positions;  // row of the tables for each token, [length] or [batch, length]; null: 0, 1, ... length - 1
  void* y;
  int64_t batch, length, heads, width, half, table_rows;
  int64_t x_batch_stride, x_token_stride, x_head_stride;
  int64_t positions_batch_stride;  // 0: the same positions in every batch element
  bool inverse;                    // turn by the negative angle
  int threads;
};

// y = silu(gate) * up; rows of `width` contiguous elements, row strides in elements; y [rows, width] contiguous.
struct SwigluForward {
  DType dtype;
  const void* gate;
  const void* up;
  void* y;
  int64_t rows, width, gate_stride, up_stride;
  int threads;
};

// dgate and dup share one row stride: 2 width in the fused layout.
struct SwigluBackward {
  DType dtype;
  const void* dy;
  const void* gate;
  const void* up;
  void* dgate;
  void* dup;
  int64_t rows, width, dy_stride, gate_stride, up_stride, d_stride;
  int threads;
};

// One AdamW step over flat memory, in place; see adamw.cpp for the formula. Moments and master are float32 (float64 for
// f64); master may be null (always for f32 and f64): the weights are then read from and written to param alone.
// moments_are_bf16 (not for f64): moments are bf16, rounded stochastically by random bits that are a function of
// (key0, key1, first + position) alone.
struct AdamW {
  DType dtype;        // of param
  bool grad_is_wide;  // the gradient is float32 (float64 for f64); otherwise it has param's dtype
  void* param;
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  void* master;
  int64_t size;
  double beta1, beta2, decay, step_size, inverse_root_bias, eps, grad_scale;
  bool moments_are_bf16;
  uint64_t key;
  int64_t first;
  const int64_t* places;  // [place_count][2]: (start, index) pairs, or null: index and position are the same
  int64_t place_count;
  int threads;
};

// One pass over logits [rows, cols] (f32 or f64, row stride in elements), this rank's columns [start, start + cols) of the
// vocabulary: x = softcap tanh(logit / softcap) (x = logit without a softcap), lse = log sum exp x, and x at the target
// (0 when it lies elsewhere). Left in place: exp(x - largest) if `exponentials`, else x.
struct CrossEntropyRows {
  DType dtype;
  void* logits;
  const int64_t* target;  // [rows] global ids
  void* lse;              // [rows]
  void* picked;           // [rows] x at the target
  void* largest;          // [rows] max of x
  int64_t rows, cols, stride, start;
  double softcap;
  bool exponentials;
  int threads;
};

// Gradient in place of what CrossEntropyRows left: dlogit = grad (exp(x - lse) (1 + 2 z_loss lse) - [column is target]),
// times 1 - (x / softcap)^2 under a softcap. lse is that of the whole vocabulary.
struct CrossEntropyGradient {
  DType dtype;
  void* logits;
  const int64_t* target;
  const void* lse;
  const void* largest;  // null: logits hold x; else they hold exp(x - largest)
  const void* grad;     // [rows]; null: 1
  int64_t rows, cols, stride, start;
  double softcap, z_loss;
  int threads;
};

// A tensor [batch, rows, heads, size]: strides in elements, the last dimension contiguous.
struct Strided {
  const void* data;
  int64_t batch, row, head;
};

// What attention's forward and backward share. Which rows are whose is said in one of three ways:
//   batched  `batch` sequences of rows_q queries and rows_k keys
//   packed   `batch` documents, document z being rows [cu[z], cu[z + 1]); rows_q, rows_k: lengths of the packed tensors
//   runs     rows_q and rows_k packed rows that run after run are (document, start, length, stride): `length` rows, the
//            tokens start, start + stride, ... of a document; -1: of none, like the rows after the last run
// A query sees a key of its document if key - query <= right (0 if causal) and query - key <= left; in the first two
// ways the last query stands where the last key does.
struct AttentionShape {
  DType dtype;
  int64_t batch, rows_q, rows_k, heads_q, heads_k, head_size, value_size;
  const int32_t* cu_q;  // null: not packed
  const int32_t* cu_k;
  const int64_t* runs_q;  // [count_q, 4]; null: no runs
  const int64_t* runs_k;
  int64_t count_q, count_k;
  bool causal;
  int64_t window_left, window_right;   // inclusive; -1: unbounded
  double scale, softcap;               // softcap 0: none
  const void* sinks;                   // [heads_q] float32 (float64 for f64); may be null
  int threads;
};

// out [rows, heads_q, value_size] contiguous; lse [heads_q, rows_q] (per batch entry), float32 (float64 for f64).
// workspace: attention_forward_workspace() bytes, 64-byte aligned.
struct AttentionForward {
  AttentionShape shape;
  Strided q, k, v;
  void* out;  // in the dtype of q, or that of lse if `wide`
  void* lse;
  bool wide;
  bool resume;  // only if wide: out and lse hold the attention over earlier keys, to which these keys are added
  void* workspace;
};

// delta [heads_q, rows] = rowsum(out * dout) - dlse; dlse [heads_q, rows] may be null. float32 (float64 for f64).
struct AttentionDelta {
  DType dtype;    // of dout
  bool wide_out;  // out is float32 (float64 for f64), else of dtype
  Strided out, dout;
  const void* dlse;
  void* delta;
  int64_t rows, heads_q, value_size;
  int threads;
};

// dq, dk, dv contiguous. Either the gradients in the dtype of q, or, if `accumulate`, they are added into what is there,
// float32 (float64 for f64), and any of them may be null.
struct AttentionBackward {
  AttentionShape shape;
  Strided q, k, v, out, dout;
  const void* lse;    // over all keys
  const void* dlse;   // like lse; may be null
  const void* delta;  // like lse: see AttentionDelta; null: computed from out, dout and dlse
  void* dq;
  void* dk;
  void* dv;
  void* dsinks;  // [heads_q] like sinks; null without sinks
  bool accumulate;
  void* workspace;  // attention_backward_workspace() bytes, 64-byte aligned
};

}  // namespace pyfast

#include "moe_kernels.h"
#include "panel_kernels.h"
#include "row_map_kernels.h"
#include "route_kernels.h"

namespace pyfast {

struct Kernels {
  const char* isa;
  void (*rms_norm_forward)(const RmsNormForward&);
  void (*rms_norm_backward)(const RmsNormBackward&);
  void (*gemm)(const Gemm&);
  double (*fma_peak)(double seconds);  // FLOP/s
  int64_t (*rotary)(const Rotary&);  // -1, or the index of the first position outside the tables: nothing is written then
  void (*swiglu_forward)(const SwigluForward&);
  void (*swiglu_backward)(const SwigluBackward&);
  void (*adamw)(const AdamW&);
  double (*sum_of_squares)(DType, const void* x, int64_t count, int threads);  // f32 or f64
  void (*cross_entropy_rows)(const CrossEntropyRows&);
  void (*cross_entropy_gradient)(const CrossEntropyGradient&);
  int64_t (*attention_forward_workspace)(const AttentionShape&);
  void (*attention_forward)(const AttentionForward&);
  int64_t (*attention_backward_workspace)(const AttentionShape&);
  void (*attention_backward)(const AttentionBackward&);
  void (*attention_delta)(const AttentionDelta&);
  int64_t (*row_map)(const RowMap&);  // -1, or the first slot whose id is not allowed: the maps are then unfinished
  bool (*tile_list)(const TileList&);  // false: there are more tiles than `bound`
  // -1, or where a map holds an entry that is not allowed: nothing is written then
  int64_t (*gather_rows)(const GatherRows&);
  int64_t (*gather_sum)(const GatherSum&);
  int64_t (*gather_sum_backward)(const GatherSumBackward&);
  void (*route_forward)(const RouteForward&);
  void (*route_backward)(const RouteBackward&);
  void (*grouped_gemm)(const GroupedGemm&);
  void (*grouped_weight_gradient)(const GroupedWeightGradient&);
  void (*grouped_bias_gradient)(const GroupedBiasGradient&);
  void (*moe_mlp_forward)(const MoeMlpForward&);
  bool (*moe_mlp_rows_are_bf16)(const MoeMlpShape&);
  int64_t (*moe_mlp_backward_rows)(const MoeMlpShape&);
  void (*moe_mlp_backward)(const MoeMlpBackward&);
  int64_t (*panel_gemm)(const PanelGemm&);  // -1, or 4 * rank + Arrival (flags.h): whose rows did not come, and why
};

}  // namespace pyfast

extern "C" const pyfast::Kernels* pyfast_kernels(const pyfast::Runtime* runtime);
