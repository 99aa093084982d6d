"""Row-parallel product whose result is cut over the group: partial products, summed where each part belongs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pyfast.comm import Group
from pyfast.comm.schedule import even_lengths
from pyfast.ops.checks import autocast
from pyfast.ops.dispatch import records, refuse_second_derivative
from pyfast.ops.linear import bias_gradient, weight_gradient_or_add
from pyfast.ops.main_grad import Defer, check_main_grad
from pyfast.ops.overlap import Transport, check_dim, check_product, transport_for


def matmul_reduce_scatter(
    x: Tensor,
    w: Tensor,
    group: Group | dist.ProcessGroup,
    *,
    bias: Tensor | None = None,
    dim: int = 0,
    rows: Sequence[int] | None = None,
    main_grad: Tensor | None = None,
    defer: Defer | None = None,
    transport: str = "auto",
    name: str = "matmul_reduce_scatter",
) -> Tensor:
    """reduce_scatter(x @ w.T, dim) + bias: x and w are cut over the group by their last dimension.

    Backward gathers the upstream gradient once, for the gradients of x and of w; with neither, nothing is sent. The
    gradient of `bias` is that of this rank's rows: a part of the sum over the group.

    Args:
        x: [..., L, ..., in_rank], all rows on every rank.
        w: [out, in_rank], x's dtype.
        group: the ranks, as pyfast.comm.Group or torch process group.
        bias: [out], the same on every rank; added once.
        dim: the dimension along which the result is cut; not the last.
        rows: each rank's part of L; None: as even as possible, longer ones first.
        main_grad, defer: as in `pyfast.ops.linear`.
        transport, name: as in `all_gather_matmul`.

    Returns:
        [..., rows[rank], ..., out] in x's dtype; the partial products are summed in rank order in float32 (float64 for
        float64) and rounded once.

    Raises:
        as `all_gather_matmul`; ValueError for `rows` that have not one entry >= 0 for each rank, adding up to L.
    """
    x, w, bias = autocast(x, w, bias)
    check_product(x, [w], [bias], least_dims=2)
    dim = check_dim(dim, x)
    check_main_grad("main_grad", main_grad, "w", w, defer)
    group = Group.wrap(group)
    lengths = even_lengths(x.shape[dim], group.size) if rows is None else tuple(int(count) for count in rows)
    if len(lengths) != group.size or min(lengths) < 0 or sum(lengths) != x.shape[dim]:
        raise ValueError(
            f"rows is {list(lengths)}; it must have {group.size} entries >= 0, one for each rank, that add up to "
            f"x.shape[{dim}] = {x.shape[dim]}"
        )
    call = _Call(transport_for(group, x.device, transport), dim, lengths, name, main_grad, defer)
    if not records((x, w, bias)):
        return call.transport.matmul_scatter("matmul_reduce_scatter", name, [(x, w.t())], dim, lengths, bias)()
    return _MatmulReduceScatter.apply(call, x, w, bias)


@dataclass(frozen=True)
class _Call:
    transport: Transport
    dim: int
    lengths: tuple[int, ...]
    name: str
    main_grad: Tensor | None
    defer: Defer | None


class _MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: _Call, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.call = call
        return call.transport.matmul_scatter(
            "matmul_reduce_scatter", call.name, [(x, w.t())], call.dim, call.lengths, bias
        )()

    @staticmethod
    def backward(ctx, dy: Tensor):
        refuse_second_derivative("matmul_reduce_scatter")
        x, w = ctx.saved_tensors
        call = ctx.call
        _, needs_x, needs_w, needs_bias = ctx.needs_input_grad
        dx = whole = None
        if needs_x:
            (dx,), whole, _ = call.transport.gather_matmul(
                "all_gather_matmul", f"{call.name} input gradient", dy, call.dim, [w], [None], keep=needs_w
            )
        elif needs_w:
            whole = call.transport.gather("all_gather", f"{call.name} weight gradient", dy, call.dim)()
        dw = weight_gradient_or_add(whole, x, w, call.main_grad, call.defer) if needs_w else None
        return None, dx, dw, bias_gradient(dy) if needs_bias else None
