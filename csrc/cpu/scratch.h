// Working memory that a thread keeps from call to call: fresh pages cost more than many kernels that would fill them.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <new>

namespace pyfast {

// A growing, cache-line aligned block. `get` gives room for `count` values of C, with undefined contents.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(memory_); }

  template <class C>
  C* get(int64_t count) {
    const size_t bytes = (size_t(count) * sizeof(C) + 4095) / 4096 * 4096;
    if (bytes > bytes_) {
      std::free(memory_);
      bytes_ = 0;
      memory_ = std::aligned_alloc(4096, bytes);
      if (!memory_) throw std::bad_alloc();
      bytes_ = bytes;
    }
    return static_cast<C*>(memory_);
  }

 private:
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace pyfast
