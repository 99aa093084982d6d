// out (+)= scale * A B as one kernel, and the machine's FMA peak to measure it against.
#include <chrono>

#include "gemm_blocked.h"

namespace pyfast {

void gemm(const Gemm& g) {
  gemm_blocked({{g.a_dtype, g.a, g.a_row_stride, g.a_col_stride},
                {g.b_dtype, g.b, g.b_row_stride, g.b_col_stride},
                g.out_dtype, g.out, g.out_row_stride, g.m, g.n, g.k, g.scale, g.accumulate, g.round_factors},
               g.threads);
}

// FLOP/s of one thread that does nothing but float fmas on registers: 12 independent chains, enough to hide the latency.
double fma_peak(double seconds) {
  constexpr int kChains = 12, kSteps = 20000;
  using Clock = std::chrono::steady_clock;
  vec_t<float> sum[kChains];
  for (int i = 0; i < kChains; ++i) sum[i] = broadcast<float>(float(i));
  vec_t<float> factor = broadcast<float>(0.999f), addend = broadcast<float>(0.001f);
  double best = 0;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  do {
    const auto start = Clock::now();
    for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 16
      for (int i = 0; i < kChains; ++i) sum[i] = sum[i] * factor + addend;
    }
    for (int i = 0; i < kChains; ++i) asm volatile("" : "+m"(sum[i]));  // the results are used
    const double took = std::chrono::duration<double>(Clock::now() - start).count();
    best = std::max(best, 2.0 * kChains * kSteps * Vec<float>::size / took);
  } while (Clock::now() < end);
  return best;
}

}  // namespace pyfast
