// Routing forward, in one pass over the logits: scores, the best k, weights, and the sums that balancing needs.
//
// Scores        p = softmax(x) or sigmoid(x); weights = scale * p of the chosen, divided by their sum if normalised
//               (for a softmax: the softmax over the chosen, whatever the size of the others)
// Choice        the greatest x, or p + bias with a bias; groups: only experts of the best groups may be chosen
// score_sums    sum over a scope's tokens of p, divided by its sum over the experts (1 for a softmax)
// z_sum         sum over tokens of (log sum exp x)^2
//
// A block of tokens belongs to one task; what is summed over tokens is summed within blocks, and those in order.
#include <memory>

#include "parallel.h"
#include "route_blocks.h"
#include "route_capacity.h"
#include "route_expert_choice.h"
#include "route_router.h"

namespace pyfast {
namespace {

using namespace route;

template <class T>
void route_block(const RouteForward& f, const Block& block, Partial<compute_t<T>>& sums) {
  using C = compute_t<T>;
  static thread_local Scratch scratch;
  const int64_t k = f.route.slots;
  Router<T> router(f, scratch);
  int32_t* ids = f.chosen ? f.chosen : f.experts;
  C* weights = static_cast<C*>(f.weights);
  for (int64_t t = block.begin; t < block.end; ++t) {
    if (block.scope < 0 || (f.route.valid && !f.route.valid[t])) {
      std::fill(ids + t * k, ids + (t + 1) * k, -1);
      std::fill(weights + t * k, weights + (t + 1) * k, C(0));
    } else {
      router.token(t, ids + t * k, weights + t * k, sums);
    }
  }
}

template <class T>
void forward(const RouteForward& f) {
  if (f.route.choice == RouteChoice::expert_choice) {
    std::fill(f.chosen, f.chosen + f.route.tokens * f.route.slots, -1);
    std::fill_n(static_cast<compute_t<T>*>(f.weights), f.route.tokens * f.route.slots, compute_t<T>(0));
    return ExpertChoice<T>(f).run();
  }

  using C = compute_t<T>;
  const Route& a = f.route;
  const std::vector<Block> blocks = blocks_of(a);
  const int64_t count = int64_t(blocks.size()), P = padded<C>(a.experts);
  std::vector<int64_t> loads(count * a.experts, 0);
  std::vector<C> score_sums(f.score_sums ? count * P : 0, C(0));
  std::vector<Partial<C>> partial(count);
  parallel_tasks(count, a.threads, [&](int64_t b, int) {
    partial[b] = {loads.data() + b * a.experts, f.score_sums ? score_sums.data() + b * P : nullptr, C(0), 0};
    route_block<T>(f, blocks[b], partial[b]);
  });
  std::fill(f.load, f.load + a.scopes * a.experts, int64_t(0));
  std::fill(f.valid_tokens, f.valid_tokens + a.scopes, int64_t(0));
  C* sums = static_cast<C*>(f.score_sums);
  if (sums) std::fill(sums, sums + a.scopes * a.experts, C(0));
  C z_sum = 0;
  for (int64_t b = 0; b < count; ++b) {
    const int64_t scope = blocks[b].scope;
    if (scope < 0) continue;
    for (int64_t e = 0; e < a.experts; ++e) f.load[scope * a.experts + e] += partial[b].load[e];
    if (sums)
      for (int64_t e = 0; e < a.experts; ++e) sums[scope * a.experts + e] += partial[b].score_sums[e];
    f.valid_tokens[scope] += partial[b].valid_tokens;
    z_sum += partial[b].z_sum;
  }
  if (f.z_sum) *static_cast<C*>(f.z_sum) = z_sum;
  if (f.counts) drop_over_capacity<C>(f, blocks, loads);
}

}  // namespace

void route_forward(const RouteForward& f) {
  with_dtype(f.route.dtype, [&](auto* tag) { forward<std::decay_t<decltype(*tag)>>(f); });
}

}  // namespace pyfast
