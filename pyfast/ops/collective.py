"""Collectives with gradients: what crosses a group in the forward pass, and its counterpart in the backward pass.

Names follow what happens to the tensor in the forward pass. A tensor is *replicated* in a group when all its ranks hold
the same values, *partial* when the true value is the sum over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyfast.comm import Group
from pyfast.ops.dispatch import refuse_second_derivative


def copy_to_group(x: Tensor, group: Group | dist.ProcessGroup | None, name: str) -> Tensor:
    """Hand a replicated tensor to computations that differ by rank: identity; the gradient is summed over the group.

    Args:
        x: any shape, replicated. Returned unchanged.
        group: the ranks; with one rank (or None) nothing is sent.
        name: what the backward all-reduce is called in records and errors.
    """
    group = Group.wrap(group)
    return x if group.size == 1 else _CopyToGroup.apply(x, group, name)


def reduce_from_group(
    x: Tensor, group: Group | dist.ProcessGroup | None, name: str, *, in_place: bool = False
) -> Tensor:
    """Make a partial tensor whole: summed over the group; the gradient passes unchanged.

    Args:
        x: any shape, each rank's share of the sum.
        in_place: sum into `x` itself. Right for a fresh result, such as a matmul's, that nothing else reads.

    Returns:
        The sum, replicated: the same bits on every rank.
    """
    group = Group.wrap(group)
    return x if group.size == 1 else _ReduceFromGroup.apply(x, group, name, in_place)


def gather_from_group(
    x: Tensor, group: Group | dist.ProcessGroup | None, dim: int, name: str, *, sizes: list[int] | None = None
) -> Tensor:
    """Join the ranks' slices along `dim`; the gradient of the replicated result is cut back to this rank's slice.

    The result must be used alike on every rank (a replicated loss): its gradient is then replicated, and no backward
    communication is needed.

    Args:
        x: this rank's slice.
        sizes: length of each rank's slice along `dim`, when they differ; None: all are as long as this one.

    Returns:
        The slices in group order along `dim`, replicated.

    Raises:
        ValueError: `sizes` has not one entry a rank, or its entry for this rank is not x.shape[dim].
    """
    group = Group.wrap(group)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim: is {dim}, must be a dimension of x, which has shape {tuple(x.shape)}")
    dim = dim % x.dim()
    sizes = [x.shape[dim]] * group.size if sizes is None else list(sizes)
    if len(sizes) != group.size or sizes[group.rank] != x.shape[dim]:
        raise ValueError(
            f"sizes: is {sizes}, must have {group.size} entries, entry {group.rank} being x.shape[{dim}] = "
            f"{x.shape[dim]}"
        )
    return x if group.size == 1 else _GatherFromGroup.apply(x, group, dim, name, sizes)


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, name: str) -> Tensor:
        ctx.group, ctx.name = group, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivative("copy_to_group")
        # not in place: autograd may hand the same gradient tensor to another branch
        total = torch.empty_like(grad, memory_format=torch.contiguous_format)
        ctx.group.all_reduce(grad, name=f"{ctx.name} backward", out=total)
        return total, None, None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, name: str, in_place: bool) -> Tensor:
        if in_place:
            ctx.mark_dirty(x)
            group.all_reduce(x, name=name)
            return x
        total = torch.empty_like(x, memory_format=torch.contiguous_format)
        group.all_reduce(x, name=name, out=total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second_derivative("reduce_from_group")
        return grad, None, None, None


class _GatherFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, name: str, sizes: list[int]) -> Tensor:
        ctx.dim, ctx.start, ctx.length = dim, sum(sizes[: group.rank]), sizes[group.rank]
        longest = max(sizes)
        if ctx.length < longest:
            padding = x.new_zeros([longest - ctx.length if d == dim else n for d, n in enumerate(x.shape)])
            x = torch.cat([x, padding], dim)
        gathered = group.all_gather(x, name=name)
        return torch.cat([gathered[rank].narrow(dim, 0, size) for rank, size in enumerate(sizes)], dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        refuse_second_derivative("gather_from_group")
        return grad.narrow(ctx.dim, ctx.start, ctx.length), None, None, None, None
