// Parallel loops on torch's own OpenMP runtime, obeying torch.set_num_threads (the caller passes the number).
//
// Nothing here depends on how many threads really come: a task's result may depend on its index only, so results are
// the same bits for any thread count.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "../kernels.h"

namespace pyfast {

extern const Runtime* g_runtime;  // set once when the library is loaded (table.cpp)

namespace detail {
template <class Body>
void run_team(int threads, Body& body) {
  if (threads <= 1 || g_runtime == nullptr || g_runtime->parallel == nullptr) {
    body(0);
    return;
  }
  g_runtime->parallel(
      [](void* data) { (*static_cast<Body*>(data))(g_runtime->thread_num()); }, &body, unsigned(threads), 0);
}
}  // namespace detail

// task(index, thread) for every index in [0, tasks), taken in order from one queue: put the longest tasks first.
template <class Task>
void parallel_tasks(int64_t tasks, int threads, Task&& task) {
  std::atomic<int64_t> next{0};
  auto body = [&](int thread) {
    for (int64_t index; (index = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) task(index, thread);
  };
  detail::run_team(int(std::min<int64_t>(threads, tasks)), body);
}

// range(begin, end) over [0, size) in pieces of at least `grain`; for element-wise work.
template <class Range>
void parallel_ranges(int64_t size, int64_t grain, int threads, Range&& range) {
  if (size <= 0) return;
  int64_t pieces = std::max<int64_t>(1, std::min<int64_t>(threads, size / std::max<int64_t>(grain, 1)));
  parallel_tasks(pieces, threads, [&](int64_t piece, int) {
    range(size * piece / pieces, size * (piece + 1) / pieces);
  });
}

}  // namespace pyfast
