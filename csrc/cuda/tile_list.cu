// The tiles that cover each expert's sorted rows, for grouped products; made on the device, bounded on the host.
#include "launch.h"

namespace {

// first_tile [E + 1]: the number of tiles before each expert; one warp in all.
__global__ void __launch_bounds__(kWarp)
    count_tiles(const int32_t* offsets, int num_experts, int block, int32_t* first_tile, int32_t* count) {
  int before = 0;
  for (int first = 0; first < num_experts; first += kWarp) {
    const int e = first + lane_index();
    int tiles = 0;
    if (e < num_experts) {
      const int rows = offsets[e + 1] - offsets[e];
      DEVICE_CHECK(rows >= 0);
      tiles = rows / block + (rows % block != 0);
    }
    const int sum = warp_inclusive_sum(tiles);
    if (e < num_experts) first_tile[e] = before + sum - tiles;
    before += __shfl_sync(kFullMask, sum, kWarp - 1);
  }
  if (lane_index() == 0) first_tile[num_experts] = *count = before;
}

// One thread a tile.
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp)
    list_tiles(const int32_t* offsets, const int32_t* first_tile, int num_experts, int block, int64_t bound,
               int32_t* tiles) {
  const int64_t tile = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  DEVICE_CHECK(first_tile[num_experts] <= bound);
  if (tile >= bound) return;
  int32_t expert = -1, row = -1;
  if (tile < first_tile[num_experts]) {
    int low = 0, high = num_experts;  // the last expert whose first tile is not behind this one: low <= it < high
    while (high - low > 1) {
      const int middle = low + (high - low) / 2;
      (first_tile[middle] <= tile ? low : high) = middle;
    }
    expert = low;
    row = offsets[low] + int32_t(tile - first_tile[low]) * block;
  }
  tiles[2 * tile] = expert;
  tiles[2 * tile + 1] = row;
}

}  // namespace

// See TileList in csrc/row_map_kernels.h; workspace [num_experts + 1] int32. Offsets that descend, or need more tiles than
// `bound`, fail a device-side assertion.
EXPORT int pyfast_cuda_tile_list(const int32_t* offsets, int64_t num_experts, int64_t block, int64_t bound,
                                 int32_t* tiles, int32_t* count, int32_t* workspace, cudaStream_t stream) {
  const int threads = kWarpsPerBlock * kWarp;
  LAUNCH(count_tiles, 1, kWarp, 0, stream, offsets, int(num_experts), int(block), workspace, count);
  // At least one block, which also checks that nothing is needed where there is room for nothing.
  const unsigned blocks = unsigned(bound > 0 ? (bound + threads - 1) / threads : 1);
  LAUNCH(list_tiles, blocks, threads, 0, stream, offsets, workspace, int(num_experts), int(block), bound, tiles);
  return int(cudaGetLastError());
}
