// pyfast._C: chooses the instruction set, finds torch's OpenMP runtime, and passes calls on to the kernel table.
//
// Tensors arrive as addresses (tensor.data_ptr()), sizes and strides: no torch header, so one build serves every torch.
// All checks are made in Python (pyfast/kernels/cpu.py); the GIL is released around each kernel.
#include <dlfcn.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"

namespace py = pybind11;
using pyfast::DType;
using Address = uintptr_t;

const pyfast::Kernels* g_kernels = nullptr;

namespace {

pyfast::Runtime g_runtime{};

#if defined(__x86_64__)
bool has_f16c() {  // not a name that every Clang's __builtin_cpu_supports knows
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

// Best first.
std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    if (__builtin_cpu_supports("avx512bf16")) names.push_back("avx512bf16");  // the library of avx512
    names.push_back("avx512");
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c())
    names.push_back("avx2");
#endif
  names.push_back("baseline");
  return names;
}

// The OpenMP entry points that `torch_library` itself is linked to, so that torch and pyfast share one thread pool.
bool find_openmp(const std::string& torch_library) {
  void* handle = dlopen(torch_library.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (!handle) return false;
  auto parallel = dlsym(handle, "GOMP_parallel");
  auto thread_num = dlsym(handle, "omp_get_thread_num");
  auto num_threads = dlsym(handle, "omp_get_num_threads");
  if (!parallel || !thread_num || !num_threads) return false;
  g_runtime.parallel = reinterpret_cast<decltype(g_runtime.parallel)>(parallel);
  g_runtime.thread_num = reinterpret_cast<decltype(g_runtime.thread_num)>(thread_num);
  g_runtime.num_threads = reinterpret_cast<decltype(g_runtime.num_threads)>(num_threads);
  return true;
}

// Loads the kernel library of one instruction set and makes it the current one.
void load(const std::string& path, const std::string& torch_library, bool bfloat16_dot) {
  find_openmp(torch_library);
  g_runtime.bfloat16_dot = bfloat16_dot;
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) throw std::runtime_error("cannot load the CPU kernels: " + std::string(dlerror()));
  auto entry = reinterpret_cast<decltype(&pyfast_kernels)>(dlsym(handle, "pyfast_kernels"));
  if (!entry) throw std::runtime_error(path + " is not a kernel library: it has no pyfast_kernels");
  g_kernels = entry(&g_runtime);
}

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

void rms_norm_forward(int dtype, Address x, Address weight, Address y, Address rstd, int64_t rows, int64_t width,
                      int64_t x_stride, double eps, int threads) {
  py::gil_scoped_release release;
  kernels().rms_norm_forward({DType(dtype), at<void>(x), at<void>(weight), at<void>(y), at<void>(rstd), rows, width,
                               x_stride, eps, threads});
}

void rms_norm_backward(int dtype, Address dy, Address x, Address weight, Address rstd, Address dx, Address dweight,
                       int64_t rows, int64_t width, int64_t dy_stride, int64_t x_stride, int threads) {
  py::gil_scoped_release release;
  kernels().rms_norm_backward({DType(dtype), at<void>(dy), at<void>(x), at<void>(weight), at<void>(rstd),
                                at<void>(dx), at<void>(dweight), rows, width, dy_stride, x_stride, threads});
}

void gemm(int a_dtype, Address a, int64_t a_row_stride, int64_t a_col_stride, int b_dtype, Address b,
          int64_t b_row_stride, int64_t b_col_stride, int out_dtype, Address out, int64_t out_row_stride, int64_t m,
          int64_t n, int64_t k, double scale, bool accumulate, bool round_factors, int threads) {
  py::gil_scoped_release release;
  kernels().gemm({DType(a_dtype), DType(b_dtype), DType(out_dtype), at<void>(a), a_row_stride, a_col_stride,
                   at<void>(b), b_row_stride, b_col_stride, at<void>(out), out_row_stride, m, n, k, scale, accumulate,
                   round_factors, threads});
}

double fma_peak(double seconds) {
  py::gil_scoped_release release;
  return kernels().fma_peak(seconds);
}

int64_t rotary(int dtype, Address x, Address cos, Address sin, Address positions, Address y, int64_t batch,
               int64_t length, int64_t heads, int64_t width, int64_t half, int64_t table_rows, int64_t x_batch_stride,
               int64_t x_token_stride, int64_t x_head_stride, int64_t positions_batch_stride, bool inverse,
               int threads) {
  py::gil_scoped_release release;
  return kernels().rotary({DType(dtype), at<void>(x), at<void>(cos), at<void>(sin), at<int64_t>(positions),
                            at<void>(y), batch, length, heads, width, half, table_rows, x_batch_stride,
                            x_token_stride, x_head_stride, positions_batch_stride, inverse, threads});
}

double sum_of_squares(int dtype, Address x, int64_t count, int threads) {
  py::gil_scoped_release release;
  return kernels().sum_of_squares(DType(dtype), at<void>(x), count, threads);
}

