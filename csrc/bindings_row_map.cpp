// Maps and row movement of a mixture of experts in pyfast._C: addresses and numbers in the order of the structs.
#include "bindings.h"

namespace py = pybind11;
using Address = uintptr_t;

namespace {

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

int64_t row_map(Address experts, bool wide, int64_t tokens, int64_t k, int64_t token_stride, int64_t k_stride,
                int64_t num_experts, Address offsets, Address gather, Address slot, Address inverse, int threads) {
  py::gil_scoped_release release;
  return kernels().row_map({at<void>(experts), wide, tokens, k, token_stride, k_stride, num_experts,
                             at<int32_t>(offsets), at<int32_t>(gather), at<int32_t>(slot), at<int32_t>(inverse),
                             threads});
}

bool tile_list(Address offsets, int64_t num_experts, int64_t block, int64_t bound, Address tiles, Address count) {
  py::gil_scoped_release release;
  return kernels().tile_list(
      {at<int32_t>(offsets), num_experts, block, bound, at<int32_t>(tiles), at<int32_t>(count)});
}

int64_t gather_rows(int dtype, Address x, Address gather, Address rows, int64_t tokens, int64_t count, int64_t width,
                    int64_t x_stride, int threads) {
  py::gil_scoped_release release;
  return kernels().gather_rows({pyfast::DType(dtype), at<void>(x), at<int32_t>(gather), at<void>(rows), tokens, count,
                                 width, x_stride, threads});
}

int64_t gather_sum(int dtype, Address rows, Address inverse, Address weights, Address y, int64_t tokens, int64_t k,
                   int64_t count, int64_t width, int64_t rows_stride, int threads) {
  py::gil_scoped_release release;
  return kernels().gather_sum({pyfast::DType(dtype), at<void>(rows), at<int32_t>(inverse), at<void>(weights),
                                at<void>(y), tokens, k, count, width, rows_stride, threads});
}

int64_t gather_sum_backward(int dtype, Address dy, Address rows, Address gather, Address slot, Address weights,
                            Address drows, Address dweights, int64_t tokens, int64_t k, int64_t count, int64_t width,
                            int64_t dy_stride, int64_t rows_stride, int threads) {
  py::gil_scoped_release release;
  return kernels().gather_sum_backward({pyfast::DType(dtype), at<void>(dy), at<void>(rows), at<int32_t>(gather),
                                         at<int32_t>(slot), at<void>(weights), at<void>(drows), at<void>(dweights),
                                         tokens, k, count, width, dy_stride, rows_stride, threads});
}

}  // namespace

void bind_row_map(py::module_& m) {
  m.def("row_map", &row_map);
  m.def("tile_list", &tile_list);
  m.def("gather_rows", &gather_rows);
  m.def("gather_sum", &gather_sum);
  m.def("gather_sum_backward", &gather_sum_backward);
}
