"""The kernel functions of `pyfast.kernels.cpu` in plain torch, for devices that have no kernel of their own yet.

Same names, arguments and results; right on every device, fast on none. Backward functions recompute the reference
under autograd, so there is one formula to trust (pyfast/kernels/reference.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyfast.kernels import reference
from pyfast.kernels.dtypes import sum_dtype
from pyfast.kernels.errors import position_error
from pyfast.kernels.full_precision import full_precision
from pyfast.kernels.plain_attention import (  # noqa: F401
    attention_backward,
    attention_delta,
    attention_forward,
    attention_state_backward,
    attention_state_forward,
)
from pyfast.kernels.plain_moe import (  # noqa: F401
    grouped_bias_gradient,
    grouped_gemm_forward,
    grouped_gemm_weight_gradient,
    moe_mlp_backward,
    moe_mlp_forward,
    moe_mlp_weight_gradients,
)
from pyfast.kernels.plain_route import route_backward, route_forward  # noqa: F401
from pyfast.kernels.plain_row_map import (  # noqa: F401
    gather_rows,
    row_map,
    tile_list,
    unpermute_backward,
    unpermute_forward,
)


@full_precision
def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `cpu.rms_norm_forward`."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    rstd = torch.rsqrt(wide.square().mean(-1) + eps).flatten()
    return reference.rms_norm(x, weight, eps=eps), rstd


@full_precision
def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, need_dx: bool, need_dweight: bool
) -> tuple[Tensor, Tensor]:
    """See `cpu.rms_norm_backward`; eps is recovered from rstd."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    gradient = dy.to(wide.dtype) * weight
    rstd = rstd.view(x.shape[:-1]).unsqueeze(-1)
    normalised = wide * rstd
    empty = x.new_empty(0)
    dx = rstd * (gradient - normalised * (gradient * normalised).mean(-1, keepdim=True))
    dweight = (dy.to(wide.dtype) * normalised).flatten(0, -2).sum(0)
    return dx.to(x.dtype) if need_dx else empty, dweight.to(weight.dtype) if need_dweight else empty


@full_precision
def gemm(
    a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False, scale: float = 1.0, round_factors: bool = False
) -> Tensor:
    """See `cpu.gemm`; nothing is rounded before the product."""
    wide = sum_dtype(out.dtype)
    product = (a.to(wide) @ b.to(wide)).mul_(scale)
    return out.copy_(product.add_(out) if accumulate else product)


@full_precision
def rotary(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, inverse: bool) -> Tensor:
    """See `cpu.rotary`."""
    if positions is not None and positions.numel():
        low, high = (bound.item() for bound in positions.aminmax())
        if low < 0 or high >= cos.shape[0]:
            raise ValueError(position_error(low if low < 0 else high, cos.shape[0]))
    return reference.rotary(x, cos, -sin if inverse else sin, positions=positions).contiguous()


def sum_of_squares(x: Tensor) -> Tensor:
    """See `cpu.sum_of_squares`."""
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for piece in x.flatten().split(1 << 24):  # a float64 copy of all of it might not fit
        wide = piece.double()
        total += torch.dot(wide, wide)
    return total


@full_precision
def swiglu_forward(x: Tensor, up: Tensor | None) -> Tensor:
    """See `cpu.swiglu_forward`."""
    return reference.swiglu(x, up).contiguous()


@full_precision
def swiglu_backward(dy: Tensor, x: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `cpu.swiglu_backward`."""
    wide = sum_dtype(x.dtype)
    gate_wide, up_wide = (part.to(wide) for part in (x.chunk(2, dim=-1) if up is None else (x, up)))
    sigmoid, dy_wide = torch.sigmoid(gate_wide), dy.to(wide)
    dgate = (dy_wide * up_wide * sigmoid * (1 + gate_wide * (1 - sigmoid))).to(x.dtype)
    dup = (dy_wide * gate_wide * sigmoid).to(x.dtype)
    return (torch.cat([dgate, dup], dim=-1), x.new_empty(0)) if up is None else (dgate, dup)


@full_precision
def adamw_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, master: Tensor | None, step: int,
    learning_rate: float, beta1: float, beta2: float, eps: float, weight_decay: float, grad_scale: float,
    seed: int = 0, first_index: int = 0, places: Tensor | None = None,
) -> None:  # fmt: skip
    """See `cpu.adamw_`."""
    reference.adamw_(
        param, grad, exp_avg, exp_avg_sq, step=step, learning_rate=learning_rate, betas=(beta1, beta2), eps=eps,
        weight_decay=weight_decay, master=master, grad_scale=grad_scale, seed=seed, first_index=first_index,
        places=places,
    )  # fmt: skip


@full_precision
def cross_entropy_rows(
    logits: Tensor, target: Tensor, start: int, softcap: float, exponentials: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `cpu.cross_entropy_rows`."""
    rows, cols = logits.shape
    if softcap > 0:
        logits.copy_(softcap * torch.tanh(logits / softcap))
    if cols == 0:
        return logits.new_full((rows,), float("-inf")), logits.new_zeros(rows), logits.new_zeros(rows)
    lse, largest = torch.logsumexp(logits, -1), logits.amax(-1)
    here, local = _local_target(target, start, cols)
    picked = torch.where(here, logits.gather(1, local.unsqueeze(1)).squeeze(1), 0.0)
    if exponentials:
        logits.sub_(largest.unsqueeze(1)).exp_()
    return lse, picked, largest


@full_precision
def cross_entropy_gradient_(
    logits: Tensor, target: Tensor, start: int, lse: Tensor, largest: Tensor | None, grad: Tensor | None,
    softcap: float, z_loss: float,
) -> None:  # fmt: skip
    """See `cpu.cross_entropy_gradient_`."""
    if logits.shape[1] == 0:
        return
    grad = torch.ones_like(lse) if grad is None else grad
    slope = grad * (1 + 2 * z_loss * lse)
    cap_slope = 1 - (logits / softcap).square() if softcap > 0 else None
    if largest is None:
        logits.sub_(lse.unsqueeze(1)).exp_()
    else:
        slope = slope * torch.exp(largest - lse)
    logits.mul_(slope.unsqueeze(1))
    here, local = _local_target(target, start, logits.shape[1])
    logits.scatter_add_(1, local.unsqueeze(1), torch.where(here, -grad, 0.0).unsqueeze(1))
    if cap_slope is not None:
        logits.mul_(cap_slope)


def _local_target(target: Tensor, start: int, cols: int) -> tuple[Tensor, Tensor]:
    """Whether each target lies in columns [start, start + cols), and its index there (any index if it does not)."""
    local = target - start
    return (local >= 0) & (local < cols), local.clamp(0, cols - 1)
