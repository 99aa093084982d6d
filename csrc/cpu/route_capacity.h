// Dropping slots beyond an expert's capacity: by position (the first tokens stay) or by weight (the largest stay, ties to
// the earliest token).
#pragma once
#include <cmath>
#include <limits>
#include <vector>

#include "parallel.h"
#include "route_blocks.h"

namespace pyfast {
namespace route {

inline int64_t capacity_of(const Route& a, int64_t valid_tokens) {
  if (a.capacity >= 0) return a.capacity;
  const double slots = a.capacity_factor * double(valid_tokens * a.k) / double(a.experts);
  return slots < 9e18 ? int64_t(std::ceil(slots)) : std::numeric_limits<int64_t>::max();
}

// chosen[slot] of expert e becomes a dropped one.
template <class C>
inline void drop_slot(const RouteForward& f, int64_t slot) {
  f.experts[slot] = -1;
  f.chosen[slot] = -2 - f.chosen[slot];
  static_cast<C*>(f.weights)[slot] = C(0);
}

// before[b, e]: slots that chose e in the blocks before b. Overwrites the loads of the blocks.
inline void prefix_over_blocks(std::vector<int64_t>& loads, int64_t experts) {
  std::vector<int64_t> total(experts, 0);
  for (size_t b = 0; b * experts < loads.size(); ++b)
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t load = loads[b * experts + e];
      loads[b * experts + e] = total[e];
      total[e] += load;
    }
}

template <class C>
void drop_by_position(const RouteForward& f, const std::vector<Block>& blocks, std::vector<int64_t>& before,
                      int64_t capacity) {
  const Route& a = f.route;
  parallel_tasks(int64_t(blocks.size()), a.threads, [&](int64_t b, int) {
    int64_t* rank = before.data() + b * a.experts;
    for (int64_t slot = blocks[b].begin * a.slots; slot < blocks[b].end * a.slots; ++slot)
      if (f.chosen[slot] >= 0 && rank[f.chosen[slot]]++ >= capacity) drop_slot<C>(f, slot);
  });
}

template <class C>
void drop_by_weight(const RouteForward& f, const std::vector<Block>& blocks, std::vector<int64_t>& before,
                    const std::vector<int64_t>& load, int64_t capacity) {
  const Route& a = f.route;
  std::vector<int64_t> start(a.experts + 1, 0);
  for (int64_t e = 0; e < a.experts; ++e) start[e + 1] = start[e] + load[e];
  std::vector<int64_t> slots(start[a.experts]);
  parallel_tasks(int64_t(blocks.size()), a.threads, [&](int64_t b, int) {
    int64_t* rank = before.data() + b * a.experts;
    for (int64_t slot = blocks[b].begin * a.slots; slot < blocks[b].end * a.slots; ++slot)
      if (const int32_t e = f.chosen[slot]; e >= 0) slots[start[e] + rank[e]++] = slot;
  });
  const C* weights = static_cast<const C*>(f.weights);
  auto key = [&](int64_t slot) {  // NaN first: it must not vanish
    return weights[slot] == weights[slot] ? weights[slot] : std::numeric_limits<C>::infinity();
  };
  parallel_tasks(a.experts, a.threads, [&](int64_t e, int) {
    if (load[e] <= capacity) return;
    const auto first = slots.begin() + start[e], last = slots.begin() + start[e + 1], cut = first + capacity;
    std::nth_element(first, cut, last, [&](int64_t p, int64_t q) {
      return key(p) > key(q) || (key(p) == key(q) && p < q);
    });
    for (auto slot = cut; slot != last; ++slot) drop_slot<C>(f, *slot);
  });
}

// Fills experts, counts and dropped from chosen; loads [blocks, E] is overwritten.
template <class C>
void drop_over_capacity(const RouteForward& f, const std::vector<Block>& blocks, std::vector<int64_t>& loads) {
  const Route& a = f.route;
  std::copy(f.chosen, f.chosen + a.tokens * a.slots, f.experts);
  std::vector<int64_t> load(a.experts, 0);
  int64_t valid_tokens = 0;
  for (int64_t scope = 0; scope < a.scopes; ++scope) {
    valid_tokens += f.valid_tokens[scope];
    for (int64_t e = 0; e < a.experts; ++e) load[e] += f.load[scope * a.experts + e];
  }
  const int64_t capacity = capacity_of(a, valid_tokens);
  prefix_over_blocks(loads, a.experts);
  if (a.drop_by_probability)
    drop_by_weight<C>(f, blocks, loads, load, capacity);
  else
    drop_by_position<C>(f, blocks, loads, capacity);
  *f.dropped = 0;
  for (int64_t e = 0; e < a.experts; ++e) {
    f.counts[e] = std::min(load[e], capacity);
    *f.dropped += load[e] - f.counts[e];
  }
}

}  // namespace route
}  // namespace pyfast
