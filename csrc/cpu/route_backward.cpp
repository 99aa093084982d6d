// Routing backward: the gradient by the logits x, row by row, from those of the weights, score sums and z sum.
//
// softmax p over all: dx = p (G - <p, G>) + 2 dz lse p,  G = what reaches p from weights and score sums
// softmax q over the chosen: dx_c = scale q (g - <q, g>)
// sigmoid s: dx = s' dS,  weights s / D: dS = scale (g - <g, s / D>) / D
//
// Nothing is divided by a weight, so a weight of exactly 0 has the right gradient. Scores are computed again.
#include "parallel.h"
#include "route_blocks.h"
#include "route_row.h"

namespace pyfast {
namespace {

using namespace route;

template <class T>
class RowGradient {
 public:
  using C = compute_t<T>;
  static constexpr int L = Vec<C>::size;

  RowGradient(const RouteBackward& f, Scratch& scratch)
      : f_(f), a_(f.route), P_(padded<C>(a_.experts)), K_(padded<C>(a_.slots)) {
    x_ = scratch.get<C>(4 * P_ + 4 * K_);
    p_ = x_ + P_;
    out_ = p_ + P_;
    rounded_ = reinterpret_cast<T*>(out_ + P_);
    chosen_ = out_ + 2 * P_;
    slope_ = chosen_ + K_;
    grad_ = slope_ + K_;
    const bool softmax = a_.score != RouteScore::sigmoid;
    over_chosen_ = a_.score == RouteScore::softmax_chosen || (softmax && a_.normalize);
    dense_softmax_ = f_.dz || (softmax && (!over_chosen_ || f_.dscore_sums));
    dz_ = f_.dz ? *static_cast<const C*>(f_.dz) : C(0);
  }

  void token(int64_t t, int64_t scope) {
    const T* row = static_cast<const T*>(a_.logits) + t * a_.logits_stride;
    const int64_t id = a_.token_ids ? a_.token_ids[t] : t;
    ids_ = f_.chosen + t * a_.slots;
    load_row<T, C>(row, a_.experts, (a_.tokens - 1 - t) * a_.logits_stride + a_.experts, x_);
    if (a_.jitter > 0)
      for (int64_t e = 0; e < a_.experts; ++e) x_[e] *= noise_factor<C>(a_.jitter_key, id, e, a_.jitter);
    load_slots(t);
    std::fill(out_, out_ + P_, C(0));
    const C* dsums = f_.dscore_sums ? static_cast<const C*>(f_.dscore_sums) + scope * a_.experts : nullptr;
    if (a_.score == RouteScore::sigmoid) {
      if (dsums) add_sigmoid_sums(dsums);
      if (dense_softmax_) add_softmax(nullptr);
      add_sigmoid_weights();
    } else {
      if (dense_softmax_) add_softmax(dsums);
      if (over_chosen_) add_softmax_over_chosen();
    }
    if (a_.jitter > 0)
      for (int64_t e = 0; e < a_.experts; ++e) out_[e] *= noise_factor<C>(a_.jitter_key, id, e, a_.jitter);
    for (int64_t j = 0; j < P_; j += L) store(rounded_ + j, load(out_ + j));
    std::memcpy(static_cast<T*>(f_.dlogits) + t * a_.experts, rounded_, a_.experts * sizeof(T));
  }

 private:
  // An expert dropped the slot: it was chosen, but its weight is 0 whatever the logits are.
  static int32_t expert_of(int32_t chosen) { return chosen >= -1 ? chosen : -2 - chosen; }

  void load_slots(int64_t t) {
    const C* dweights = static_cast<const C*>(f_.dweights) + t * a_.slots;
    for (int64_t i = 0; i < K_; ++i) {
      const int32_t id = i < a_.slots ? expert_of(ids_[i]) : -1;
      chosen_[i] = id < 0 ? -kInfinity<C> : x_[id];
      grad_[i] = i < a_.slots && ids_[i] >= 0 ? dweights[i] * C(a_.scale) : C(0);
    }
  }

  C dot_slots(const C* a) const {
    vec_t<C> sum = zero<C>();
    for (int64_t i = 0; i < K_; i += L) sum += load(a + i) * load(grad_ + i);
    return horizontal_sum<C>(sum);
  }

