"""RMSNorm (Zhang and Sennrich 2019). H: width."""

from __future__ import annotations

from torch import Tensor

from pyfast import kernels
from pyfast.kernels.dtypes import sum_dtype
from pyfast.ops.checks import check_float, check_number, check_same
from pyfast.ops.dispatch import Op, differentiable


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Args:
        x: [..., H] float32, bfloat16, float16 or float64, any strides; sums are float32 (float64 for float64).
        weight: [H], x's dtype.
        eps: added to the mean square, not negative.

    Returns:
        A contiguous tensor of x's shape and dtype, rounded once.

    Raises:
        TypeError, ValueError: naming the argument that does not fit.
    """
    check_float("x", x)
    check_same("weight", weight, "x", x)
    if x.dim() < 1 or weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; it must be ({x.shape[-1] if x.dim() else 'H'},), x's width"
        )
    return _rms_norm(x, weight, check_number("eps", eps, least=0))[0]


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return kernels.for_device(x.device).rms_norm_forward(x, weight, eps)


def _forward_fake(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    return x.new_empty(x.shape), x.new_empty(rows, dtype=sum_dtype(x.dtype))


def _backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, need_dx: bool, need_dweight: bool):
    return kernels.for_device(x.device).rms_norm_backward(dy, x, weight, rstd, need_dx, need_dweight)


def _backward_fake(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, need_dx: bool, need_dweight: bool):
    return x.new_empty(x.shape if need_dx else (0,)), weight.new_empty(weight.shape if need_dweight else (0,))


def _setup_context(ctx, inputs, output) -> None:
    x, weight, _ = inputs
    rstd = output[1]
    ctx.save_for_backward(x, weight, rstd)
    ctx.mark_non_differentiable(rstd)


def _gradients(ctx, dy: Tensor, _drstd):
    x, weight, rstd = ctx.saved_tensors
    need_dx, need_dweight, _ = ctx.needs_input_grad
    dx, dweight = _backward_op(dy, x, weight, rstd, need_dx, need_dweight)
    return dx if need_dx else None, dweight if need_dweight else None, None


_forward_op = Op("rms_norm", "(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", _forward, _forward_fake)
_backward_op = Op(
    "rms_norm_backward",
    "(Tensor dy, Tensor x, Tensor weight, Tensor rstd, bool need_dx, bool need_dweight) -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
)
_rms_norm = differentiable(_forward_op, _setup_context, _gradients)
