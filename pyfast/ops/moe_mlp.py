"""The experts of a mixture in one op. T tokens, K top-k, R = T K sorted rows, E experts, H and F widths."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pyfast import kernels
from pyfast.kernels.dtypes import sum_dtype
from pyfast.ops.checks import autocast, check_float, check_same
from pyfast.ops.dispatch import Op, differentiable, refuse_second_derivative
from pyfast.ops.main_grad import Defer, add_or_defer, check_main_grad
from pyfast.ops.row_map import row_map


def moe_mlp(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    *,
    main_grads: tuple[Tensor, Tensor] | None = None,
    defer: Defer | None = None,
    recompute: bool = False,
) -> Tensor:
    """y[t] = sum over k of weights[t, k] * w_down[e] (silu(g) * u), (g, u) = w_gate_up[e] x[t], e = experts[t, k].

    For backward are kept x, weights, the pre-activation (g, u) of every row, and the maps of the sorted order; neither
    sorted copies of x nor activations. An expert named twice in one token counts twice. Sums, the one over k among
    them, are float32 (float64 for float64) in a fixed order: the same bits for any number of threads.

    Args:
        x: [T, H] float32, bfloat16, float16 or float64, any strides. Under torch.autocast x, w_gate_up and w_down are
            cast to its dtype first.
        experts: [T, K] integers, -1 for a dropped slot, which gives nothing and has no gradient.
        weights: [T, K] floats; used in float32 (float64 for a float64 x). Their gradient is right at 0 too.
        w_gate_up: [E, 2F, H], x's dtype: the gate first, then up. w_down: [E, H, F]. Any strides.
        main_grads: (gradient of w_gate_up, gradient of w_down), float32 (float64 for float64) tensors of their shapes:
            backward adds into them, in full precision, and autograd gets none for the weights. Nothing is added for a
            weight that requires no gradient.
        defer: called in backward with a closure that does these additions when it is called; needs main_grads. The
            closure is good for one call and keeps x, the upstream gradient and 3 F values a row alive until then; if x
            or that gradient was written in place meanwhile, it raises RuntimeError.
        recompute: compute the pre-activation again in backward instead of keeping it: 2 of 9 products more.

    Returns:
        [T, H] in x's dtype.

    Raises:
        TypeError, ValueError: naming the argument that does not fit.

    What is kept, and the router's gradient as <dO W_down, activation>, are SonicMoE's (Guo et al., 2025).
    """
    x, w_gate_up, w_down = autocast(x, w_gate_up, w_down)
    _check(x, experts, weights, w_gate_up, w_down)
    _check_main_grads(main_grads, w_gate_up, w_down, defer)
    weights = weights.to(sum_dtype(x.dtype))
    maps = row_map(experts, w_gate_up.shape[0])[:4]
    arguments = (x, *maps, weights, w_gate_up, w_down, recompute)
    if main_grads is None:
        return _moe_mlp(*arguments)[0]
    return _WithMainGrads.apply(*arguments, main_grads, defer)


def _check(x: Tensor, experts: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> None:
    check_float("x", x)
    check_same("w_gate_up", w_gate_up, "x", x)
    check_same("w_down", w_down, "x", x)
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be [T, H]")
    if w_gate_up.dim() != 3 or w_gate_up.shape[2] != x.shape[1] or w_gate_up.shape[1] % 2:
        raise ValueError(
            f"w_gate_up has shape {tuple(w_gate_up.shape)}; it must be (E, 2F, {x.shape[1]}): gate, then up, for x of "
            f"width {x.shape[1]}"
        )
    wanted = (w_gate_up.shape[0], x.shape[1], w_gate_up.shape[1] // 2)
    if w_down.shape != wanted:
        raise ValueError(f"w_down has shape {tuple(w_down.shape)}; it must be {wanted}: experts, H, F")
    if not isinstance(experts, Tensor) or experts.dtype not in (torch.int32, torch.int64):
        kind = experts.dtype if isinstance(experts, Tensor) else type(experts).__name__
        raise TypeError(f"experts is {kind}; it must be an int32 or int64 tensor")
    if experts.dim() != 2 or experts.shape[0] != x.shape[0]:
        raise ValueError(f"experts has shape {tuple(experts.shape)}; it must be ({x.shape[0]}, K): x's tokens, top-k")
    check_float("weights", weights)
    if weights.shape != experts.shape:
        raise ValueError(f"weights has shape {tuple(weights.shape)}; it must be {tuple(experts.shape)}, as experts")
    for name, tensor in (("experts", experts), ("weights", weights)):
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, x on {x.device}; move them to one device")


def _check_main_grads(
    main_grads: tuple[Tensor, Tensor] | None, w_gate_up: Tensor, w_down: Tensor, defer: Defer | None
) -> None:
    if main_grads is None:
        return check_main_grad("main_grads", None, "w_gate_up", w_gate_up, defer)
    if not isinstance(main_grads, (tuple, list)) or len(main_grads) != 2:
        raise TypeError(f"main_grads is {main_grads!r:.80}; a pair is needed: for w_gate_up and for w_down")
    check_main_grad("main_grads[0]", main_grads[0], "w_gate_up", w_gate_up, defer)
    check_main_grad("main_grads[1]", main_grads[1], "w_down", w_down, defer)


Maps = tuple[Tensor, Tensor, Tensor, Tensor]


def _forward(
    x: Tensor, offsets: Tensor, gather: Tensor, slot: Tensor, inverse: Tensor, weights: Tensor, w_gate_up: Tensor,
    w_down: Tensor, recompute: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, the pre-activation of all rows in the backend's own order: [R, 2F], or [0] with `recompute`)."""
    maps = (offsets, gather, slot, inverse)
    return kernels.for_device(x.device).moe_mlp_forward(x, maps, weights, w_gate_up, w_down, not recompute)


