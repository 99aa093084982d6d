// Gathering rows into sorted order: a warp copies a row, in units as large as the alignment of everything allows.
#include "launch.h"

namespace {

template <class Unit>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp)
    gather_rows(const Unit* x, const int32_t* gather, Unit* rows, int64_t tokens, int64_t count, int64_t width,
                int64_t x_stride) {
  const int64_t row = warp_index();
  if (row >= count) return;
  const int64_t token = gather[row];
  DEVICE_CHECK(token >= -1 && token < tokens);
  Unit* const target = rows + row * width;
  if (token < 0) {
    for (int64_t i = lane_index(); i < width; i += kWarp) target[i] = Unit{};
    return;
  }
  const Unit* const source = x + token * x_stride;
#pragma unroll 4
  for (int64_t i = lane_index(); i < width; i += kWarp) target[i] = source[i];
}

template <class Unit>
bool launch(const void* x, const int32_t* gather, void* rows, int64_t tokens, int64_t count, int64_t row_bytes,
            int64_t stride_bytes, cudaStream_t stream) {
  constexpr int64_t size = sizeof(Unit);
  if ((reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(rows) | uintptr_t(row_bytes) |
       uintptr_t(stride_bytes)) % size != 0)
    return false;
  LAUNCH(gather_rows<Unit>, blocks_for(count), kWarpsPerBlock * kWarp, 0, stream, static_cast<const Unit*>(x), gather,
         static_cast<Unit*>(rows), tokens, count, row_bytes / size, stride_bytes / size);
  return true;
}

}  // namespace

// rows[r] = x[gather[r]], 0 where gather[r] is -1. x: rows of `width` neighbouring elements of `element_size` bytes,
// x_stride elements apart; rows contiguous. Moving is the same for all dtypes of one size.
EXPORT int pyfast_cuda_gather_rows(int64_t element_size, const void* x, const int32_t* gather, void* rows,
                                   int64_t tokens, int64_t count, int64_t width, int64_t x_stride,
                                   cudaStream_t stream) {
  if (count == 0 || width == 0) return 0;
  const int64_t row_bytes = width * element_size, stride_bytes = x_stride * element_size;
  launch<uint4>(x, gather, rows, tokens, count, row_bytes, stride_bytes, stream) ||
      launch<uint64_t>(x, gather, rows, tokens, count, row_bytes, stride_bytes, stream) ||
      launch<uint32_t>(x, gather, rows, tokens, count, row_bytes, stride_bytes, stream) ||
      launch<uint16_t>(x, gather, rows, tokens, count, row_bytes, stride_bytes, stream);
  return int(cudaGetLastError());
}