  // values * (grad - mean) added to out_ at the chosen experts.
  void scatter(const C* values, C mean) {
    for (int64_t i = 0; i < a_.slots; ++i)
      if (const int32_t id = expert_of(ids_[i]); id >= 0) out_[id] += values[i] * (grad_[i] - mean);
  }

  void add_softmax_over_chosen() {
    const Softmax<C> s = softmax_of<C>(chosen_, K_, chosen_);
    for (int64_t i = 0; i < K_; i += L) store(chosen_ + i, load(chosen_ + i) * s.inverse);
    scatter(chosen_, dot_slots(chosen_));
  }

  void add_sigmoid_weights() {
    C sum = C(kTiny);
    for (int64_t i = 0; i < K_; i += L) {
      vec_t<C> slope;
      store(chosen_ + i, sigmoid<C>(load(chosen_ + i), &slope));
      store(slope_ + i, slope);
    }
    for (int64_t i = 0; i < a_.slots; ++i) sum += chosen_[i];
    const C inverse = a_.normalize ? C(1) / sum : C(1);
    const C mean = a_.normalize ? dot_slots(chosen_) * inverse : C(0);
    for (int64_t i = 0; i < K_; i += L) store(slope_ + i, load(slope_ + i) * inverse);
    scatter(slope_, mean);
  }

  // The softmax over all experts, from weights (unless those are over the chosen), score sums and z sum.
  void add_softmax(const C* dsums) {
    const Softmax<C> s = softmax_of<C>(x_, a_.experts, p_);
    for (int64_t e = 0; e < a_.experts; ++e) {
      p_[e] *= s.inverse;
      if (dsums) out_[e] += dsums[e];
    }
    if (a_.score == RouteScore::softmax && !over_chosen_)
      for (int64_t i = 0; i < a_.slots; ++i)
        if (const int32_t id = expert_of(ids_[i]); id >= 0) out_[id] += grad_[i];
    const bool sigmoid_too = a_.score == RouteScore::sigmoid;  // then out_ holds finished gradients
    C dot = 0;
    if (!sigmoid_too)
      for (int64_t e = 0; e < a_.experts; ++e) dot += p_[e] * out_[e];
    const C shift = (f_.dz && s.sum != C(0) ? C(2) * dz_ * s.lse() : C(0)) - dot;
    for (int64_t e = 0; e < a_.experts; ++e) out_[e] = sigmoid_too ? out_[e] + p_[e] * shift : p_[e] * (out_[e] + shift);
  }

  // s / (sum of s): what the balancing loss takes for probabilities.
  void add_sigmoid_sums(const C* dsums) {
    C sum = C(kTiny), dot = 0;
    for (int64_t j = 0; j < P_; j += L) {
      vec_t<C> slope;
      store(p_ + j, sigmoid<C>(load(x_ + j), &slope));
      store(out_ + j, slope);
    }
    for (int64_t e = 0; e < a_.experts; ++e) {
      sum += p_[e];
      dot += p_[e] * dsums[e];
    }
    const C inverse = C(1) / sum, mean = dot * inverse;
    for (int64_t e = 0; e < a_.experts; ++e) out_[e] *= (dsums[e] - mean) * inverse;
  }

  const RouteBackward& f_;
  const Route& a_;
  const int64_t P_, K_;
  C *x_, *p_, *out_, *chosen_, *slope_, *grad_;
  T* rounded_;
  const int32_t* ids_ = nullptr;
  bool over_chosen_, dense_softmax_;
  C dz_;
};

template <class T>
void backward_block(const RouteBackward& f, const Block& block) {
  static thread_local Scratch scratch;
  RowGradient<T> gradient(f, scratch);
  T* dlogits = static_cast<T*>(f.dlogits);
  for (int64_t t = block.begin; t < block.end; ++t) {
    if (block.scope < 0 || (f.route.valid && !f.route.valid[t]))
      std::memset(dlogits + t * f.route.experts, 0, f.route.experts * sizeof(T));
    else
      gradient.token(t, block.scope);
  }
}

template <class T>
void backward(const RouteBackward& f) {
  const std::vector<Block> blocks = blocks_of(f.route);
  parallel_tasks(int64_t(blocks.size()), f.route.threads,
                 [&](int64_t b, int) { backward_block<T>(f, blocks[b]); });
}

}  // namespace

void route_backward(const RouteBackward& f) {
  with_dtype(f.route.dtype, [&](auto* tag) { backward<std::decay_t<decltype(*tag)>>(f); });
}

}  // namespace pyfast
