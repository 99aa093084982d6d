// Routing in pyfast._C: what forward and backward share arrives as one tuple, in the order of struct Route.
#include "bindings.h"

namespace py = pybind11;
using Address = uintptr_t;

namespace {

template <class T>
T* at(const py::handle& address) {
  return reinterpret_cast<T*>(address.cast<Address>());
}

pyfast::Route route(const py::tuple& t) {
  pyfast::Route r{};
  size_t i = 0;
  auto next = [&] { return t[i++]; };
  r.dtype = pyfast::DType(next().cast<int>());
  r.logits = at<void>(next());
  for (int64_t* size : {&r.tokens, &r.experts, &r.slots, &r.logits_stride}) *size = next().cast<int64_t>();
  r.bias = at<float>(next());
  r.valid = at<uint8_t>(next());
  r.starts = at<int64_t>(next());
  r.token_ids = at<int64_t>(next());
  r.scopes = next().cast<int64_t>();
  r.score = pyfast::RouteScore(next().cast<int>());
  r.normalize = next().cast<bool>();
  r.scale = next().cast<double>();
  r.groups = next().cast<int64_t>();
  r.top_groups = next().cast<int64_t>();
  r.group_top2 = next().cast<bool>();
  r.choice = pyfast::RouteChoice(next().cast<int>());
  r.jitter = next().cast<double>();
  r.random = next().cast<double>();
  r.jitter_key = next().cast<int64_t>();
  r.random_key = next().cast<int64_t>();
  r.k = next().cast<int64_t>();
  r.capacity = next().cast<int64_t>();
  r.capacity_factor = next().cast<double>();
  r.drop_by_probability = next().cast<bool>();
  r.threads = next().cast<int>();
  return r;
}

void forward(const py::tuple& shared, const py::tuple& results) {
  pyfast::RouteForward f{};
  f.route = route(shared);
  f.experts = at<int32_t>(results[0]);
  f.weights = at<void>(results[1]);
  f.chosen = at<int32_t>(results[2]);
  f.load = at<int64_t>(results[3]);
  f.counts = at<int64_t>(results[4]);
  f.dropped = at<int64_t>(results[5]);
  f.valid_tokens = at<int64_t>(results[6]);
  f.score_sums = at<void>(results[7]);
  f.z_sum = at<void>(results[8]);
  py::gil_scoped_release release;
  kernels().route_forward(f);
}

void backward(const py::tuple& shared, const py::tuple& tensors) {
  pyfast::RouteBackward f{};
  f.route = route(shared);
  f.chosen = at<int32_t>(tensors[0]);
  f.dweights = at<void>(tensors[1]);
  f.dscore_sums = at<void>(tensors[2]);
  f.dz = at<void>(tensors[3]);
  f.dlogits = at<void>(tensors[4]);
  py::gil_scoped_release release;
  kernels().route_backward(f);
}

}  // namespace

void bind_route(py::module_& m) {
  m.def("route_forward", &forward);
  m.def("route_backward", &backward);
}
