"""A linear layer on the packed GEMM, where that beats torch's. T: rows, H: input features, F: output features."""

from __future__ import annotations

import math

import torch
import torch.nn.functional
from torch import Tensor

from pyfast import kernels
from pyfast.kernels import matmul_choice
from pyfast.kernels.dtypes import sum_dtype
from pyfast.ops.checks import autocast, check_float, check_same
from pyfast.ops.dispatch import Op, differentiable


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ w.T + bias, as torch.nn.functional.linear.

    On CPU the packed GEMM of this package is used for the sizes and dtypes at which it is faster (docs/kernels.md has
    the figures), torch's matmul otherwise. The packed GEMM gives the same bits for any number of threads.

    Args:
        x: [..., H] float32, bfloat16, float16 or float64, any strides. Under torch.autocast x, w and bias are cast to
            its dtype first, as torch does.
        w: [F, H], x's dtype.
        bias: [F], x's dtype, or None.

    Returns:
        [..., F] in x's dtype; sums are float32 (float64 for float64), rounded once.

    Raises:
        TypeError, ValueError: naming the argument that does not fit.
    """
    x, w, bias = autocast(x, w, bias)
    check_float("x", x)
    check_same("w", w, "x", x)
    if x.dim() < 1 or w.dim() != 2 or w.shape[1] != x.shape[-1]:
        raise ValueError(
            f"w has shape {tuple(w.shape)}; it must be (output features, {x.shape[-1] if x.dim() else 'H'}), the last "
            "being x's width"
        )
    if bias is not None:
        check_same("bias", bias, "x", x)
        if bias.shape != w.shape[:1]:
            raise ValueError(f"bias has shape {tuple(bias.shape)}; it must be ({w.shape[0]},), w's output features")
    rows = math.prod(x.shape[:-1])  # not Size.numel(), which would fix a dynamic size
    if x.device.type == "cpu" and matmul_choice.packed_gemm_is_faster(x.dtype, rows, *w.shape):
        return _linear(x, w, bias)
    return torch.nn.functional.linear(x, w, bias)


def _forward(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    rows, out = x.reshape(-1, x.shape[-1]), x.new_empty((*x.shape[:-1], w.shape[0]))
    if bias is not None:
        out.copy_(bias)
    kernels.for_device(x.device).gemm(rows, w.t(), out.view(-1, w.shape[0]), accumulate=bias is not None)
    return out


def _forward_fake(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def _backward(
    dy: Tensor, x: Tensor, w: Tensor, need_dx: bool, need_dw: bool, need_dbias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dw, dbias); what is not needed comes back empty."""
    gemm = kernels.for_device(x.device).gemm
    dx, dw, dbias = _backward_fake(dy, x, w, need_dx, need_dw, need_dbias)
    dy = dy.reshape(-1, w.shape[0])
    if need_dx:
        gemm(dy, w, dx.view(-1, w.shape[1]))
    if need_dw:
        gemm(dy.t(), x.reshape(-1, w.shape[1]), dw)
    if need_dbias:
        dbias.copy_(dy.sum(0, dtype=sum_dtype(dy.dtype)))
    return dx, dw, dbias


def _backward_fake(dy: Tensor, x: Tensor, w: Tensor, need_dx: bool, need_dw: bool, need_dbias: bool):
    return (
        x.new_empty(x.shape if need_dx else (0,)),
        w.new_empty(w.shape if need_dw else (0,)),
        w.new_empty(w.shape[0] if need_dbias else 0),
    )


def _setup_context(ctx, inputs, output) -> None:
    x, w, _ = inputs
    ctx.save_for_backward(x, w)


def _gradients(ctx, dy: Tensor):
    x, w = ctx.saved_tensors
    needed = ctx.needs_input_grad
    results = _backward_op(dy, x, w, *needed)
    return tuple(result if need else None for result, need in zip(results, needed, strict=True))


_forward_op = Op("linear", "(Tensor x, Tensor w, Tensor? bias) -> Tensor", _forward, _forward_fake)
_backward_op = Op(
    "linear_backward",
    "(Tensor dy, Tensor x, Tensor w, bool need_dx, bool need_dw, bool need_dbias) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
_linear = differentiable(_forward_op, _setup_context, _gradients)