def _forward_fake(x, offsets, gather, slot, inverse, weights, w_gate_up, w_down, recompute):
    return x.new_empty(x.shape), x.new_empty((0,) if recompute else (gather.shape[0], w_gate_up.shape[1]))


def _backward(
    dy: Tensor, x: Tensor, pre: Tensor, offsets: Tensor, gather: Tensor, slot: Tensor, inverse: Tensor, weights: Tensor,
    w_gate_up: Tensor, w_down: Tensor, recompute: bool, need_dx: bool, need_dweights: bool, need_dw_gate_up: bool,
    need_dw_down: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dweights, dw_gate_up, dw_down); what is not needed comes back empty."""
    dws = [w.new_empty(w.shape) if need else None for w, need in ((w_gate_up, need_dw_gate_up), (w_down, need_dw_down))]
    dx, dweights, _ = kernels.for_device(x.device).moe_mlp_backward(
        dy, x, None if recompute else pre, (offsets, gather, slot, inverse), weights, w_gate_up, w_down, *dws, False,
        need_dx, need_dweights, False,
    )  # fmt: skip
    return dx, dweights, *(x.new_empty(0) if dw is None else dw for dw in dws)


def _backward_fake(
    dy, x, pre, offsets, gather, slot, inverse, weights, w_gate_up, w_down, recompute, need_dx, need_dweights,
    need_dw_gate_up, need_dw_down,
):  # fmt: skip
    needs = (need_dx, need_dweights, need_dw_gate_up, need_dw_down)
    return tuple(
        tensor.new_empty(tensor.shape if need else (0,))
        for tensor, need in zip((x, weights, w_gate_up, w_down), needs, strict=True)
    )


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.recompute = inputs
    _, pre = output
    ctx.mark_non_differentiable(pre)
    ctx.save_for_backward(pre, *tensors)


def _needs(ctx) -> tuple[bool, bool, bool, bool]:
    """Whether x, weights, w_gate_up and w_down need a gradient."""
    needs = ctx.needs_input_grad
    return needs[0], needs[5], needs[6], needs[7]


def _gradients(ctx, dy: Tensor, _dpre):
    pre, x, *rest = ctx.saved_tensors
    needs = _needs(ctx)
    results = _backward_op(dy, x, pre, *rest, ctx.recompute, *needs)
    dx, *others = (result if need else None for result, need in zip(results, needs, strict=True))
    return dx, None, None, None, None, *others, None


class _WithMainGrads(torch.autograd.Function):
    """The same with the gradients of the weights added into buffers, now or when a closure is called."""

    @staticmethod
    def forward(ctx, x, offsets, gather, slot, inverse, weights, w_gate_up, w_down, recompute, main_grads, defer):
        y, pre = _forward(x, offsets, gather, slot, inverse, weights, w_gate_up, w_down, recompute)
        ctx.save_for_backward(pre, x, offsets, gather, slot, inverse, weights, w_gate_up, w_down)
        ctx.recompute, ctx.main_grads, ctx.defer = recompute, tuple(main_grads), defer
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        refuse_second_derivative("moe_mlp")
        pre, x, *maps, weights, w_gate_up, w_down = ctx.saved_tensors
        kernel, maps = kernels.for_device(x.device), tuple(maps)
        need_dx, need_dweights, *need_dws = _needs(ctx)
        targets = [main_grad if need else None for main_grad, need in zip(ctx.main_grads, need_dws, strict=True)]
        adding = [target for target in targets if target is not None]
        keep_rows = ctx.defer is not None and bool(adding)
        dx, dweights, kept = kernel.moe_mlp_backward(
            dy, x, None if ctx.recompute else pre, maps, weights, w_gate_up, w_down, *targets, True, need_dx,
            need_dweights, keep_rows,
        )  # fmt: skip
        if keep_rows:
            reads = {"x": x, "the upstream gradient": dy}
            add = partial(kernel.moe_mlp_weight_gradients, dy, x, kept, maps, *targets, True)
            add_or_defer(ctx.defer, add, adding, reads)
        elif adding:
            torch.autograd.graph.increment_version(adding)
        dx, dweights = dx if need_dx else None, dweights if need_dweights else None
        return dx, None, None, None, None, dweights, None, None, None, None, None


_TENSORS = "Tensor offsets, Tensor gather, Tensor slot, Tensor inverse, Tensor weights, Tensor w_gate_up, Tensor w_down"
_forward_op = Op(
    "moe_mlp", f"(Tensor x, {_TENSORS}, bool recompute) -> (Tensor, Tensor)", _forward, _forward_fake
)  # fmt: skip
_backward_op = Op(
    "moe_mlp_backward",
    f"(Tensor dy, Tensor x, Tensor pre, {_TENSORS}, bool recompute, bool need_dx, bool need_dweights, "
    "bool need_dw_gate_up, bool need_dw_down) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
_moe_mlp: Callable = differentiable(_forward_op, _setup_context, _gradients)
