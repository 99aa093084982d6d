// Attention in pyfast._C: an array arrives as (address, sizes, strides), [batch, rows, heads, size] or without a batch.
//
// A call on a few tokens costs what Python and this file cost: one call does everything, also the workspace of a small
// one, kept from call to call. For a larger workspace a kernel returns how many bytes it needs, without having run.
#include <algorithm>
#include <stdexcept>

#include "bindings.h"
#include "cpu/scratch.h"

namespace py = pybind11;
using Address = uintptr_t;

namespace {

constexpr int64_t kSmallWorkspace = 256 << 10;

void* at(Address address) { return reinterpret_cast<void*>(address); }

struct Array {
  pyfast::Strided strided;
  int64_t batch, rows, heads, size;

  explicit Array(const py::tuple& t) {
    const py::handle sizes = t[1], strides = t[2];
    const Py_ssize_t dims = PyTuple_Size(strides.ptr());
    if (dims != 3 && dims != 4) throw std::invalid_argument("an array of attention has 3 or 4 dimensions");
    auto item = [](py::handle tuple, Py_ssize_t i) { return PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.ptr(), i)); };
    const bool batched = dims == 4;
    batch = batched ? item(sizes, 0) : 1;
    rows = item(sizes, dims - 3), heads = item(sizes, dims - 2), size = item(sizes, dims - 1);
    strided = {at(t[0].cast<Address>()), batched ? item(strides, 0) : 0, item(strides, dims - 3),
               item(strides, dims - 2)};
  }
};

// tables: addresses of cu_seqlens (q, k) and runs (q, k), 0 if there are none; their lengths.
// options: causal, scale, window left and right, softcap.
pyfast::AttentionShape shape(int dtype, const Array& q, const Array& k, const Array& v, const py::tuple& tables,
                             const py::tuple& options, Address sinks, int threads) {
  pyfast::AttentionShape s{};
  s.dtype = pyfast::DType(dtype);
  s.batch = q.batch, s.rows_q = q.rows, s.rows_k = k.rows, s.heads_q = q.heads, s.heads_k = k.heads;
  s.head_size = q.size, s.value_size = v.size;
  s.cu_q = static_cast<const int32_t*>(at(tables[0].cast<Address>()));
  s.cu_k = static_cast<const int32_t*>(at(tables[1].cast<Address>()));
  s.runs_q = static_cast<const int64_t*>(at(tables[2].cast<Address>()));
  s.runs_k = static_cast<const int64_t*>(at(tables[3].cast<Address>()));
  s.count_q = tables[4].cast<int64_t>();
  s.count_k = tables[5].cast<int64_t>();
  if (s.cu_q) s.batch = s.count_q - 1;
  s.causal = options[0].cast<bool>();
  s.scale = options[1].cast<double>();
  s.window_left = options[2].cast<int64_t>();
  s.window_right = options[3].cast<int64_t>();
  s.softcap = options[4].cast<double>();
  s.sinks = at(sinks);
  s.threads = threads;
  return s;
}

// Runs a kernel on its arguments and a workspace: the one given, or a small one of this thread. Returns 0, or, if
// neither is enough, the bytes that the caller must give.
template <class Arguments>
int64_t run(int64_t (*bytes_of)(const pyfast::AttentionShape&), void (*kernel)(const Arguments&), Arguments arguments,
            Address workspace) {
  static thread_local pyfast::Scratch scratch;
  py::gil_scoped_release release;
  arguments.workspace = at(workspace);
  if (!workspace) {
    const int64_t bytes = bytes_of(arguments.shape);
    if (bytes > kSmallWorkspace) return bytes;
    arguments.workspace = scratch.get<char>(std::max<int64_t>(bytes, 1));
  }
  kernel(arguments);
  return 0;
}

int64_t forward(int dtype, const py::tuple& q, const py::tuple& k, const py::tuple& v, const py::tuple& tables,
                const py::tuple& options, Address sinks, int threads, Address out, Address lse, bool wide, bool resume,
                Address workspace) {
  const Array q_array(q), k_array(k), v_array(v);
  pyfast::AttentionForward a{};
  a.shape = shape(dtype, q_array, k_array, v_array, tables, options, sinks, threads);
  a.q = q_array.strided, a.k = k_array.strided, a.v = v_array.strided;
  a.out = at(out), a.lse = at(lse), a.wide = wide, a.resume = resume;
  return run(kernels().attention_forward_workspace, kernels().attention_forward, a, workspace);
}

// From out, dout and dlse to gradients in the dtype of q.
int64_t backward(int dtype, const py::tuple& q, const py::tuple& k, const py::tuple& v, const py::tuple& tables,
                 const py::tuple& options, Address sinks, int threads, const py::tuple& out, const py::tuple& dout,
                 Address lse, Address dlse, Address dq, Address dk, Address dv, Address dsinks, Address workspace) {
  const Array q_array(q), k_array(k), v_array(v);
  pyfast::AttentionBackward a{};
  a.shape = shape(dtype, q_array, k_array, v_array, tables, options, sinks, threads);
  a.q = q_array.strided, a.k = k_array.strided, a.v = v_array.strided;
  a.out = Array(out).strided, a.dout = Array(dout).strided;
  a.lse = at(lse), a.dlse = at(dlse);
  a.dq = at(dq), a.dk = at(dk), a.dv = at(dv), a.dsinks = at(dsinks);
  return run(kernels().attention_backward_workspace, kernels().attention_backward, a, workspace);
}

// From dout and delta, added into wide gradients.
int64_t state_backward(int dtype, const py::tuple& q, const py::tuple& k, const py::tuple& v, const py::tuple& tables,
                       const py::tuple& options, int threads, const py::tuple& dout, Address lse, Address delta,
                       Address dq, Address dk, Address dv, Address workspace) {
  const Array q_array(q), k_array(k), v_array(v);
  pyfast::AttentionBackward a{};
  a.shape = shape(dtype, q_array, k_array, v_array, tables, options, 0, threads);
  a.q = q_array.strided, a.k = k_array.strided, a.v = v_array.strided, a.dout = Array(dout).strided;
  a.lse = at(lse), a.delta = at(delta);
  a.dq = at(dq), a.dk = at(dk), a.dv = at(dv);
  a.accumulate = true;
  return run(kernels().attention_backward_workspace, kernels().attention_backward, a, workspace);
}

void delta(int dtype, bool wide_out, const py::tuple& out, const py::tuple& dout, Address dlse, Address result,
           int threads) {
  const Array array(dout);
  const pyfast::AttentionDelta arguments{pyfast::DType(dtype), wide_out, Array(out).strided, array.strided, at(dlse),
                                         at(result), array.rows, array.heads, array.size, threads};
  const auto kernel = kernels().attention_delta;
  py::gil_scoped_release release;
  kernel(arguments);
}

}  // namespace

void bind_attention(py::module_& m) {
  m.def("attention_forward", &forward);
  m.def("attention_backward", &backward);
  m.def("attention_state_backward", &state_backward);
  m.def("attention_delta", &delta);
}
