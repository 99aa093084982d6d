"""Column-parallel product of a sharded input: gather x over a group and multiply, shard by shard as they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pyfast.comm import Group
from pyfast.ops.checks import autocast
from pyfast.ops.dispatch import records, refuse_second_derivative
from pyfast.ops.linear import bias_gradient, weight_gradient_or_add
from pyfast.ops.main_grad import Defer, check_main_grad
from pyfast.ops.overlap import Transport, check_dim, check_product, transport_for


def all_gather_matmul(
    x: Tensor,
    w: Tensor | Sequence[Tensor],
    group: Group | dist.ProcessGroup,
    *,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    dim: int = 0,
    return_gathered: bool = False,
    main_grad: Tensor | Sequence[Tensor | None] | None = None,
    defer: Defer | None = None,
    transport: str = "auto",
    name: str = "all_gather_matmul",
) -> Tensor | tuple[Tensor, ...]:
    """all_gather(x, dim) @ w.T + bias: x is cut over the group along `dim`, w by its outputs.

    Backward sums the gradient of x over the group and cuts it again, and gathers x once more for the gradient of w,
    each beside the product of the other. A w without gradient costs no gather, an x without gradient no sum. Gradients
    of w and bias are whole: every rank has seen all rows.

    Args:
        x: [..., L_rank, ..., in], this rank's shard along `dim`; shards may differ in length, and be empty.
        w: [out, in], or several that share one gather (q, k and v; gate and up); x's dtype, any `out` on each rank.
        group: the ranks, as pyfast.comm.Group or torch process group.
        bias: [out], or one (or None) for each weight.
        dim: the dimension of x that is cut; not the last.
        return_gathered: also return the gathered x, whose gradient is summed into that of x.
        main_grad, defer: as in `pyfast.ops.linear`; one (or None) for each weight.
        transport: "auto", or "shared_memory" / "collective": see `pyfast.ops.overlap.transport_for`.
        name: what this is called in records and errors.

    Returns:
        [..., sum of L, ..., out] in x's dtype; a tuple of them for several weights, then the gathered x if asked for.
        Sums are float32 (float64 for float64), rounded once.

    Raises:
        TypeError, ValueError: naming the argument that does not fit; the same ValueError on every rank when they
            disagree on shapes or dtypes.
        RuntimeError: a rank has ended or not come in time; names it and the operation.
    """
    several = not isinstance(w, Tensor)
    weights = list(w) if several else [w]
    if not weights:
        raise ValueError("w is an empty sequence; at least one weight is needed")
    biases = _one_each("bias", bias, weights, several)
    main_grads = _one_each("main_grad", main_grad, weights, several)
    x, *tensors = autocast(x, *weights, *biases)
    weights, biases = tensors[: len(weights)], tensors[len(weights) :]
    check_product(x, weights, biases, least_dims=2)
    dim = check_dim(dim, x)
    for buffer, weight in zip(main_grads, weights, strict=True):
        check_main_grad("main_grad", buffer, "w", weight, defer)
    group = Group.wrap(group)
    call = _Call(transport_for(group, x.device, transport), dim, name, return_gathered, tuple(main_grads), defer)
    if records((x, *weights, *biases)):
        results = _AllGatherMatmul.apply(call, x, *weights, *biases)
    else:
        factors = [weight.t() for weight in weights]
        outs, whole, _ = call.transport.gather_matmul(
            "all_gather_matmul", name, x, dim, factors, biases, return_gathered
        )
        results = (*outs, whole) if return_gathered else tuple(outs)
    return results if several or return_gathered else results[0]


def _one_each(name: str, value: object, weights: Sequence[Tensor], several: bool) -> list:
    if value is None:
        return [None] * len(weights)
    if not several:
        return [value]
    if isinstance(value, Tensor) or len(value) != len(weights):
        raise ValueError(f"{name} must be a sequence of {len(weights)}, one (or None) for each weight of w")
    return list(value)


@dataclass(frozen=True)
class _Call:
    transport: Transport
    dim: int
    name: str
    keep: bool
    main_grads: tuple[Tensor | None, ...]
    defer: Defer | None


class _AllGatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: _Call, x: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        count = len(tensors) // 2
        weights, biases = tensors[:count], tensors[count:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *weights)
        ctx.call = call
        factors = [w.t() for w in weights]
        outs, whole, ctx.lengths = call.transport.gather_matmul(
            "all_gather_matmul", call.name, x, call.dim, factors, biases, call.keep
        )
        return (*outs, whole) if call.keep else tuple(outs)

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        refuse_second_derivative("all_gather_matmul")
        x, *weights = ctx.saved_tensors
        call, count = ctx.call, len(weights)
        _, needs_x, *needed = ctx.needs_input_grad
        needs_w, needs_bias = needed[:count], needed[count:]
        dys, dwhole = grads[:count], grads[count] if call.keep else None
        wanted = [need and dy is not None for need, dy in zip(needs_w, dys, strict=True)]
        gather = scatter = None
        if any(wanted):
            gather = call.transport.gather("all_gather", f"{call.name} weight gradient", x, call.dim)
        pairs = [(dy, w) for dy, w in zip(dys, weights, strict=True) if dy is not None]
        if needs_x and (pairs or dwhole is not None):
            scatter = _scatter(call, ctx.lengths, x, pairs, dwhole)
        dws: list[Tensor | None] = [None] * count
        whole = gather() if gather is not None else None
        for index in (index for index, want in enumerate(wanted) if want):
            main_grad = call.main_grads[index]
            dws[index] = weight_gradient_or_add(dys[index], whole, weights[index], main_grad, call.defer)
        dx = scatter() if scatter is not None else None
        dbs = [bias_gradient(dy) if need and dy is not None else None for need, dy in zip(needs_bias, dys, strict=True)]
        return None, dx, *dws, *dbs


def _scatter(
    call: _Call, lengths: tuple[int, ...], x: Tensor, pairs: list[tuple[Tensor, Tensor]], dwhole: Tensor | None
):
    """Begin to sum the gradient of the gathered x and cut it as x was cut."""
    if not pairs:  # only the gathered x was used: a product of depth 0 beside it
        pairs = [(dwhole[..., :0], x.new_empty(0, x.shape[-1]))]
    return call.transport.matmul_scatter(
        "matmul_reduce_scatter", f"{call.name} input gradient", pairs, call.dim, lengths, addend=dwhole
    )