void swiglu_forward(int dtype, Address gate, Address up, Address y, int64_t rows, int64_t width, int64_t gate_stride,
                    int64_t up_stride, int threads) {
  py::gil_scoped_release release;
  kernels().swiglu_forward(
      {DType(dtype), at<void>(gate), at<void>(up), at<void>(y), rows, width, gate_stride, up_stride, threads});
}

void swiglu_backward(int dtype, Address dy, Address gate, Address up, Address dgate, Address dup, int64_t rows,
                     int64_t width, int64_t dy_stride, int64_t gate_stride, int64_t up_stride, int64_t d_stride,
                     int threads) {
  py::gil_scoped_release release;
  kernels().swiglu_backward({DType(dtype), at<void>(dy), at<void>(gate), at<void>(up), at<void>(dgate), at<void>(dup),
                              rows, width, dy_stride, gate_stride, up_stride, d_stride, threads});
}

void adamw(int dtype, bool grad_is_wide, Address param, Address grad, Address exp_avg, Address exp_avg_sq,
           Address master, int64_t size, double beta1, double beta2, double decay, double step_size,
           double inverse_root_bias, double eps, double grad_scale, int threads) {
  py::gil_scoped_release release;
  kernels().adamw({DType(dtype), grad_is_wide, at<void>(param), at<void>(grad), at<void>(exp_avg),
                    at<void>(exp_avg_sq), at<void>(master), size, beta1, beta2, decay, step_size, inverse_root_bias,
                    eps, grad_scale, false, 0, 0, nullptr, 0, threads});
}

// The same with bf16 moments, rounded by the random bits of (key, index): index = first + position, or what the
// (start, index) pairs of `places` make of it.
void adamw_bf16_moments(int dtype, bool grad_is_wide, Address param, Address grad, Address exp_avg, Address exp_avg_sq,
                        Address master, int64_t size, double beta1, double beta2, double decay, double step_size,
                        double inverse_root_bias, double eps, double grad_scale, uint64_t key, int64_t first, Address places, int64_t place_count, int threads) {
  py::gil_scoped_release release;
  kernels().adamw({DType(dtype), grad_is_wide, at<void>(param), at<void>(grad), at<void>(exp_avg),
                    at<void>(exp_avg_sq), at<void>(master), size, beta1, beta2, decay, step_size, inverse_root_bias,
                    eps, grad_scale, true, key, first, at<int64_t>(places), place_count, threads});
}

void cross_entropy_rows(int dtype, Address logits, Address target, Address lse, Address picked, Address largest,
                        int64_t rows, int64_t cols, int64_t stride, int64_t start, double softcap, bool exponentials,
                        int threads) {
  py::gil_scoped_release release;
  kernels().cross_entropy_rows({DType(dtype), at<void>(logits), at<int64_t>(target), at<void>(lse), at<void>(picked),
                                 at<void>(largest), rows, cols, stride, start, softcap, exponentials, threads});
}

void cross_entropy_gradient(int dtype, Address logits, Address target, Address lse, Address largest, Address grad,
                            int64_t rows, int64_t cols, int64_t stride, int64_t start, double softcap, double z_loss,
                            int threads) {
  py::gil_scoped_release release;
  kernels().cross_entropy_gradient({DType(dtype), at<void>(logits), at<int64_t>(target), at<void>(lse),
                                     at<void>(largest), at<void>(grad), rows, cols, stride, start, softcap, z_loss,
                                     threads});
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "pyfast's C++ CPU kernels over raw addresses; use pyfast.ops instead";
  m.def("supported_isas", [] {
    py::list names;
    for (const auto& name : supported_isas()) names.append(name);
    return names;
  });
  m.def("load", &load, py::arg("path"), py::arg("torch_library"), py::arg("bfloat16_dot") = false);
  m.def("isa", [] {
    return g_kernels ? std::string(g_kernels->isa) + (g_runtime.bfloat16_dot ? "bf16" : "") : std::string();
  });
  m.def("has_openmp", [] { return g_runtime.parallel != nullptr; });
  m.def("rms_norm_forward", &rms_norm_forward);
  m.def("rms_norm_backward", &rms_norm_backward);
  m.def("gemm", &gemm);
  m.def("cross_entropy_rows", &cross_entropy_rows);
  m.def("cross_entropy_gradient", &cross_entropy_gradient);
  m.def("fma_peak", &fma_peak, py::arg("seconds"));
  m.def("rotary", &rotary);
  m.def("swiglu_forward", &swiglu_forward);
  m.def("swiglu_backward", &swiglu_backward);
  m.def("adamw", &adamw);
  m.def("sum_of_squares", &sum_of_squares);
  m.def("adamw_bf16_moments", &adamw_bf16_moments);
  bind_attention(m);
  bind_moe(m);
  bind_row_map(m);
  bind_route(m);
  bind_symmetric(m);
}
