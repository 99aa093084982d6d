// CUDA kernels on a CPU, for tests: csrc/cuda/launch.h includes this file where a C++ compiler reads a .cu file.
//
// Blocks run one after another. Each thread of a block is a fiber that runs until it waits: at __syncthreads for all
// threads of its block, at a warp function (__shfl_sync, __ballot_sync, ...) for the lanes its mask names. Found are
//
//   a missing barrier           threads run in the order that simt_set_order chose: some order reads too early, and
//                               shared memory holds rubbish until it is written
//   a barrier some never reach  no thread can go on: the launch fails and says where they wait
//   a write out of bounds       compile with -fsanitize=address: shared memory is a heap block of exactly the bytes asked
//   a false DEVICE_CHECK        the launch fails with the condition
//
// Not modelled: blocks that wait for each other, the memory model, asynchronous copies, tensor cores, clusters.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  unsigned size() const { return x * y * z; }
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace simt {

constexpr int kLanes = 32;
constexpr size_t kStackBytes = 64 << 10;

enum class Wait { nothing, block, warp };

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  dim3 index;
  Wait wait = Wait::nothing;
  bool ended = false;
  const char* place = "";                    // what it waits in
  uint32_t mask = 0;                         // the lanes it waits for
  uint64_t given = 0;                        // its value in a warp function,
  std::array<uint64_t, kLanes> received{};   // and everybody's
  void* fake_stack = nullptr;                // AddressSanitizer's
};

struct State {
  int order = 0;  // 0 ascending, 1 descending, others: the seed of a shuffle before every turn
  std::string error, last_error;
  // of the launch that runs
  dim3 grid, block, block_index;
  std::vector<Thread> threads;
  Thread* current = nullptr;
  ucontext_t scheduler;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
  std::function<void()> kernel;
  std::unique_ptr<char[]> shared;
  std::exception_ptr failure;
};

inline State& state() {
  static State instance;  // one launch at a time
  return instance;
}

// ---- switching between fibers ---------------------------------------------------------------------------------------

inline void before_switch(void** fake_stack, const void* bottom, size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(fake_stack, bottom, bytes);
#else
  (void)fake_stack, (void)bottom, (void)bytes;
#endif
}

inline void after_switch(void* fake_stack, const void** bottom, size_t* bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, bottom, bytes);
#else
  (void)fake_stack, (void)bottom, (void)bytes;
#endif
}

inline void to_scheduler(bool for_good) {
  State& s = state();
  Thread& me = *s.current;
  before_switch(for_good ? nullptr : &me.fake_stack, s.scheduler_stack, s.scheduler_stack_bytes);
  swapcontext(&me.context, &s.scheduler);
  after_switch(me.fake_stack, &s.scheduler_stack, &s.scheduler_stack_bytes);
}

inline void to_thread(Thread& thread) {
  State& s = state();
  void* fake_stack = nullptr;
  s.current = &thread;
  before_switch(&fake_stack, thread.stack.get(), kStackBytes);
  swapcontext(&s.scheduler, &thread.context);
  after_switch(fake_stack, nullptr, nullptr);
}

inline void thread_main() {
  State& s = state();
  after_switch(nullptr, &s.scheduler_stack, &s.scheduler_stack_bytes);
  try {
    s.kernel();
  } catch (...) {
    s.failure = std::current_exception();
  }
  s.current->ended = true;
  to_scheduler(true);
}

inline void start(Thread& thread) {
  if (!thread.stack) thread.stack.reset(new char[kStackBytes]);
  thread.wait = Wait::nothing;
  thread.ended = false;
  thread.fake_stack = nullptr;
  getcontext(&thread.context);
  thread.context.uc_stack.ss_sp = thread.stack.get();
  thread.context.uc_stack.ss_size = kStackBytes;
  thread.context.uc_link = nullptr;
  makecontext(&thread.context, thread_main, 0);
}

// ---- one block ------------------------------------------------------------------------------------------------------

