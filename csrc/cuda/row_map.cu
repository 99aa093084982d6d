// Sorting the slots of a mixture of experts by (expert, slot) without atomics and without the host.
//
// A warp owns a chunk of consecutive slots and reads 32 of them at a time. Lanes with the same expert find each other
// (__match_any_sync); a lane's rank among them is the number of lower ones, so the order of slots is kept.
//
//   count_experts        table[b][c] = slots of bucket b in chunk c; bucket E collects the dropped ones
//   sum_over_chunks      table[b][c] = slots of bucket b before chunk c, and totals[b]
//   sum_over_experts     offsets
//   place_slots          row = offsets[b] + table[b][c] + rank; dropped slots fill the rows from offsets[E] on with -1
#include "launch.h"

namespace {

constexpr int kSharedBytes = 48 * 1024;  // what every device grants without being asked
constexpr int64_t kMostChunks = 1024;

struct Slots {
  const void* experts;
  bool wide;  // int64 ids, otherwise int32
  int64_t token_stride, k_stride;
  int k, count, num_experts;
  int chunk, chunks;  // slots of a chunk, and how many chunks there are
};

Slots slots_of(const void* experts, bool wide, int64_t tokens, int64_t k, int64_t token_stride, int64_t k_stride,
               int64_t num_experts) {
  const int64_t count = tokens * k;
  // A chunk costs a pass over the experts, so it has at least as many slots.
  int64_t chunk = (count + kMostChunks - 1) / kMostChunks;
  if (chunk < 128) chunk = 128;
  if (chunk < num_experts) chunk = num_experts;
  chunk = (chunk + kWarp - 1) / kWarp * kWarp;
  return {experts, wide, token_stride, k_stride, int(k), int(count), int(num_experts), int(chunk),
          int((count + chunk - 1) / chunk)};
}

// A number for each bucket: in shared memory, or in the column of the table that is this chunk's.
struct Column {
  int* first;
  int64_t stride;
  __device__ int& operator[](int bucket) const { return first[bucket * stride]; }
};

// What the lanes of a warp found out about 32 slots.
struct Step {
  int slot, bucket;  // bucket -1: behind the last slot
  unsigned peers;    // lanes of the same bucket
  int rank;          // how many of them are lower
};

__device__ Step look(const Slots& s, int first) {
  Step step;
  step.slot = first + lane_index();
  step.bucket = -1;
  if (step.slot < s.count) {
    const int64_t at = step.slot / s.k * s.token_stride + step.slot % s.k * s.k_stride;
    const int64_t expert = s.wide ? static_cast<const int64_t*>(s.experts)[at] : static_cast<const int32_t*>(s.experts)[at];
    DEVICE_CHECK(expert >= -1 && expert < s.num_experts);
    step.bucket = expert < 0 ? s.num_experts : int(expert);
  }
  step.peers = __match_any_sync(kFullMask, step.bucket);
  step.rank = __popc(step.peers & ((1u << lane_index()) - 1));
  return step;
}

// Adds the 32 slots to the column. The lowest lane of each bucket does it for all.
__device__ void advance(const Step& step, const Column& column) {
  if (step.bucket >= 0 && step.rank == 0) column[step.bucket] += __popc(step.peers);
  __syncwarp();
}

__device__ Column column_of(int* shared, int* table, const Slots& s, int chunk) {
  if (shared == nullptr) return {table + chunk, s.chunks};
  return {shared + int64_t(threadIdx.x / kWarp) * (s.num_experts + 1), 1};
}

template <bool SHARED>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp) count_experts(Slots s, int* table) {
  DYNAMIC_SHARED(int, shared);
  const int64_t chunk = warp_index();
  if (chunk >= s.chunks) return;
  const Column column = column_of(SHARED ? shared : nullptr, table, s, int(chunk));
  for (int b = lane_index(); b <= s.num_experts; b += kWarp) column[b] = 0;
  __syncwarp();
  const int64_t end = (chunk + 1) * s.chunk;
  for (int64_t first = chunk * s.chunk; first < end && first < s.count; first += kWarp)
    advance(look(s, int(first)), column);
  if (SHARED)
    for (int b = lane_index(); b <= s.num_experts; b += kWarp) table[int64_t(b) * s.chunks + chunk] = column[b];
}

// One warp a bucket.
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp) sum_over_chunks(int* table, int* totals, int buckets, int chunks) {
  const int64_t bucket = warp_index();
  if (bucket >= buckets) return;
  int* const row = table + bucket * chunks;
  int before = 0;
  for (int first = 0; first < chunks; first += kWarp) {
    const int c = first + lane_index();
    const int count = c < chunks ? row[c] : 0;
    const int sum = warp_inclusive_sum(count);
    if (c < chunks) row[c] = before + sum - count;
    before += __shfl_sync(kFullMask, sum, kWarp - 1);
  }
  if (lane_index() == 0) totals[bucket] = before;
}

