// The weighted sum of each token's sorted rows, and its gradients.
//
// A warp owns a result row and gathers: nothing is scattered, so there are no atomics, and a token's slots are added in
// their order. The gradient of a weight is a dot product that its row's warp adds up by halves. Sums are float (double for
// double).
#include "rows.h"

namespace {

constexpr int kThreads = kWarpsPerBlock * kWarp;
constexpr int kBlocksPerProcessor = 4;  // 64 registers a thread: left to choose, ptxas takes fewer and spills

template <class T, int V>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    sum_rows(const T* rows, const int32_t* inverse, const sum_t<T>* weights, T* y, int64_t tokens, int64_t k,
             int64_t count, int64_t width, int64_t rows_stride) {
  const int64_t token = warp_index();
  if (token >= tokens) return;
  for (int64_t column = lane_index() * V; column < width; column += kWarp * V) {
    sum_t<T> sum[V] = {};
#pragma unroll 4
    for (int64_t slot = token * k; slot < (token + 1) * k; ++slot) {
      const int64_t row = inverse[slot];
      if (row < 0) continue;
      DEVICE_CHECK(row < count);
      const sum_t<T> weight = weights ? weights[slot] : sum_t<T>(1);
      const Pack<T, V> values = load<V>(rows + row * rows_stride + column);
#pragma unroll
      for (int v = 0; v < V; ++v) sum[v] += weight * widen(values.value[v]);
    }
    Pack<T, V> rounded;
#pragma unroll
    for (int v = 0; v < V; ++v) narrow(sum[v], &rounded.value[v]);
    store(y + token * width + column, rounded);
  }
}

template <class T, int V>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    sum_rows_backward(const T* dy, const T* rows, const int32_t* gather, const int32_t* slots, const sum_t<T>* weights,
                      T* drows, sum_t<T>* dweights, int64_t tokens, int64_t k, int64_t count, int64_t width,
                      int64_t dy_stride, int64_t rows_stride) {
  const int64_t row = warp_index();
  if (row >= count) return;
  const int64_t token = gather[row], slot = slots[row];
  const bool kept = token >= 0 && slot >= 0;
  DEVICE_CHECK(token < tokens && slot < tokens * k);
  const sum_t<T> weight = kept && weights ? weights[slot] : sum_t<T>(1);
  sum_t<T> dot = 0;
#pragma unroll 2
  for (int64_t column = lane_index() * V; column < width; column += kWarp * V) {
    Pack<T, V> upstream{}, values{}, gradient{};
    if (kept) {
      upstream = load<V>(dy + token * dy_stride + column);
      if (dweights) values = load<V>(rows + row * rows_stride + column);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        dot += widen(upstream.value[v]) * widen(values.value[v]);
        narrow(weight * widen(upstream.value[v]), &gradient.value[v]);
      }
    }
    if (drows) store(drows + row * width + column, gradient);
  }
  if (dweights == nullptr || !kept) return;  // the whole warp alike
  dot = warp_sum(dot);
  if (lane_index() == 0) dweights[slot] = dot;
}

}  // namespace

// See GatherSum in csrc/row_map_kernels.h.
EXPORT int pyfast_cuda_gather_sum(int dtype, const void* rows, const int32_t* inverse, const void* weights, void* y,
                                  int64_t tokens, int64_t k, int64_t count, int64_t width, int64_t rows_stride,
                                  cudaStream_t stream) {
  if (tokens == 0 || width == 0) return 0;
  with_dtype(dtype, [&](auto* tag) {
    using T = std::decay_t<decltype(*tag)>;
    const bool packed = aligned<T>(rows, width, rows_stride) && aligned<T>(y, width, width);
    auto kernel = packed ? sum_rows<T, 16 / sizeof(T)> : sum_rows<T, 1>;
    LAUNCH(kernel, blocks_for(tokens), kThreads, 0, stream, static_cast<const T*>(rows), inverse,
           static_cast<const sum_t<T>*>(weights), static_cast<T*>(y), tokens, k, count, width, rows_stride);
  });
  return int(cudaGetLastError());
}

// See GatherSumBackward in csrc/row_map_kernels.h; dweights is 0 before, so that slots without a row keep a gradient of 0.
EXPORT int pyfast_cuda_gather_sum_backward(int dtype, const void* dy, const void* rows, const int32_t* gather,
                                           const int32_t* slot, const void* weights, void* drows, void* dweights,
                                           int64_t tokens, int64_t k, int64_t count, int64_t width, int64_t dy_stride,
                                           int64_t rows_stride, cudaStream_t stream) {
  if (count == 0) return 0;
  with_dtype(dtype, [&](auto* tag) {
    using T = std::decay_t<decltype(*tag)>;
    const bool packed = aligned<T>(dy, width, dy_stride) && aligned<T>(rows, width, rows_stride) &&
                        aligned<T>(drows, width, width);
    auto kernel = packed ? sum_rows_backward<T, 16 / sizeof(T)> : sum_rows_backward<T, 1>;
    LAUNCH(kernel, blocks_for(count), kThreads, 0, stream, static_cast<const T*>(dy), static_cast<const T*>(rows),
           gather, slot, static_cast<const sum_t<T>*>(weights), static_cast<T*>(drows),
           static_cast<sum_t<T>*>(dweights), tokens, k, count, width, dy_stride, rows_stride);
  });
  return int(cudaGetLastError());
}
