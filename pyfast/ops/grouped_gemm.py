"""One product an expert over rows sorted by expert. R rows, E experts, N output and K input features of a weight."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pyfast import kernels
from pyfast.ops.checks import autocast, check_float, check_same
from pyfast.ops.dispatch import Op, differentiable, refuse_second_derivative
from pyfast.ops.main_grad import Defer, add_or_defer, check_main_grad


def grouped_gemm(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    *,
    transpose: bool = False,
    bias: Tensor | None = None,
    main_grad: Tensor | None = None,
    defer: Defer | None = None,
) -> Tensor:
    """y[r] = x[r] @ w[e].T + bias[e] for the rows r of each expert e: offsets[e] <= r < offsets[e + 1].

    Rows before offsets[0] and from offsets[E] on belong to no expert: they are 0 in the result and in the gradient of
    x, whatever they hold. An expert without rows has a zero gradient. The same bits for any number of threads.

    Args:
        x: [R, K] (with `transpose`: [R, N]) float32, bfloat16, float16 or float64, any strides. Under torch.autocast
            x, w and bias are cast to its dtype first.
        w: [E, N, K], x's dtype, any strides.
        offsets: [E + 1] int32 or int64, not decreasing, within 0 .. R, on x's device.
        transpose: multiply by w[e] instead of its transpose.
        bias: [E, N] (with `transpose`: [E, K]), x's dtype, or None.
        main_grad: float32 (float64 for float64) tensor of w's shape: backward adds the gradient of w into it, in full
            precision, and autograd gets none for w. Nothing is added when w requires no gradient.
        defer: called in backward with a closure that does that addition when it is called (a list's append, say);
            needs main_grad. It is good for one call and keeps x and the upstream gradient alive until then; if one of
            them was written in place meanwhile, it raises RuntimeError.

    Returns:
        [R, N] (with `transpose`: [R, K]) in x's dtype; sums are float32 (float64 for float64), rounded once.

    Raises:
        TypeError, ValueError: naming the argument that does not fit. The values of offsets are checked on CPU; reading
            them from another device would wait for it.

    The grouped matrix product of MegaBlocks (Gale et al., 2022) and CUTLASS.
    """
    x, w, bias = autocast(x, w, bias)
    _check(x, w, offsets, transpose, bias)
    check_main_grad("main_grad", main_grad, "w", w, defer)
    if main_grad is None:
        return _grouped_gemm(x, w, offsets, bias, transpose)
    return _WithMainGrad.apply(x, w, offsets, bias, transpose, main_grad, defer)


def check_offsets(name: str, offsets: Tensor, rows: int) -> None:
    """ValueError unless the offsets, when they are on the host, do not decrease and lie within 0 .. rows."""
    if offsets.device.type != "cpu":
        return
    values = offsets.tolist()
    for index, (low, high) in enumerate(zip(values, values[1:], strict=False)):
        if high < low:
            raise ValueError(f"{name} decreases from {low} to {high} at index {index + 1}; offsets must not decrease")
    if values[0] < 0 or values[-1] > rows:
        raise ValueError(f"{name} runs from {values[0]} to {values[-1]}; it must stay within 0 and {rows}, x's rows")


def _check(x: Tensor, w: Tensor, offsets: Tensor, transpose: bool, bias: Tensor | None) -> None:
    check_float("x", x)
    check_same("w", w, "x", x)
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be [R, features]")
    if w.dim() != 3 or w.shape[1 if transpose else 2] != x.shape[1]:
        wanted = f"(E, {x.shape[1]}, K)" if transpose else f"(E, N, {x.shape[1]})"
        raise ValueError(f"w has shape {tuple(w.shape)}; it must be {wanted} for x of width {x.shape[1]}")
    if not isinstance(offsets, Tensor) or offsets.dtype not in (torch.int32, torch.int64):
        kind = offsets.dtype if isinstance(offsets, Tensor) else type(offsets).__name__
        raise TypeError(f"offsets is {kind}; it must be an int32 or int64 tensor")
    if offsets.shape != (w.shape[0] + 1,):
        raise ValueError(f"offsets has shape {tuple(offsets.shape)}; it must be ({w.shape[0] + 1},), experts + 1")
    if offsets.device != x.device:
        raise ValueError(f"offsets is on {offsets.device}, x on {x.device}; move them to one device")
    if bias is not None:
        check_same("bias", bias, "x", x)
        wanted = (w.shape[0], w.shape[2 if transpose else 1])
        if bias.shape != wanted:
            raise ValueError(f"bias has shape {tuple(bias.shape)}; it must be {wanted}: experts, output features")


def _forward(x: Tensor, w: Tensor, offsets: Tensor, bias: Tensor | None, transpose: bool) -> Tensor:
    check_offsets("offsets", offsets, x.shape[0])
    return kernels.for_device(x.device).grouped_gemm_forward(x, w, offsets, bias, transpose)


def _forward_fake(x: Tensor, w: Tensor, offsets: Tensor, bias: Tensor | None, transpose: bool) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[2 if transpose else 1]))


def _input_gradient(dy: Tensor, w: Tensor, offsets: Tensor, transpose: bool) -> Tensor:
    return kernels.for_device(dy.device).grouped_gemm_forward(dy, w, offsets, None, not transpose)


def _add_weight_gradient(dy: Tensor, x: Tensor, offsets: Tensor, transpose: bool, dw: Tensor, accumulate: bool) -> None:
    left, right = (x, dy) if transpose else (dy, x)
    kernels.for_device(dy.device).grouped_gemm_weight_gradient(left, right, offsets, dw, accumulate)


def _bias_gradient(dy: Tensor, offsets: Tensor, experts: int) -> Tensor:
    return kernels.for_device(dy.device).grouped_bias_gradient(dy, offsets, experts).to(dy.dtype)


def _backward(
    dy: Tensor, x: Tensor, w: Tensor, offsets: Tensor, transpose: bool, need_dx: bool, need_dw: bool, need_dbias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dw, dbias); what is not needed comes back empty."""
    dx = _input_gradient(dy, w, offsets, transpose) if need_dx else x.new_empty(0)
    dw = w.new_empty(w.shape if need_dw else (0,))
    if need_dw:
        _add_weight_gradient(dy, x, offsets, transpose, dw, False)
    dbias = _bias_gradient(dy, offsets, w.shape[0]) if need_dbias else w.new_empty(0)
    return dx, dw, dbias


def _backward_fake(dy, x, w, offsets, transpose, need_dx, need_dw, need_dbias):
    return (
        x.new_empty(x.shape if need_dx else (0,)),
        w.new_empty(w.shape if need_dw else (0,)),
        w.new_empty((w.shape[0], dy.shape[1]) if need_dbias else (0,)),
    )


def _setup_context(ctx, inputs, output) -> None:
    x, w, offsets, _, ctx.transpose = inputs
    ctx.save_for_backward(x, w, offsets)


def _gradients(ctx, dy: Tensor):
    x, w, offsets = ctx.saved_tensors
    need_dx, need_dw, _, need_dbias, _ = ctx.needs_input_grad
    dx, dw, dbias = _backward_op(dy, x, w, offsets, ctx.transpose, need_dx, need_dw, need_dbias)
    return dx if need_dx else None, dw if need_dw else None, None, dbias if need_dbias else None, None


class _WithMainGrad(torch.autograd.Function):
    """The same with the gradient of w added into a buffer, now or when a closure is called."""

    @staticmethod
    def forward(ctx, x, w, offsets, bias, transpose, main_grad, defer):
        ctx.save_for_backward(x, w, offsets)
        ctx.transpose, ctx.main_grad, ctx.defer = transpose, main_grad, defer
        return _forward(x, w, offsets, bias, transpose)

    @staticmethod
    def backward(ctx, dy: Tensor):
        refuse_second_derivative("grouped_gemm")
        x, w, offsets = ctx.saved_tensors
        need_dx, need_dw, _, need_dbias = ctx.needs_input_grad[:4]
        transpose, main_grad = ctx.transpose, ctx.main_grad
        dx, _, dbias = _backward(dy, x, w, offsets, transpose, need_dx, False, need_dbias)
        if need_dw:
            reads = {"x": x, "offsets": offsets, "the upstream gradient": dy}
            add = partial(_add_weight_gradient, dy, x, offsets, transpose, main_grad, True)
            add_or_defer(ctx.defer, add, (main_grad,), reads)
        return dx if need_dx else None, None, None, dbias if need_dbias else None, None, None, None


_forward_op = Op(
    "grouped_gemm", "(Tensor x, Tensor w, Tensor offsets, Tensor? bias, bool transpose) -> Tensor", _forward,
    _forward_fake,
)  # fmt: skip
_backward_op = Op(
    "grouped_gemm_backward",
    "(Tensor dy, Tensor x, Tensor w, Tensor offsets, bool transpose, bool need_dx, bool need_dw, bool need_dbias) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
_grouped_gemm: Callable = differentiable(_forward_op, _setup_context, _gradients)
