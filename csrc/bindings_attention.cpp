// Attention in pyfast._C: tensors arrive as (address, batch stride, row stride, head stride), the rest as one tuple.
#include "bindings.h"

namespace py = pybind11;
using Address = uintptr_t;

namespace {

void* at(Address address) { return reinterpret_cast<void*>(address); }

pyfast::Strided strided(const py::tuple& t) {
  return {at(t[0].cast<Address>()), t[1].cast<int64_t>(), t[2].cast<int64_t>(), t[3].cast<int64_t>()};
}

// See AttentionShape for the order.
pyfast::AttentionShape shape(const py::tuple& t) {
  pyfast::AttentionShape s{};
  int64_t* const sizes[] = {&s.batch, &s.rows_q, &s.rows_k, &s.heads_q, &s.heads_k, &s.head_size, &s.value_size};
  s.dtype = pyfast::DType(t[0].cast<int>());
  for (int i = 0; i < 7; ++i) *sizes[i] = t[1 + i].cast<int64_t>();
  s.cu_q = static_cast<const int32_t*>(at(t[8].cast<Address>()));
  s.cu_k = static_cast<const int32_t*>(at(t[9].cast<Address>()));
  s.runs_q = static_cast<const int64_t*>(at(t[10].cast<Address>()));
  s.runs_k = static_cast<const int64_t*>(at(t[11].cast<Address>()));
  s.count_q = t[12].cast<int64_t>();
  s.count_k = t[13].cast<int64_t>();
  s.causal = t[14].cast<bool>();
  s.window_left = t[15].cast<int64_t>();
  s.window_right = t[16].cast<int64_t>();
  s.scale = t[17].cast<double>();
  s.softcap = t[18].cast<double>();
  s.sinks = at(t[19].cast<Address>());
  s.threads = t[20].cast<int>();
  return s;
}

void forward(const py::tuple& s, const py::tuple& q, const py::tuple& k, const py::tuple& v, Address out, Address lse,
             bool wide, bool resume, Address workspace) {
  const pyfast::AttentionForward arguments{shape(s), strided(q), strided(k), strided(v),   at(out),
                                           at(lse),  wide,       resume,     at(workspace)};
  py::gil_scoped_release release;
  g_kernels->attention_forward(arguments);
}

int64_t forward_workspace(const py::tuple& s) { return g_kernels->attention_forward_workspace(shape(s)); }

int64_t backward_workspace(const py::tuple& s) { return g_kernels->attention_backward_workspace(shape(s)); }

// From out, dout and dlse to gradients in the dtype of q.
void backward(const py::tuple& s, const py::tuple& q, const py::tuple& k, const py::tuple& v, const py::tuple& out,
              const py::tuple& dout, Address lse, Address dlse, Address dq, Address dk, Address dv, Address dsinks,
              Address workspace) {
  const pyfast::AttentionBackward arguments{shape(s), strided(q), strided(k), strided(v), strided(out),
                                            strided(dout), at(lse), at(dlse), nullptr, at(dq),
                                            at(dk), at(dv), at(dsinks), false, at(workspace)};
  py::gil_scoped_release release;
  g_kernels->attention_backward(arguments);
}

// From dout and delta, added into wide gradients.
void state_backward(const py::tuple& s, const py::tuple& q, const py::tuple& k, const py::tuple& v,
                    const py::tuple& dout, Address lse, Address delta, Address dq, Address dk, Address dv,
                    Address workspace) {
  const pyfast::AttentionBackward arguments{shape(s), strided(q), strided(k), strided(v), {}, strided(dout),
                                            at(lse), nullptr, at(delta), at(dq), at(dk), at(dv),
                                            nullptr, true, at(workspace)};
  py::gil_scoped_release release;
  g_kernels->attention_backward(arguments);
}

void delta(int dtype, bool wide_out, const py::tuple& out, const py::tuple& dout, Address dlse, Address result,
           int64_t rows, int64_t heads_q, int64_t value_size, int threads) {
  const pyfast::AttentionDelta arguments{pyfast::DType(dtype), wide_out, strided(out), strided(dout), at(dlse),
                                         at(result), rows, heads_q, value_size, threads};
  py::gil_scoped_release release;
  g_kernels->attention_delta(arguments);
}

}  // namespace

void bind_attention(py::module_& m) {
  m.def("attention_forward_workspace", &forward_workspace);
  m.def("attention_forward", &forward);
  m.def("attention_backward_workspace", &backward_workspace);
  m.def("attention_backward", &backward);
  m.def("attention_state_backward", &state_backward);
  m.def("attention_delta", &delta);
}
