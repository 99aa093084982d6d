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
from pyfast.ops.dispatch import Op, differentiable, refuse_second_derivative
from pyfast.ops.main_grad import Defer, add_or_defer, check_main_grad


def linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    main_grad: Tensor | None = None,
    defer: Defer | None = None,
) -> Tensor:
    """x @ w.T + bias, as torch.nn.functional.linear.

    On CPU the packed GEMM of this package is used for the sizes and dtypes at which it is faster (docs/kernels.md has
    the figures), torch's matmul otherwise. The packed GEMM gives the same bits for any number of threads.

    Args:
        x: [..., H] float32, bfloat16, float16 or float64, any strides. Under torch.autocast x, w and bias are cast to
            its dtype first, as torch does.
        w: [F, H], x's dtype.
        bias: [F], x's dtype, or None.
        main_grad: float32 (float64 for float64) tensor of w's shape: backward adds the gradient of w into it, in full
            precision, and autograd gets none for w. Nothing is added when w requires no gradient.
        defer: called in backward with a closure that does that addition when it is called (a list's append, say);
            needs main_grad. It is good for one call and keeps x and the upstream gradient alive until then; if one of
            them was written in place meanwhile, it raises RuntimeError.

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
    check_main_grad("main_grad", main_grad, "w", w, defer)
    if main_grad is not None:
        return _WithMainGrad.apply(x, w, bias, main_grad, defer)
    if _packed_is_faster(x, *w.shape):
        return _linear(x, w, bias)
    return torch.nn.functional.linear(x, w, bias)


def input_gradient(dy: Tensor, w: Tensor) -> Tensor:
    """The gradient by x of `linear`, dy [..., F] @ w [F, H]: by the faster product, for use inside a backward."""
    return _packed_input_gradient(dy, w) if _packed_is_faster(dy, *w.shape) else dy @ w


def weight_gradient(dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """The gradient by w of `linear`, from dy [..., F] and x [..., H], shaped like w [F, H]; as `input_gradient`."""
    if _packed_is_faster(dy, *w.shape):
        return _packed_weight_gradient(dy, x, w)
    return _as_matrix(dy).t() @ _as_matrix(x)


def add_weight_gradient(dy: Tensor, x: Tensor, main_grad: Tensor) -> None:
    """Add the gradient by w of `linear`, from dy [..., F] and x [..., H], into main_grad [F, H] of the sum dtype."""
    dy, x = _as_matrix(dy), _as_matrix(x)
    if dy.dtype == main_grad.dtype and not _packed_is_faster(dy, *main_grad.shape):
        main_grad.addmm_(dy.t(), x)
    elif main_grad.stride(0) != 1 and main_grad.stride(1) != 1:  # the kernel writes contiguous rows or columns
        gradient = torch.empty_like(main_grad, memory_format=torch.contiguous_format)
        main_grad += kernels.for_device(dy.device).gemm(dy.t(), x, gradient)
    else:  # sums stay in main_grad's precision, without a product of the inputs' dtype in between
        kernels.for_device(dy.device).gemm(dy.t(), x, main_grad, accumulate=True)


def weight_gradient_or_add(
    dy: Tensor, x: Tensor, w: Tensor, main_grad: Tensor | None, defer: Defer | None
) -> Tensor | None:
    """`weight_gradient`; with a main_grad None, and it is added there: now, or by the closure that `defer` gets."""
    if main_grad is None:
        return weight_gradient(dy, x, w)
    reads = {"x": x, "the upstream gradient": dy}
    add_or_defer(defer, lambda: add_weight_gradient(dy, x, main_grad), (main_grad,), reads)
    return None


def bias_gradient(dy: Tensor) -> Tensor:
    """Sum of dy [..., F] over all rows, in the precision of sums, rounded once."""
    return _as_matrix(dy).sum(0, dtype=sum_dtype(dy.dtype)).to(dy.dtype)


def write_weight_gradient(dy: Tensor, x: Tensor, target: Tensor, accumulate: bool) -> None:
    """The gradient by w of `linear` into `target` [F, H] of the sum dtype, contiguous; added to it if `accumulate`.

    By the faster product; a half-precision one that is torch's is rounded to its own dtype first, as torch does.
    """
    if _packed_is_faster(dy, *target.shape):
        kernels.for_device(dy.device).gemm(_as_matrix(dy).t(), _as_matrix(x), target, accumulate=accumulate)
    elif dy.dtype == target.dtype:
        target.addmm_(_as_matrix(dy).t(), _as_matrix(x), beta=int(accumulate))
    elif accumulate:
        target.add_(_as_matrix(dy).t() @ _as_matrix(x))
    else:
        target.copy_(_as_matrix(dy).t() @ _as_matrix(x))


def _packed_input_gradient(dy: Tensor, w: Tensor) -> Tensor:
    dx = dy.new_empty((*dy.shape[:-1], w.shape[1]))
    kernels.for_device(dy.device).gemm(_as_matrix(dy), w, _as_matrix(dx))
    return dx


def _packed_weight_gradient(dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
    dw = torch.empty_like(w, memory_format=torch.contiguous_format)
    return kernels.for_device(dy.device).gemm(_as_matrix(dy).t(), _as_matrix(x), dw)


def _packed_is_faster(rows: Tensor, out_features: int, in_features: int) -> bool:
    """Whether the packed GEMM computes the products of a linear layer over `rows` [..., width]."""
    count = math.prod(rows.shape[:-1])  # not Size.numel(), which would fix a dynamic size
    return rows.device.type == "cpu" and matmul_choice.packed_gemm_is_faster(
        rows.dtype, count, out_features, in_features
    )


def _as_matrix(x: Tensor) -> Tensor:
    """x [..., width] as [rows, width]."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _forward(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    out = x.new_empty((*x.shape[:-1], w.shape[0]))
    if bias is not None:
        out.copy_(bias)
    kernels.for_device(x.device).gemm(_as_matrix(x), w.t(), _as_matrix(out), accumulate=bias is not None)
    return out


