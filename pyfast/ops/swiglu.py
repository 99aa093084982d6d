"""SwiGLU (Shazeer 2020). F: ffn width."""

from __future__ import annotations

from torch import Tensor

from pyfast import kernels
from pyfast.ops.checks import check_float, check_same
from pyfast.ops.dispatch import Op, differentiable


def swiglu(x: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up, with silu(g) = g / (1 + e^-g).

    Args:
        x: [..., 2F], the gate first, then up; or the gate [..., F] when `up` is given. float32, bfloat16, float16 or
            float64, any strides (read in place when rows of the last dimension are contiguous and evenly spaced).
        up: [..., F], x's shape and dtype.

    Returns:
        A contiguous [..., F] of x's dtype; arithmetic is float32 (float64 for float64), rounded once. Only the inputs
        are kept for backward, which gives the gradient of a fused x in the same fused layout.

    Raises:
        TypeError, ValueError: naming the argument that does not fit.
    """
    check_float("x", x)
    if up is not None:
        check_same("up", up, "x", x)
        if up.shape != x.shape:
            raise ValueError(f"up has shape {tuple(up.shape)}; it must be {tuple(x.shape)}, the gate's")
    elif x.dim() < 1 or x.shape[-1] % 2:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; its last dimension must be even: the gate, then up (or pass up on its own)"
        )
    if x.dim() < 1:
        raise ValueError("x has no dimension; it must be [..., F]")
    return _swiglu(x, up)


def _forward(x: Tensor, up: Tensor | None) -> Tensor:
    return kernels.for_device(x.device).swiglu_forward(x, up)


def _forward_fake(x: Tensor, up: Tensor | None) -> Tensor:
    return x.new_empty(x.shape if up is not None else (*x.shape[:-1], x.shape[-1] // 2))


def _backward(dy: Tensor, x: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    return kernels.for_device(x.device).swiglu_backward(dy, x, up)


def _backward_fake(dy: Tensor, x: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((0,) if up is None else up.shape)


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx, dy: Tensor):
    x, up = ctx.saved_tensors
    dx, dup = _backward_op(dy, x, up)
    return dx, None if up is None else dup


_forward_op = Op("swiglu", "(Tensor x, Tensor? up) -> Tensor", _forward, _forward_fake)
_backward_op = Op(
    "swiglu_backward", "(Tensor dy, Tensor x, Tensor? up) -> (Tensor, Tensor)", _backward, _backward_fake
)  # fmt: skip
_swiglu = differentiable(_forward_op, _setup_context, _gradients)
