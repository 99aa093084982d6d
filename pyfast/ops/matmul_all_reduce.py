"""Row-parallel product whose result every rank gets whole: partial products, summed over the group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pyfast.comm import Group
from pyfast.ops.checks import autocast
from pyfast.ops.dispatch import records, refuse_second_derivative
from pyfast.ops.linear import bias_gradient, input_gradient, weight_gradient_or_add
from pyfast.ops.main_grad import Defer, check_main_grad
from pyfast.ops.overlap import Transport, check_product, transport_for


def matmul_all_reduce(
    x: Tensor,
    w: Tensor,
    group: Group | dist.ProcessGroup,
    *,
    bias: Tensor | None = None,
    main_grad: Tensor | None = None,
    defer: Defer | None = None,
    transport: str = "auto",
    name: str = "matmul_all_reduce",
) -> Tensor:
    """all_reduce(x @ w.T) + bias: x and w are cut over the group by their last dimension.

    The result is the same on every rank and must be used alike there (a replicated loss): backward sends nothing.

    Args:
        x: [..., in_rank], the same rows on every rank.
        w: [out, in_rank], x's dtype.
        group: the ranks, as pyfast.comm.Group or torch process group.
        bias: [out], the same on every rank; added once.
        main_grad, defer: as in `pyfast.ops.linear`.
        transport, name: as in `all_gather_matmul`.

    Returns:
        [..., out] in x's dtype, the same bits on every rank; the partial products are summed in rank order in float32
        (float64 for float64) and rounded once.

    Raises:
        as `all_gather_matmul`.
    """
    x, w, bias = autocast(x, w, bias)
    check_product(x, [w], [bias], least_dims=1)
    check_main_grad("main_grad", main_grad, "w", w, defer)
    call = _Call(transport_for(Group.wrap(group), x.device, transport), name, main_grad, defer)
    if not records((x, w, bias)):
        return call.transport.matmul_all_reduce("matmul_all_reduce", name, x, w.t(), bias)
    return _MatmulAllReduce.apply(call, x, w, bias)


@dataclass(frozen=True)
class _Call:
    transport: Transport
    name: str
    main_grad: Tensor | None
    defer: Defer | None


class _MatmulAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: _Call, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.call = call
        return call.transport.matmul_all_reduce("matmul_all_reduce", call.name, x, w.t(), bias)

    @staticmethod
    def backward(ctx, dy: Tensor):
        refuse_second_derivative("matmul_all_reduce")
        x, w = ctx.saved_tensors
        call = ctx.call
        _, needs_x, needs_w, needs_bias = ctx.needs_input_grad
        dx = input_gradient(dy, w) if needs_x else None
        dw = weight_gradient_or_add(dy, x, w, call.main_grad, call.defer) if needs_w else None
        return None, dx, dw, bias_gradient(dy) if needs_bias else None
