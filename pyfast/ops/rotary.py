"""Rotary position embedding.

B batch, S sequence, T packed tokens, N heads, D head size, R rotated channels, P positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyfast import kernels
from pyfast.kernels.dtypes import sum_dtype
from pyfast.ops.checks import check_float
from pyfast.ops.dispatch import Op, differentiable


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None) -> Tensor:
    """Turn each head's first R channels by its token's angles; channel j is paired with j + R/2 (half-split).

    y_j = x_j cos_j - x_{j+R/2} sin_j and y_{j+R/2} = x_{j+R/2} cos_j + x_j sin_j; channels from R on pass unchanged.
    Arithmetic is float32 (float64 for float64), rounded once; the gradient is the rotation by the negative angles.

    Args:
        x: [..., S, N, D] (or packed [T, N, D]) float32, bfloat16, float16 or float64. Strides are free as long as the
            last dimension is contiguous: a slice of a fused qkv is read in place.
        cos, sin: [P, R/2] float32, or float64 when x is; R <= D. No gradient flows to them.
        positions: integer [S], or [B, S] for x [B, S, N, D]: each token's row of the tables. Default 0, 1, ... S-1.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        TypeError, ValueError: naming the argument that does not fit, a position outside the tables among them.

    Source: Su et al. 2021 (RoFormer); half-split pairs as in Llama.
    """
    check_float("x", x)
    _check_tables(x, cos, sin)
    if x.dim() < 3:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be [..., S, N, D] with at least 3 dimensions")
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"cos has {cos.shape[1]} columns, which turn {2 * cos.shape[1]} channels; x has only {x.shape[-1]} a head"
        )
    if positions is not None:
        _check_positions(x, positions)
    elif x.shape[-3] > cos.shape[0]:
        raise ValueError(
            f"x has {x.shape[-3]} tokens, cos and sin only {cos.shape[0]} rows: build longer tables (max_positions)"
        )
    return _rotary(x, cos, sin, positions, False)


def _check_tables(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_float("cos", cos)
    check_float("sin", sin)
    if cos.dim() != 2 or cos.shape != sin.shape:
        raise ValueError(
            f"cos has shape {tuple(cos.shape)}, sin {tuple(sin.shape)}; both must be [positions, rotated channels / 2]"
        )
    if cos.dtype != sin.dtype or cos.dtype not in (torch.float32, sum_dtype(x.dtype)):
        raise TypeError(
            f"cos has dtype {cos.dtype} and sin {sin.dtype}; both must be float32"
            + (" or float64" if x.dtype == torch.float64 else f" for x of {x.dtype}")
        )
    if cos.device != x.device or sin.device != x.device:
        raise ValueError(f"cos is on {cos.device}, sin on {sin.device}, x on {x.device}; move them to one device")
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("cos and sin require a gradient, which is not supported: pass them detached")


def _check_positions(x: Tensor, positions: Tensor) -> None:
    if not isinstance(positions, Tensor) or positions.dtype not in (torch.int64, torch.int32):
        kind = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"positions is {kind}; an int64 or int32 tensor is needed")
    if positions.shape != x.shape[-3:-2] and (x.dim() != 4 or positions.shape != x.shape[:2]):
        allowed = f"({x.shape[-3]},)" + (f" or {tuple(x.shape[:2])}" if x.dim() == 4 else "")
        raise ValueError(f"positions has shape {tuple(positions.shape)}; for x {tuple(x.shape)} it must be {allowed}")
    if positions.device != x.device:
        raise ValueError(f"positions is on {positions.device}, x on {x.device}; move them to one device")


def _forward(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, inverse: bool) -> Tensor:
    return kernels.for_device(x.device).rotary(x, cos, sin, positions, inverse)


def _fake(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, inverse: bool) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output) -> None:
    _, cos, sin, positions, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin, positions)


def _gradients(ctx, dy: Tensor):
    cos, sin, positions = ctx.saved_tensors
    return _op(dy, cos, sin, positions, not ctx.inverse), None, None, None, None


_op = Op(
    "rotary", "(Tensor x, Tensor cos, Tensor sin, Tensor? positions, bool inverse) -> Tensor", _forward, _fake
)  # fmt: skip
_rotary = differentiable(_op, _setup_context, _gradients)
