// Kernels with a mistake in each, to see that simt.h finds it (tests/kernels/test_simt.py).
#include "launch.h"

namespace {

// out[i] = sum of in[0..n): each thread writes to shared memory, thread 0 adds up; `barrier` says whether it waits first.
__global__ void sum_through_shared(const float* in, float* out, bool barrier) {
  DYNAMIC_SHARED(float, values);
  values[threadIdx.x] = in[threadIdx.x];
  if (barrier) __syncthreads();
  if (threadIdx.x != 0) return;
  float sum = 0;
  for (unsigned i = 0; i < blockDim.x; ++i) sum += values[i];
  out[0] = sum;
}

// Half of the threads leave a lane waiting for them.
__global__ void wait_for_lanes_that_left(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(kFullMask, int(threadIdx.x), 0);
}

// One thread waits for the block, the others for their warp.
__global__ void wait_apart(int* out) {
  if (threadIdx.x == 0)
    __syncthreads();
  else
    __syncwarp();
  out[threadIdx.x] = 1;
}

// Writes past its shared memory, or past the array in global memory.
__global__ void write_beyond(int* out, int shared_excess, int global_excess) {
  DYNAMIC_SHARED(int, values);
  values[threadIdx.x + shared_excess] = 1;
  out[threadIdx.x + global_excess] = values[threadIdx.x];
}

}  // namespace

EXPORT int planted_sum(const float* in, float* out, int n, int barrier) {
  LAUNCH(sum_through_shared, 1, n, n * sizeof(float), nullptr, in, out, barrier != 0);
  return int(cudaGetLastError());
}

EXPORT int planted_lanes_that_left(int* out) {
  LAUNCH(wait_for_lanes_that_left, 1, 32, 0, nullptr, out);
  return int(cudaGetLastError());
}

EXPORT int planted_wait_apart(int* out) {
  LAUNCH(wait_apart, 1, 32, 0, nullptr, out);
  return int(cudaGetLastError());
}

EXPORT int planted_write_beyond(int* out, int n, int shared_excess, int global_excess) {
  LAUNCH(write_beyond, 1, n, n * sizeof(int), nullptr, out, shared_excess, global_excess);
  return int(cudaGetLastError());
}

EXPORT const char* planted_error() { return cudaGetErrorString(cudaErrorLaunchFailure); }