// One warp in all.
__global__ void __launch_bounds__(kWarp) sum_over_experts(const int* totals, int32_t* offsets, int num_experts) {
  int before = 0;
  for (int first = 0; first < num_experts; first += kWarp) {
    const int e = first + lane_index();
    const int count = e < num_experts ? totals[e] : 0;
    const int sum = warp_inclusive_sum(count);
    if (e < num_experts) offsets[e] = before + sum - count;
    before += __shfl_sync(kFullMask, sum, kWarp - 1);
  }
  if (lane_index() == 0) offsets[num_experts] = before;
}

template <bool SHARED>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp)
    place_slots(Slots s, int* table, const int32_t* offsets, int32_t* gather, int32_t* slot, int32_t* inverse) {
  DYNAMIC_SHARED(int, shared);
  const int64_t chunk = warp_index();
  if (chunk >= s.chunks) return;
  const Column next = column_of(SHARED ? shared : nullptr, table, s, int(chunk));
  for (int b = lane_index(); b <= s.num_experts; b += kWarp)
    next[b] = offsets[b] + table[int64_t(b) * s.chunks + chunk];
  __syncwarp();
  const int64_t end = (chunk + 1) * s.chunk;
  for (int64_t first = chunk * s.chunk; first < end && first < s.count; first += kWarp) {
    const Step step = look(s, int(first));
    if (step.bucket >= 0) {
      const int row = next[step.bucket] + step.rank;
      const bool kept = step.bucket < s.num_experts;
      gather[row] = kept ? step.slot / s.k : -1;
      slot[row] = kept ? step.slot : -1;
      inverse[step.slot] = kept ? row : -1;
    }
    __syncwarp();  // all have read `next` before it advances
    advance(step, next);
  }
}

template <bool SHARED>
void launch(const Slots& s, int warps, int* table, int* totals, int32_t* offsets, int32_t* gather, int32_t* slot,
            int32_t* inverse, cudaStream_t stream) {
  const size_t shared_bytes = SHARED ? size_t(warps) * (s.num_experts + 1) * sizeof(int) : 0;
  const int buckets = s.num_experts + 1;
  auto count = count_experts<SHARED>;
  auto place = place_slots<SHARED>;
  if (s.chunks > 0) LAUNCH(count, blocks_for(s.chunks, warps), warps * kWarp, shared_bytes, stream, s, table);
  LAUNCH(sum_over_chunks, blocks_for(buckets), kWarpsPerBlock * kWarp, 0, stream, table, totals, buckets, s.chunks);
  LAUNCH(sum_over_experts, 1, kWarp, 0, stream, totals, offsets, s.num_experts);
  if (s.chunks > 0)
    LAUNCH(place, blocks_for(s.chunks, warps), warps * kWarp, shared_bytes, stream, s, table, offsets, gather, slot,
           inverse);
}

}  // namespace

// Bytes of device memory that pyfast_cuda_row_map needs besides its results.
EXPORT int64_t pyfast_cuda_row_map_workspace(int64_t tokens, int64_t k, int64_t num_experts) {
  const Slots s = slots_of(nullptr, false, tokens, k, 0, 0, num_experts);
  return (num_experts + 1) * (int64_t(s.chunks) + 1) * int64_t(sizeof(int));
}

// See RowMap in csrc/row_map_kernels.h. An id that does not exist fails a device-side assertion.
EXPORT int pyfast_cuda_row_map(const void* experts, int wide, int64_t tokens, int64_t k, int64_t token_stride,
                               int64_t k_stride, int64_t num_experts, int32_t* offsets, int32_t* gather, int32_t* slot,
                               int32_t* inverse, void* workspace, cudaStream_t stream) {
  const Slots s = slots_of(experts, wide != 0, tokens, k, token_stride, k_stride, num_experts);
  int* const totals = static_cast<int*>(workspace);
  int* const table = totals + num_experts + 1;
  const int64_t fit = kSharedBytes / ((num_experts + 1) * int64_t(sizeof(int)));
  const int warps = fit >= kWarpsPerBlock ? kWarpsPerBlock : int(fit);
  if (warps > 0)
    launch<true>(s, warps, table, totals, offsets, gather, slot, inverse, stream);
  else  // so many experts that not even one warp's counts fit
    launch<false>(s, kWarpsPerBlock, table, totals, offsets, gather, slot, inverse, stream);
  return int(cudaGetLastError());
}

EXPORT const char* pyfast_cuda_error_string(int error) { return cudaGetErrorString(cudaError_t(error)); }
