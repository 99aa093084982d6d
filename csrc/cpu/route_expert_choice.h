// Expert choice (Zhou et al. 2022): experts choose tokens.
#pragma once
#include "parallel.h"
#include "route_blocks.h"
#include "route_capacity.h"
#include "route_router.h"

namespace pyfast {
namespace route {

// Each expert takes the tokens with its greatest keys, ties to the earliest; a token
// keeps the best `slots` of those that took it, in descending order of its keys, ties to the lowest expert.
template <class T>
class ExpertChoice {
 public:
  using C = compute_t<T>;

  explicit ExpertChoice(const RouteForward& f)
      : f_(f), a_(f.route), blocks_(blocks_of(a_)), keys_(a_.experts * a_.tokens), taken_(a_.experts * a_.tokens, 0) {}

  void run() {
    rows([&](Router<T>& router, int64_t t, Partial<C>& sums) {
      const C* keys = router.token_keys(t, sums);
      for (int64_t e = 0; e < a_.experts; ++e) keys_[e * a_.tokens + t] = keys[e];
    });
    int64_t valid = 0;
    C z_sum = 0;
    for (const Partial<C>& sums : partial_) {
      valid += sums.valid_tokens;
      z_sum += sums.z_sum;
    }
    *f_.valid_tokens = valid;
    if (f_.z_sum) *static_cast<C*>(f_.z_sum) = z_sum;
    const int64_t capacity = std::min(capacity_of(a_, valid), valid);
    std::fill(f_.load, f_.load + a_.experts, capacity);
    parallel_tasks(a_.experts, a_.threads, [&](int64_t e, int) { take(e, capacity); });
    rows([&](Router<T>& router, int64_t t, Partial<C>&) { collect(router, t); });
    std::fill(f_.counts, f_.counts + a_.experts, int64_t(0));
    *f_.dropped = capacity * a_.experts;
    for (int64_t slot = 0; slot < a_.tokens * a_.slots; ++slot) {
      f_.experts[slot] = f_.chosen[slot];
      if (f_.chosen[slot] < 0) continue;
      ++f_.counts[f_.chosen[slot]];
      --*f_.dropped;
    }
  }

 private:
  bool is_padding(const Block& block, int64_t t) const {
    return block.scope < 0 || (a_.valid && !a_.valid[t]);
  }

  // row(router, t, sums of its block) for every token that is no padding.
  template <class Row>
  void rows(Row&& row) {
    partial_.assign(blocks_.size(), Partial<C>{});
    parallel_tasks(int64_t(blocks_.size()), a_.threads, [&](int64_t b, int) {
      static thread_local Scratch scratch;
      Router<T> router(f_, scratch);
      for (int64_t t = blocks_[b].begin; t < blocks_[b].end; ++t)
        if (!is_padding(blocks_[b], t)) row(router, t, partial_[b]);
    });
  }

  void take(int64_t e, int64_t capacity) {
    const C* keys = keys_.data() + e * a_.tokens;
    std::vector<int64_t> tokens;
    for (const Block& block : blocks_)
      for (int64_t t = block.begin; t < block.end; ++t)
        if (!is_padding(block, t)) tokens.push_back(t);
    if (capacity < int64_t(tokens.size()))
      std::nth_element(tokens.begin(), tokens.begin() + capacity, tokens.end(), [&](int64_t p, int64_t q) {
        return keys[p] > keys[q] || (keys[p] == keys[q] && p < q);
      });
    for (int64_t i = 0; i < capacity; ++i) taken_[tokens[i] * a_.experts + e] = 1;
  }

  void collect(Router<T>& router, int64_t t) {
    std::vector<int32_t> ids;
    for (int64_t e = 0; e < a_.experts; ++e)
      if (taken_[t * a_.experts + e]) ids.push_back(int32_t(e));
    std::stable_sort(ids.begin(), ids.end(), [&](int32_t p, int32_t q) {
      return keys_[p * a_.tokens + t] > keys_[q * a_.tokens + t];
    });
    const int64_t count = std::min<int64_t>(a_.slots, int64_t(ids.size()));
    std::copy(ids.begin(), ids.begin() + count, f_.chosen + t * a_.slots);
    router.weigh_chosen(t, ids.data(), count, static_cast<C*>(f_.weights) + t * a_.slots);
  }

  const RouteForward& f_;
  const Route& a_;
  const std::vector<Block> blocks_;
  std::vector<C> keys_;         // [E, T]
  std::vector<uint8_t> taken_;  // [T, E]
  std::vector<Partial<C>> partial_;
};

}  // namespace route
}  // namespace pyfast
