// Mixture of experts in pyfast._C: structs of moe_kernels.h arrive as tuples, field by field.
#include "bindings.h"

namespace py = pybind11;
using Address = uintptr_t;

namespace {

void* at(Address address) { return reinterpret_cast<void*>(address); }

const int32_t* ints(const py::handle& address) { return static_cast<const int32_t*>(at(address.cast<Address>())); }

// (dtype, address, row stride, column stride, address of gather)
pyfast::ExpertRows rows(const py::tuple& t) {
  return {pyfast::DType(t[0].cast<int>()), at(t[1].cast<Address>()), t[2].cast<int64_t>(), t[3].cast<int64_t>(),
          ints(t[4])};
}

// (dtype, address, expert stride, row stride, column stride)
pyfast::ExpertMatrices matrices(const py::tuple& t) {
  return {pyfast::DType(t[0].cast<int>()), at(t[1].cast<Address>()), t[2].cast<int64_t>(), t[3].cast<int64_t>(),
          t[4].cast<int64_t>()};
}

// (address, experts)
pyfast::ExpertOffsets offsets(const py::tuple& t) {
  return {static_cast<const int64_t*>(at(t[0].cast<Address>())), t[1].cast<int64_t>()};
}

void grouped_gemm(const py::tuple& x, const py::tuple& w, const py::tuple& groups, Address bias, Address y,
                  int64_t row_count, int64_t out, int64_t in, int threads) {
  const pyfast::GroupedGemm arguments{rows(x), matrices(w), offsets(groups), at(bias), at(y),
                                      row_count, out,       in,              threads};
  py::gil_scoped_release release;
  kernels().grouped_gemm(arguments);
}

void grouped_weight_gradient(const py::tuple& left, const py::tuple& right, const py::tuple& groups,
                             const py::tuple& dw, int64_t left_width, int64_t right_width, bool accumulate,
                             int threads) {
  const pyfast::GroupedWeightGradient arguments{rows(left),  rows(right), offsets(groups), matrices(dw), left_width,
                                                right_width, accumulate,  threads};
  py::gil_scoped_release release;
  kernels().grouped_weight_gradient(arguments);
}

void grouped_bias_gradient(const py::tuple& dy, const py::tuple& groups, Address dbias, int64_t width, int threads) {
  const pyfast::GroupedBiasGradient arguments{rows(dy), offsets(groups), at(dbias), width, threads};
  py::gil_scoped_release release;
  kernels().grouped_bias_gradient(arguments);
}

// See MoeMlpShape for the order.
pyfast::MoeMlpShape shape(const py::tuple& t) {
  pyfast::MoeMlpShape s{};
  s.dtype = pyfast::DType(t[0].cast<int>());
  int64_t* const sizes[] = {&s.tokens, &s.top_k, &s.width, &s.ffn};
  for (int i = 0; i < 4; ++i) *sizes[i] = t[1 + i].cast<int64_t>();
  s.groups = offsets(t[5].cast<py::tuple>());
  s.gather = ints(t[6]);
  s.slot = ints(t[7]);
  s.inverse = ints(t[8]);
  s.weights = at(t[9].cast<Address>());
  s.w_gate_up = matrices(t[10].cast<py::tuple>());
  s.w_down = matrices(t[11].cast<py::tuple>());
  s.threads = t[12].cast<int>();
  return s;
}

void moe_mlp_forward(const py::tuple& s, const py::tuple& x, Address y, Address pre, Address workspace) {
  const pyfast::MoeMlpForward arguments{shape(s), rows(x), at(y), at(pre), at(workspace)};
  py::gil_scoped_release release;
  kernels().moe_mlp_forward(arguments);
}

bool moe_mlp_rows_are_bf16(const py::tuple& s) { return kernels().moe_mlp_rows_are_bf16(shape(s)); }

int64_t moe_mlp_backward_rows(const py::tuple& s) { return kernels().moe_mlp_backward_rows(shape(s)); }

void moe_mlp_backward(const py::tuple& s, const py::tuple& x, const py::tuple& dy, Address pre, Address dx,
                      Address dweights, Address dh, Address activation, Address dx_rows, const py::tuple& dw_gate_up,
                      const py::tuple& dw_down, bool accumulate, bool keep_rows) {
  const pyfast::MoeMlpBackward arguments{
      shape(s),    rows(x),     rows(dy),
      at(pre),     at(dx),      at(dweights),
      at(dh),      at(activation), at(dx_rows),
      matrices(dw_gate_up), matrices(dw_down), accumulate, keep_rows};
  py::gil_scoped_release release;
  kernels().moe_mlp_backward(arguments);
}

}  // namespace

void bind_moe(py::module_& m) {
  m.def("grouped_gemm", &grouped_gemm);
  m.def("grouped_weight_gradient", &grouped_weight_gradient);
  m.def("grouped_bias_gradient", &grouped_bias_gradient);
  m.def("moe_mlp_forward", &moe_mlp_forward);
  m.def("moe_mlp_rows_are_bf16", &moe_mlp_rows_are_bf16);
  m.def("moe_mlp_backward_rows", &moe_mlp_backward_rows);
  m.def("moe_mlp_backward", &moe_mlp_backward);
}
