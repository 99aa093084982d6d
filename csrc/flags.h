// Counters in memory that several processes map: one process raises them, others wait. Values are epochs: they only grow
// (modulo 2^32) and are never reset.
#pragma once
#include <poll.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pyfast {

// A cache line of its own, so that raising one does not take the line of another from those who poll it.
struct alignas(64) Flag {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;  // how many sleep in the kernel: raising wakes nobody, and costs no call, at 0
};
static_assert(sizeof(Flag) == 64 && std::atomic<uint32_t>::is_always_lock_free, "the layout is shared by processes");

// The process that raises a flag: how those who wait learn that it never will.
struct Peer {
  const Flag* failed;  // raised when it gives up
  int64_t process;     // its pidfd, readable once it has ended
};

enum class Arrival : int { arrived = 0, ended = 1, gave_up = 2, late = 3 };

inline bool reached(const Flag& flag, uint32_t epoch) {
  return int32_t(flag.value.load(std::memory_order_acquire) - epoch) >= 0;
}

inline void raise_flag(Flag& flag, uint32_t epoch) {
  flag.value.store(epoch, std::memory_order_seq_cst);  // before the look at `sleepers`, which rise before they look at it
#if defined(__linux__)
  if (flag.sleepers.load(std::memory_order_seq_cst) > 0)
    syscall(SYS_futex, &flag.value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

namespace detail {

inline void sleep_on(Flag& flag, uint32_t epoch, long nanoseconds) {
  timespec limit{0, nanoseconds};
#if defined(__linux__)
  flag.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t seen = flag.value.load(std::memory_order_seq_cst);
  if (int32_t(seen - epoch) < 0) syscall(SYS_futex, &flag.value, FUTEX_WAIT, seen, &limit, nullptr, 0);
  flag.sleepers.fetch_sub(1, std::memory_order_seq_cst);
#else
  limit.tv_nsec = 100000;
  nanosleep(&limit, nullptr);
#endif
}

inline Arrival look_at(const Peer& peer, const Flag& flag, uint32_t epoch) {
  pollfd process{int(peer.process), POLLIN, 0};
  const bool ended = poll(&process, 1, 0) > 0, gave_up = peer.failed->value.load() != 0;
  if (reached(flag, epoch)) return Arrival::arrived;  // it had done its part before it ended
  return ended ? Arrival::ended : gave_up ? Arrival::gave_up : Arrival::late;
}

}  // namespace detail

// Wait until `flag` has reached `epoch`: poll for 20 us, then give the core away (a pure spin costs a scheduler slice
// when ranks outnumber cores), then sleep, looking now and then whether the peer is still there.
inline Arrival wait_for(Flag& flag, uint32_t epoch, const Peer& peer, double timeout_s) {
  using Clock = std::chrono::steady_clock;
  if (reached(flag, epoch)) return Arrival::arrived;
  const auto start = Clock::now();
  auto waited = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  while (waited() < 20e-6)
    for (int i = 0; i < 16; ++i) {
      if (reached(flag, epoch)) return Arrival::arrived;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  while (waited() < 500e-6) {
    if (reached(flag, epoch)) return Arrival::arrived;
    sched_yield();
  }
  for (;;) {
    detail::sleep_on(flag, epoch, 20000000);
    if (reached(flag, epoch)) return Arrival::arrived;
    const Arrival state = detail::look_at(peer, flag, epoch);
    if (state != Arrival::late || waited() > timeout_s) return state;
  }
}

}  // namespace pyfast
