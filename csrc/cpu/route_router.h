// The routing of one token: scores, choice, weights, and its share of what is summed over tokens.
#pragma once
#include "parallel.h"
#include "route_blocks.h"
#include "route_row.h"

namespace pyfast {
namespace route {

// One block's share of everything that is summed over tokens.
template <class C>
struct Partial {
  int64_t* load;
  C* score_sums;  // null: not asked for
  C z_sum;
  int64_t valid_tokens;
};

template <class T>
class Router {
 public:
  using C = compute_t<T>;
  static constexpr int L = Vec<C>::size;

  Router(const RouteForward& f, Scratch& scratch)
      : f_(f), a_(f.route), P_(padded<C>(a_.experts)), K_(padded<C>(a_.slots)) {
    x_ = scratch.get<C>(3 * P_ + K_ + a_.groups);
    keys_ = x_ + P_;
    scores_ = keys_ + P_;
    chosen_ = scores_ + P_;
    group_scores_ = chosen_ + K_;
    const bool softmax = a_.score != RouteScore::sigmoid;
    by_score_ = a_.score != RouteScore::softmax_chosen && (a_.bias || (a_.groups > 1 && a_.group_top2));
    softmax_over_chosen_ = a_.score == RouteScore::softmax_chosen || (softmax && a_.normalize);
    all_scores_ = by_score_ || f_.score_sums || by_experts();
    row_softmax_ = f_.z_sum || (softmax && (all_scores_ || !softmax_over_chosen_));
  }

  // Scores, choice and weights of token t, added to the sums.
  void token(int64_t t, int32_t* ids, C* weights, Partial<C>& sums) {
    const Softmax<C> softmax = prepare(t);
    choose(a_.token_ids ? a_.token_ids[t] : t, ids);
    weigh(ids, a_.slots, weights, softmax);
    for (int64_t k = 0; k < a_.slots; ++k) ++sums.load[ids[k]];
    if (sums.score_sums) add_scores(sums.score_sums);
    add_token(softmax, sums);
  }

  // For expert choice: what experts choose token t by, [E].
  const C* token_keys(int64_t t, Partial<C>& sums) {
    add_token(prepare(t), sums);
    return make_keys(false, t);
  }

  // For expert choice: the weights of the first `count` experts, 0 for the other slots.
  void weigh_chosen(int64_t t, const int32_t* ids, int64_t count, C* weights) {
    weigh(ids, count, weights, prepare(t));
  }

 private:
  bool by_experts() const {
    return a_.choice == RouteChoice::expert_choice && a_.score != RouteScore::softmax_chosen;
  }

  Softmax<C> prepare(int64_t t) {
    const T* row = static_cast<const T*>(a_.logits) + t * a_.logits_stride;
    load_row<T, C>(row, a_.experts, (a_.tokens - 1 - t) * a_.logits_stride + a_.experts, x_);
    const int64_t id = a_.token_ids ? a_.token_ids[t] : t;
    if (a_.jitter > 0)
      for (int64_t e = 0; e < a_.experts; ++e) x_[e] *= noise_factor<C>(a_.jitter_key, id, e, a_.jitter);
    Softmax<C> softmax{};
    if (row_softmax_) softmax = softmax_of<C>(x_, a_.experts, all_scores_ ? scores_ : nullptr);
    if (all_scores_) scale_scores(softmax);
    return softmax;
  }

  void add_token(const Softmax<C>& softmax, Partial<C>& sums) {
    if (f_.z_sum && softmax.sum != C(0)) sums.z_sum += softmax.lse() * softmax.lse();
    ++sums.valid_tokens;
  }

  // scores_: exp(x - reference) -> p, or from x for a sigmoid; 0 beyond E.
  void scale_scores(const Softmax<C>& softmax) {
    if (a_.score != RouteScore::sigmoid) {
      for (int64_t j = 0; j < P_; j += L) store(scores_ + j, load(scores_ + j) * softmax.inverse);
      return;
    }
    for (int64_t j = 0; j < P_; j += L) store(scores_ + j, sigmoid<C>(load(x_ + j), nullptr));
  }

  void add_scores(C* sums) {
    C factor = C(1);
    if (a_.score == RouteScore::sigmoid) {
      vec_t<C> sum = zero<C>();
      for (int64_t j = 0; j < P_; j += L) sum += load(scores_ + j);
      factor = C(1) / (horizontal_sum<C>(sum) + C(kTiny));
    }
    for (int64_t j = 0; j < P_; j += L) store(sums + j, load(sums + j) + load(scores_ + j) * factor);
  }

