// The kernels of one instruction set, as a table; the only symbol this library exports.
#include "../kernels.h"

namespace pyfast {

const Runtime* g_runtime = nullptr;

void rms_norm_forward(const RmsNormForward&);
void rms_norm_backward(const RmsNormBackward&);
void gemm(const Gemm&);
double fma_peak(double seconds);
int64_t rotary(const Rotary&);
void swiglu_forward(const SwigluForward&);
void swiglu_backward(const SwigluBackward&);
void adamw(const AdamW&);
double sum_of_squares(DType, const void* x, int64_t count, int threads);
void cross_entropy_rows(const CrossEntropyRows&);
void cross_entropy_gradient(const CrossEntropyGradient&);
int64_t attention_forward_workspace(const AttentionShape&);
void attention_forward(const AttentionForward&);
int64_t attention_backward_workspace(const AttentionShape&);
void attention_backward(const AttentionBackward&);
void attention_delta(const AttentionDelta&);
int64_t row_map(const RowMap&);
bool tile_list(const TileList&);
int64_t gather_rows(const GatherRows&);
int64_t gather_sum(const GatherSum&);
int64_t gather_sum_backward(const GatherSumBackward&);
void route_forward(const RouteForward&);
void route_backward(const RouteBackward&);
void grouped_gemm(const GroupedGemm&);
void grouped_weight_gradient(const GroupedWeightGradient&);
void grouped_bias_gradient(const GroupedBiasGradient&);
void moe_mlp_forward(const MoeMlpForward&);
bool moe_mlp_rows_are_bf16(const MoeMlpShape&);
int64_t moe_mlp_backward_rows(const MoeMlpShape&);
void moe_mlp_backward(const MoeMlpBackward&);
int64_t panel_gemm(const PanelGemm&);

}  // namespace pyfast

extern "C" __attribute__((visibility("default"))) const pyfast::Kernels* pyfast_kernels(
    const pyfast::Runtime* runtime) {
  static const pyfast::Kernels table = {
      PYFAST_ISA,
      pyfast::rms_norm_forward,
      pyfast::rms_norm_backward,
      pyfast::gemm,
      pyfast::fma_peak,
      pyfast::rotary,
      pyfast::swiglu_forward,
      pyfast::swiglu_backward,
      pyfast::adamw,
      pyfast::sum_of_squares,
      pyfast::cross_entropy_rows,
      pyfast::cross_entropy_gradient,
      pyfast::attention_forward_workspace,
      pyfast::attention_forward,
      pyfast::attention_backward_workspace,
      pyfast::attention_backward,
      pyfast::attention_delta,
      pyfast::row_map,
      pyfast::tile_list,
      pyfast::gather_rows,
      pyfast::gather_sum,
      pyfast::gather_sum_backward,
      pyfast::route_forward,
      pyfast::route_backward,
      pyfast::grouped_gemm,
      pyfast::grouped_weight_gradient,
      pyfast::grouped_bias_gradient,
      pyfast::moe_mlp_forward,
      pyfast::moe_mlp_rows_are_bf16,
      pyfast::moe_mlp_backward_rows,
      pyfast::moe_mlp_backward,
      pyfast::panel_gemm,
  };
  pyfast::g_runtime = runtime;
  return &table;
}
