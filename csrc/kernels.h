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

struct Kernels {
  const char* isa;
  void (*rms_norm_forward)(const RmsNormForward&);
  void (*rms_norm_backward)(const RmsNormBackward&);
};

}  // namespace pyfast

extern "C" const pyfast::Kernels* pyfast_kernels(const pyfast::Runtime* runtime);
