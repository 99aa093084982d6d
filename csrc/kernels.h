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
// mix of f32, bf16, f16: then sums are float, rounded once. Columns of out are contiguous.
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
  bool accumulate;
  int threads;
};

// A tensor [batch, rows, heads, size]: strides in elements, the last dimension contiguous.
struct Strided {
  const void* data;
  int64_t batch, row, head;
};

// What attention's forward and backward share. Batched: `batch` sequences of rows_q queries and rows_k keys. Packed:
// `batch` documents, document z being rows [cu[z], cu[z + 1]), and rows_q, rows_k the lengths of the packed tensors.
struct AttentionShape {
  DType dtype;
  int64_t batch, rows_q, rows_k, heads_q, heads_k, head_size, value_size;
  const int32_t* cu_q;  // null: batched
  const int32_t* cu_k;
  bool causal;                         // bottom-right aligned
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
  void* out;
  void* lse;
  void* workspace;
};

// dq, dk, dv contiguous in the dtype of q; dlse like lse, may be null; dsinks [heads_q] like sinks, null without sinks.
// workspace: attention_backward_workspace() bytes, 64-byte aligned.
struct AttentionBackward {
  AttentionShape shape;
  Strided q, k, v, out, dout;
  const void* lse;
  const void* dlse;
  void* dq;
  void* dk;
  void* dv;
  void* dsinks;
  void* workspace;
};

struct Kernels {
  const char* isa;
  void (*rms_norm_forward)(const RmsNormForward&);
  void (*rms_norm_backward)(const RmsNormBackward&);
  void (*gemm)(const Gemm&);
  double (*fma_peak)(double seconds);  // FLOP/s
  int64_t (*attention_forward_workspace)(const AttentionShape&);
  void (*attention_forward)(const AttentionForward&);
  int64_t (*attention_backward_workspace)(const AttentionShape&);
  void (*attention_backward)(const AttentionBackward&);
};

}  // namespace pyfast

extern "C" const pyfast::Kernels* pyfast_kernels(const pyfast::Runtime* runtime);