// Lets every thread that can run do so once, in the chosen order; whether any could.
inline bool take_turns(std::mt19937& random) {
  State& s = state();
  std::vector<size_t> turns(s.threads.size());
  for (size_t i = 0; i < turns.size(); ++i) turns[i] = s.order == 1 ? turns.size() - 1 - i : i;
  if (s.order > 1) std::shuffle(turns.begin(), turns.end(), random);
  bool any = false;
  for (size_t i : turns) {
    Thread& thread = s.threads[i];
    if (thread.ended || thread.wait != Wait::nothing) continue;
    to_thread(thread);
    any = true;
    if (s.failure) std::rethrow_exception(s.failure);
  }
  return any;
}

// Whether all lanes that `thread` waits for wait for the same ones in the same function.
inline bool warp_has_arrived(const Thread* warp, size_t lanes, const Thread& thread) {
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if (!(thread.mask >> lane & 1)) continue;
    if (lane >= lanes) return false;
    const Thread& other = warp[lane];
    if (other.ended || other.wait != Wait::warp || other.mask != thread.mask || other.place != thread.place) return false;
  }
  return true;
}

// Exchanges the values of lanes that have all arrived; whether any had.
inline bool exchange_in_warps() {
  State& s = state();
  bool any = false;
  for (size_t i = 0; i < s.threads.size(); ++i) {
    Thread* const warp = &s.threads[i / kLanes * kLanes];
    const size_t lanes = std::min<size_t>(kLanes, s.threads.size() - i / kLanes * kLanes);
    const Thread& thread = s.threads[i];
    if (thread.ended || thread.wait != Wait::warp || !warp_has_arrived(warp, lanes, thread)) continue;
    const uint32_t mask = thread.mask;
    std::array<uint64_t, kLanes> values{};
    for (size_t lane = 0; lane < lanes; ++lane)
      if (mask >> lane & 1) values[lane] = warp[lane].given;
    for (size_t lane = 0; lane < lanes; ++lane) {
      if (!(mask >> lane & 1)) continue;
      warp[lane].received = values;
      warp[lane].wait = Wait::nothing;
    }
    any = true;
  }
  return any;
}

// Opens the barrier when every thread that has not ended waits at it; whether there are any.
inline bool open_barrier() {
  State& s = state();
  bool any = false;
  for (const Thread& thread : s.threads) {
    if (thread.ended) continue;
    if (thread.wait != Wait::block)
      throw std::runtime_error(std::string("threads wait for ever: one in ") + thread.place +
                               ", for lanes or threads that never come");
    any = true;
  }
  for (Thread& thread : s.threads) thread.wait = Wait::nothing;
  return any;
}

inline void run_block(size_t shared_bytes) {
  State& s = state();
  s.shared.reset(new char[shared_bytes]);
  std::memset(s.shared.get(), 0xCD, shared_bytes);
  for (Thread& thread : s.threads) start(thread);
  std::mt19937 random(s.order);
  for (;;) {
    bool moved = take_turns(random);
    moved |= exchange_in_warps();
    if (!moved && !open_barrier()) return;
  }
}

inline void launch(dim3 grid, dim3 block, size_t shared_bytes, std::function<void()> kernel) {
  State& s = state();
  if (!s.error.empty()) return;  // as in CUDA: after an error nothing runs until it has been read
  try {
    if (grid.size() == 0 || block.size() == 0 || block.size() > 1024) throw std::runtime_error("invalid configuration");
    s.grid = grid;
    s.block = block;
    s.kernel = std::move(kernel);
    s.failure = nullptr;
    s.threads.resize(block.size());  // stacks are kept from launch to launch
    for (unsigned i = 0; i < block.size(); ++i)
      s.threads[i].index = dim3(i % block.x, i / block.x % block.y, i / (block.x * block.y));
    for (unsigned i = 0; i < grid.size(); ++i) {
      s.block_index = dim3(i % grid.x, i / grid.x % grid.y, i / (grid.x * grid.y));
      run_block(shared_bytes);
    }
  } catch (const std::exception& error) {
    s.error = error.what();
  }
  s.shared.reset();
}

// ---- what kernels call ----------------------------------------------------------------------------------------------

inline int lane() {
  const State& s = state();
  return int((s.current - s.threads.data()) % kLanes);
}

inline void wait_for_block() {
  Thread& me = *state().current;
  me.wait = Wait::block;
  me.place = "__syncthreads";
  to_scheduler(false);
}

