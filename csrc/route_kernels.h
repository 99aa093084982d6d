// Arguments of the routing kernels: T tokens, E experts, K slots a token, S scopes (documents, or one for all tokens).
// Included by kernels.h.
#pragma once
#include <cstdint>

namespace pyfast {

enum class RouteScore : int32_t { softmax = 0, softmax_chosen = 1, sigmoid = 2 };
enum class RouteChoice : int32_t { top_k = 0, balanced = 1, expert_choice = 2 };

// What forward and backward share.
struct Route {
  DType dtype;  // of logits; C below: float32 (float64 for f64)
  const void* logits;
  int64_t tokens, experts, slots, logits_stride;
  const float* bias;          // [E]; null: none
  const uint8_t* valid;       // [T]; null: all
  const int64_t* starts;      // [S + 1] ascending; tokens outside are padding. null: one scope, all tokens
  const int64_t* token_ids;   // [T] what noise and balanced routing go by; null: 0, 1, ...
  int64_t scopes;
  RouteScore score;
  bool normalize;
  double scale;
  int64_t groups, top_groups;  // groups 1: no limit
  bool group_top2;             // a group's score: the sum of its two best, else its best
  RouteChoice choice;
  double jitter;               // logits times uniform in [1 - jitter, 1 + jitter]; 0: none
  double random;               // probability that a token is routed at random
  int64_t jitter_key, random_key;
  int64_t k;                   // experts a token on average (expert choice), else = slots
  int64_t capacity;            // slots an expert takes; -1: see capacity_factor
  double capacity_factor;      // capacity = ceil(factor * (valid tokens * k) / E); 0: no limit
  bool drop_by_probability;
  int threads;
};

struct RouteForward {
  Route route;
  int32_t* experts;   // [T, K]
  void* weights;      // [T, K] C
  int32_t* chosen;    // [T, K] as experts, but -2 - e where expert e dropped the slot; null: nothing can be dropped (or T = 0)
  int64_t* load;      // [S, E] slots that chose the expert
  int64_t* counts;    // [E] slots that it keeps; null like chosen
  int64_t* dropped;   // scalar
  int64_t* valid_tokens;  // [S]
  void* score_sums;   // [S, E] C; null: not asked for
  void* z_sum;        // scalar C; null: not asked for
};

struct RouteBackward {
  Route route;
  const int32_t* chosen;     // [T, K]
  const void* dweights;      // [T, K] C
  const void* dscore_sums;   // [S, E] C; null: 0
  const void* dz;            // scalar C; null: 0
  void* dlogits;             // [T, E] contiguous, like logits
};

}  // namespace pyfast