def _forward_fake(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def _backward(
    dy: Tensor, x: Tensor, w: Tensor, need_dx: bool, need_dw: bool, need_dbias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dw, dbias); what is not needed comes back empty."""
    dx = _packed_input_gradient(dy, w) if need_dx else x.new_empty(0)
    dw = _packed_weight_gradient(dy, x, w) if need_dw else w.new_empty(0)
    dbias = bias_gradient(dy) if need_dbias else w.new_empty(0)
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


class _WithMainGrad(torch.autograd.Function):
    """The same with the gradient of w added into a buffer, now or when a closure is called."""

    @staticmethod
    def forward(ctx, x, w, bias, main_grad, defer):
        ctx.save_for_backward(x, w)
        ctx.main_grad, ctx.defer = main_grad, defer
        if _packed_is_faster(x, *w.shape):
            return _forward(x, w, bias)
        return torch.nn.functional.linear(x, w, bias)

    @staticmethod
    def backward(ctx, dy: Tensor):
        refuse_second_derivative("linear")
        x, w = ctx.saved_tensors
        need_dx, need_dw, need_dbias = ctx.needs_input_grad[:3]
        dx = input_gradient(dy, w) if need_dx else None
        if need_dw:
            weight_gradient_or_add(dy, x, w, ctx.main_grad, ctx.defer)
        return dx, None, bias_gradient(dy) if need_dbias else None, None, None


_forward_op = Op("linear", "(Tensor x, Tensor w, Tensor? bias) -> Tensor", _forward, _forward_fake)
_backward_op = Op(
    "linear_backward",
    "(Tensor dy, Tensor x, Tensor w, bool need_dx, bool need_dw, bool need_dbias) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
_linear = differentiable(_forward_op, _setup_context, _gradients)
