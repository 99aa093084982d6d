// The sum of the squares of float or double values, in double: what a gradient's norm is made of.
//
// In blocks of kBlock values whose sums are added in order: the same bits for any number of threads. The square of a
// float is exact in double, so they are the same bits on every instruction set too.
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace pyfast {
namespace {

constexpr int64_t kBlock = 1 << 14;
constexpr int kLanes = 32;  // sums side by side: more than the latency of an addition times its rate

template <class T>
double block_sum(const T* x, int64_t count) {
  double sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += double(x[i + lane]) * double(x[i + lane]);
  for (int lane = 0; i < count; ++i, ++lane) sums[lane] += double(x[i]) * double(x[i]);
  double total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += sums[lane];
  return total;
}

template <class T>
double sum(const T* x, int64_t count, int threads) {
  std::vector<double> blocks((count + kBlock - 1) / kBlock);
  parallel_tasks(int64_t(blocks.size()), threads, [&](int64_t block, int) {
    const int64_t begin = block * kBlock;
    blocks[block] = block_sum(x + begin, std::min(kBlock, count - begin));
  });
  double total = 0;
  for (const double block : blocks) total += block;
  return total;
}

}  // namespace

double sum_of_squares(DType dtype, const void* x, int64_t count, int threads) {
  if (dtype == DType::f64) return sum(static_cast<const double*>(x), count, threads);
  return sum(static_cast<const float*>(x), count, threads);
}

}  // namespace pyfast
