// Flags in shared memory, and the product that waits for and raises them, in pyfast._C.
#include "bindings.h"
#include "flags.h"

namespace py = pybind11;
using Address = uintptr_t;
using pyfast::Flag;
using pyfast::Peer;

namespace {

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// 0 arrived, else how the peer failed (Arrival).
int flag_wait(Address flag, uint32_t epoch, Address peer, double timeout_s) {
  if (reached(*at<Flag>(flag), epoch)) return 0;
  py::gil_scoped_release release;
  return int(wait_for(*at<Flag>(flag), epoch, *at<Peer>(peer), timeout_s));
}

void flag_raise(Address flag, uint32_t epoch) { raise_flag(*at<Flag>(flag), epoch); }

int64_t panel_gemm(int a_dtype, int b_dtype, int out_dtype, Address ranks, Address peers, int64_t rank_count,
                   Address panels, int64_t count, int64_t a_row_stride, Address b, int64_t b_row_stride,
                   int64_t b_col_stride, Address out, int64_t out_row_stride, int64_t n, int64_t k, bool accumulate,
                   uint32_t epoch, double timeout_s, int threads) {
  py::gil_scoped_release release;
  return kernels().panel_gemm({pyfast::DType(a_dtype), pyfast::DType(b_dtype), pyfast::DType(out_dtype),
                                at<pyfast::PanelRank>(ranks), at<Peer>(peers), rank_count, at<int64_t>(panels), count,
                                a_row_stride, at<void>(b), b_row_stride, b_col_stride, at<void>(out), out_row_stride, n,
                                k, accumulate, epoch, timeout_s, threads});
}

}  // namespace

void bind_symmetric(py::module_& m) {
  m.def("flag_wait", &flag_wait);
  m.def("flag_raise", &flag_raise);
  m.def("panel_gemm", &panel_gemm);
}