  void choose(int64_t id, int32_t* ids) {
    if (a_.choice == RouteChoice::balanced) {
      for (int64_t k = 0; k < a_.slots; ++k) ids[k] = int32_t(((id % a_.experts + a_.experts) % a_.experts * a_.slots + k) % a_.experts);
      return;
    }
    const bool random = a_.random > 0 && uniform(a_.random_key, id, 65535) < a_.random;
    if (random || by_score_ || a_.bias || a_.groups > 1 || has_nan(x_, P_))
      make_keys(random, id);
    else
      for (int64_t j = 0; j < P_; j += L) store(keys_ + j, load(x_ + j));
    best_of<C>(keys_, a_.experts, a_.slots, ids);
  }

  // What experts are chosen by. NaN stands for what must not be chosen, so a NaN among the logits becomes +inf; where
  // only the score is NaN (a softmax beside a NaN), the logit stands in for it.
  const C* make_keys(bool random, int64_t id) {
    const C* from = by_score_ || by_experts() ? scores_ : x_;
    for (int64_t e = 0; e < a_.experts; ++e) {
      C key = random ? C(uniform(a_.random_key, id, e)) : a_.bias ? from[e] + C(a_.bias[e]) : from[e];
      if (key != key) key = x_[e];
      keys_[e] = key == key ? key : kInfinity<C>;
    }
    std::fill(keys_ + a_.experts, keys_ + P_, std::numeric_limits<C>::quiet_NaN());
    if (a_.groups > 1) exclude_groups();
    return keys_;
  }

  // All but the best groups of keys_ -> NaN; ties to the lowest group.
  void exclude_groups() {
    const int64_t size = a_.experts / a_.groups;
    for (int64_t g = 0; g < a_.groups; ++g) {
      C first = -kInfinity<C>, second = -kInfinity<C>;
      for (int64_t e = g * size; e < (g + 1) * size; ++e) {
        const C key = keys_[e], smaller = key < first ? key : first;
        second = smaller > second ? smaller : second;
        first = key > first ? key : first;
      }
      const C score = a_.group_top2 ? first + second : first;
      group_scores_[g] = score == score ? score : kInfinity<C>;  // inf - inf
    }
    for (int64_t g = 0; g < a_.groups; ++g) {
      int64_t rank = 0;
      for (int64_t h = 0; h < a_.groups; ++h)
        rank += group_scores_[h] > group_scores_[g] || (group_scores_[h] == group_scores_[g] && h < g);
      if (rank >= a_.top_groups)
        std::fill(keys_ + g * size, keys_ + (g + 1) * size, std::numeric_limits<C>::quiet_NaN());
    }
  }

  void weigh(const int32_t* ids, int64_t k, C* weights, const Softmax<C>& softmax) {
    for (int64_t i = 0; i < K_; ++i) chosen_[i] = i < k ? x_[ids[i]] : -kInfinity<C>;
    C divisor = softmax.sum;
    if (a_.score == RouteScore::sigmoid) {
      C sum = 0;
      for (int64_t i = 0; i < K_; i += L) store(chosen_ + i, sigmoid<C>(load(chosen_ + i), nullptr));
      for (int64_t i = 0; i < k; ++i) sum += chosen_[i];
      divisor = a_.normalize ? sum + C(kTiny) : C(1);
    } else if (softmax_over_chosen_) {
      divisor = softmax_of<C>(chosen_, k, chosen_).sum;
    } else {
      for (int64_t i = 0; i < K_; i += L) store(chosen_ + i, exp<C>(load(chosen_ + i) - softmax.reference));
    }
    if (divisor == C(0)) divisor = C(1);  // nothing but -inf: weights 0
    for (int64_t i = 0; i < k; ++i) weights[i] = chosen_[i] / divisor * C(a_.scale);
    std::fill(weights + k, weights + a_.slots, C(0));
  }

  const RouteForward& f_;
  const Route& a_;
  const int64_t P_, K_;
  C *x_, *keys_, *scores_, *chosen_, *group_scores_;
  bool by_score_;             // chosen by p (+ bias), not by x (+ bias)
  bool softmax_over_chosen_;  // the weights
  bool all_scores_;           // p of every expert is needed
  bool row_softmax_;          // the softmax's reference and sum over all experts are needed
};

}  // namespace route
}  // namespace pyfast
