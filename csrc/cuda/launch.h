// What every CUDA file of pyfast includes: the runtime, and the few things that look different where tests run the same
// kernels on a CPU. There a C++ compiler reads these files and finds simt.h (tests/support/simt) instead of CUDA.
//
// Launchers are extern "C" functions over raw addresses, sizes and a stream. They check nothing, synchronise nothing and
// allocate nothing, and return the launch's cudaError_t.
#pragma once
#include <cstdint>
#include <type_traits>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cassert>

#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...) kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define DYNAMIC_SHARED(type, name)                                     \
  extern __shared__ __align__(16) unsigned char dynamic_shared_memory[]; \
  type* const name = reinterpret_cast<type*>(dynamic_shared_memory)
// A condition on values that only the device sees; a false one ends the context with a message that names it.
#define DEVICE_CHECK(condition) assert(condition)
#else
#include <simt.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

constexpr int kWarp = 32;
constexpr unsigned kFullMask = 0xffffffffu;
constexpr int kWarpsPerBlock = 8;

__device__ inline int lane_index() { return threadIdx.x % kWarp; }

// The index of this warp among all warps of a one-dimensional grid.
__device__ inline int64_t warp_index() { return int64_t(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp; }

inline unsigned blocks_for(int64_t warps, int warps_per_block = kWarpsPerBlock) {
  return unsigned((warps + warps_per_block - 1) / warps_per_block);
}

// The sum over the lanes up to this one; all lanes of the warp take part.
__device__ inline int warp_inclusive_sum(int value) {
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int below = __shfl_up_sync(kFullMask, value, distance);
    if (lane_index() >= distance) value += below;
  }
  return value;
}

// The sum over all lanes, in every lane; by halves, so always in the same order.
template <class C>
__device__ inline C warp_sum(C value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kFullMask, value, distance);
  return value;
}
