"""`experts_implementation="pyfast"` in Hugging Face transformers: the experts of its MoE models on pyfast's kernels.

transformers (5.7 and newer) lets the modules that hold a model's experts run any registered function in place of their
own loop. The router stays the model's; what is replaced is from the chosen experts and weights to the layer's output.
Shapes: T tokens, K experts per token, E experts, H model width, F expert width, R = T K sorted rows.
"""

from __future__ import annotations

from torch import Tensor, nn

from pyfast import ops
from pyfast.kernels.dtypes import sum_dtype

FIRST = (5, 7)  # versions 5.0 to 5.6 have the interface, but their models take only the names they were made with


def register(name: str = "pyfast") -> bool:
    """Make `experts_implementation="pyfast"` known to transformers, or `name`; calling it again changes nothing.

    Returns whether the installed transformers has models that take it (5.7 and newer); for an older one nothing is
    done. Raises ModuleNotFoundError when transformers is not installed.
    """
    import transformers
    from packaging.version import Version

    if Version(transformers.__version__).release[:2] < FIRST:
        return False
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)
    return True


def experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts' weighted sum for each token, as the module's own forward computes it.

    Gated experts with SiLU and weights [E, 2F, H] and [E, H, F] (Mixtral, Qwen MoE, DeepSeek and most others) run in
    the fused `ops.moe_mlp`. Biases, transposed weights, other activations and gates of the model's own (GPT-OSS) run in
    `ops.grouped_gemm` around the module's gate. No weight is copied or rearranged in either.

    Args:
        module: an experts module of transformers.
        hidden_states: [T, H].
        top_k_index: int [T, K]. Under transformers' expert parallelism ids from the number of local experts on mean
            experts of other ranks: their slots add nothing and get no gradient.
        top_k_weights: [T, K], any float dtype; they are used in float32 (float64 for float64 inputs).

    Returns:
        [T, H] in the dtype of `hidden_states`.

    Raises:
        TypeError, ValueError: a dtype or shape without a kernel (quantised weights), named.
    """
    if top_k_weights.shape != top_k_index.shape:
        raise ValueError(
            f"top_k_weights has shape {tuple(top_k_weights.shape)}; it must be {tuple(top_k_index.shape)}, one weight "
            'for each chosen expert as in top_k_index: use experts_implementation="eager" for this model'
        )
    weights = top_k_weights.to(sum_dtype(hidden_states.dtype))
    if getattr(module, "_is_expert_parallel", True):  # older versions do not tell
        top_k_index = top_k_index.masked_fill(top_k_index >= module.num_experts, -1)
    if _is_swiglu(module):
        y = ops.moe_mlp(hidden_states, top_k_index, weights, module.gate_up_proj, module.down_proj)
    else:
        y = _experts_of_any_kind(module, hidden_states, top_k_index, weights)
    return y.to(hidden_states.dtype)  # under autocast y is in its dtype


def _is_swiglu(module: nn.Module) -> bool:
    """Whether `module` is down(silu(gate) * up) with the weights laid out as `ops.moe_mlp` reads them."""
    from transformers.integrations.moe import _default_apply_gate

    plain = module.has_gate and module.is_concatenated and not module.has_bias and not module.is_transposed
    plain = plain and not getattr(module, "has_post_expert_norm", False)  # not in 5.7
    return plain and type(module)._apply_gate is _default_apply_gate and _is_silu(module.act_fn)


def _is_silu(activation: object) -> bool:
    from transformers.activations import ACT2CLS

    return type(activation) in (nn.SiLU, ACT2CLS["silu"])


def _experts_of_any_kind(module: nn.Module, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """The same from its parts, the activation between the two products being the module's own."""
    rows, row_map = ops.permute(x, experts, module.num_experts)

    def project(rows: Tensor, name: str) -> Tensor:
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        w = getattr(module, name)
        y = ops.grouped_gemm(rows, w, row_map.offsets, transpose=module.is_transposed, bias=bias)
        return y.to(x.dtype)  # under autocast only the products are in its dtype

    if module.has_gate:
        rows = module._apply_gate(project(rows, "gate_up_proj"))
    else:
        rows = module.act_fn(project(rows, "up_proj"))
    rows = project(rows, "down_proj")
    if getattr(module, "has_post_expert_norm", False):
        rows = module.post_expert_norm(rows)
    return ops.unpermute(rows, row_map, weights)