// What the lanes of the mask gave, once all of them have come to the same place.
inline const std::array<uint64_t, kLanes>& exchange(const char* place, uint32_t mask, uint64_t given) {
  Thread& me = *state().current;
  if (!(mask >> lane() & 1)) throw std::runtime_error(std::string(place) + " is called by a lane that its mask leaves out");
  me.wait = Wait::warp;
  me.place = place;
  me.mask = mask;
  me.given = given;
  to_scheduler(false);
  return me.received;
}

template <class T>
uint64_t bits_of(T value) {
  static_assert(sizeof(T) <= 8, "warp functions take up to 64 bits");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

// The value of lane `source` if the mask names it; what CUDA leaves undefined is refused.
template <class T>
T shuffle(const char* place, uint32_t mask, T value, int source) {
  const auto& received = exchange(place, mask, bits_of(value));
  if (!(mask >> source & 1)) throw std::runtime_error(std::string(place) + " reads from a lane that its mask leaves out");
  T result;
  std::memcpy(&result, &received[source], sizeof(T));
  return result;
}

inline void check(bool condition, const char* text) {
  if (!condition) throw std::runtime_error(std::string("DEVICE_CHECK failed: ") + text);
}

}  // namespace simt

#define threadIdx (simt::state().current->index)
#define blockIdx (simt::state().block_index)
#define blockDim (simt::state().block)
#define gridDim (simt::state().grid)

inline void __syncthreads() { simt::wait_for_block(); }
inline void __syncwarp(uint32_t mask = 0xffffffffu) { simt::exchange("__syncwarp", mask, 0); }

template <class T>
T __shfl_sync(uint32_t mask, T value, int source) {
  return simt::shuffle("__shfl_sync", mask, value, source & (simt::kLanes - 1));
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int other) {
  return simt::shuffle("__shfl_xor_sync", mask, value, simt::lane() ^ other);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, unsigned distance) {
  const int source = simt::lane() - int(distance);
  return simt::shuffle("__shfl_up_sync", mask, value, source < 0 ? simt::lane() : source);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T value, unsigned distance) {
  const int source = simt::lane() + int(distance);
  return simt::shuffle("__shfl_down_sync", mask, value, source >= simt::kLanes ? simt::lane() : source);
}
template <class T>
uint32_t __match_any_sync(uint32_t mask, T value) {
  const uint64_t mine = simt::bits_of(value);
  const auto& received = simt::exchange("__match_any_sync", mask, mine);
  uint32_t same = 0;
  for (int lane = 0; lane < simt::kLanes; ++lane)
    if ((mask >> lane & 1) && received[lane] == mine) same |= 1u << lane;
  return same;
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate) {
  const auto& received = simt::exchange("__ballot_sync", mask, predicate != 0);
  uint32_t votes = 0;
  for (int lane = 0; lane < simt::kLanes; ++lane)
    if ((mask >> lane & 1) && received[lane]) votes |= 1u << lane;
  return votes;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

// ---- types and host functions ---------------------------------------------------------------------------------------

struct __half {
  uint16_t bits;
};
struct __nv_bfloat16 {
  uint16_t bits;
};

inline float __half2float(__half value) {
  _Float16 half;
  std::memcpy(&half, &value, sizeof(half));
  return float(half);
}
inline __half __float2half_rn(float value) {
  const _Float16 half = _Float16(value);
  __half result;
  std::memcpy(&result, &half, sizeof(half));
  return result;
}
inline float __bfloat162float(__nv_bfloat16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  if (value != value) return {0x7fff};
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorLaunchFailure = 719 };

// Whether a launch failed since the last call, and of the last failure, why.
inline cudaError_t cudaGetLastError() {
  simt::State& s = simt::state();
  if (s.error.empty()) return cudaSuccess;
  s.last_error = std::move(s.error);
  s.error.clear();
  return cudaErrorLaunchFailure;
}
inline const char* cudaGetErrorString(cudaError_t) { return simt::state().last_error.c_str(); }

#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  simt::launch(dim3(grid), dim3(block), shared_bytes, [=] { kernel(__VA_ARGS__); })
#define DYNAMIC_SHARED(type, name) type* const name = reinterpret_cast<type*>(simt::state().shared.get())
#define DEVICE_CHECK(condition) simt::check(condition, #condition)

extern "C" __attribute__((visibility("default"), used)) inline void simt_set_order(int order) {
  simt::state().order = order;
}
