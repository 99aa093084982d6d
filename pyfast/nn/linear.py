"""Linear layers cut over a tensor-parallel group: by outputs (column-parallel) and by inputs (row-parallel).

y = x W^T. Column-parallel: each rank holds a part of the outputs, x is the same on all ranks. Row-parallel: each rank
holds a part of the inputs, the partial products are summed over the group. One after the other costs one all-reduce
forward and one backward (Shoeybi et al., Megatron-LM, 2019).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyfast.nn.gradient_sink import get_sink
from pyfast.nn.layout import Layout, Shard
from pyfast.nn.parameter import LayoutModule, active_group, check_enough, linear_bound, new_parameter
from pyfast.ops.all_gather_matmul import all_gather_matmul
from pyfast.ops.checks import autocast
from pyfast.ops.collective import reduce_from_group
from pyfast.ops.dispatch import refuse_second_derivative
from pyfast.ops.linear import bias_gradient, input_gradient, linear, weight_gradient, write_weight_gradient
from pyfast.ops.matmul_reduce_scatter import matmul_reduce_scatter


class ColumnParallelLinear(LayoutModule):
    """y = x W^T + b with the outputs cut over `group`: x [..., in] on every rank -> y [..., out_local].

    Arguments:
        in_features, out_features: the unsharded sizes.
        bias: add a bias, cut like the outputs.
        group: Group or torch ProcessGroup to cut over; None: one rank, no collective.
        parts: sizes of blocks stacked along the outputs (q, k, v of a fused projection; gate and up) that sum to
            out_features; each is cut over the ranks separately. Default: one block.
        mesh_dim: the mesh dimension the group belongs to, for the parameters' Layout.
        name: names the collectives in errors, records and profiles.
        sequence_dim: the dimension along which x is cut over the group (sequence parallelism, Korthikanti et al.,
            2022): it is gathered beside the product. None: x is whole on every rank.
    The gradient of x is summed over the group (and cut again). Raises ValueError when the parts do not add up to
    out_features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        group: object | None = None,
        parts: Sequence[int] | None = None,
        mesh_dim: str = "tp",
        name: str = "column_linear",
        sequence_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        parts = (out_features,) if parts is None else tuple(parts)
        if sum(parts) != out_features:
            raise ValueError(f"parts={parts} add up to {sum(parts)}, they must add up to out_features={out_features}")
        self.in_features, self.out_features, self.name = in_features, out_features, name
        self.group, self.sequence_dim = active_group(group), sequence_dim
        for part in parts:
            check_enough(self.group, f"{name}: a part of out_features", part)
        options = {"dtype": dtype, "device": device}
        shards = (Shard(mesh_dim, 0, parts),)
        layout = Layout((out_features, in_features), shards)
        self.weight = new_parameter(layout, self.group, mesh_dim, bound=linear_bound(in_features), **options)
        self.bias = new_parameter(Layout((out_features,), shards), self.group, mesh_dim, **options) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return _linear(x, self.weight, self.bias)
        if self.sequence_dim is not None:
            options = {"dim": self.sequence_dim, "name": self.name}
            return all_gather_matmul(x, self.weight, self.group, bias=self.bias, **options)
        return column_parallel_linear(x, self.weight, self.bias, self.group, self.name)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class RowParallelLinear(LayoutModule):
    """y = sum over ranks of x W^T, + b once: x [..., in_local] -> y [..., out] on every rank.

    Arguments as in ColumnParallelLinear; `parts` are blocks stacked along the inputs. With `sequence_dim` each rank
    gets its part of y along that dimension, as even as possible, and the gradient of the bias is a part on each rank,
    as its Layout says.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        group: object | None = None,
        parts: Sequence[int] | None = None,
        mesh_dim: str = "tp",
        name: str = "row_linear",
        sequence_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        parts = (in_features,) if parts is None else tuple(parts)
        if sum(parts) != in_features:
            raise ValueError(f"parts={parts} add up to {sum(parts)}, they must add up to in_features={in_features}")
        self.in_features, self.out_features, self.name = in_features, out_features, name
        self.group, self.sequence_dim = active_group(group), sequence_dim
        for part in parts:
            check_enough(self.group, f"{name}: a part of in_features", part)
        options = {"dtype": dtype, "device": device}
        layout = Layout((out_features, in_features), (Shard(mesh_dim, 1, parts),))
        self.weight = new_parameter(layout, self.group, mesh_dim, bound=linear_bound(in_features), **options)
        partial = () if sequence_dim is None else (mesh_dim,)
        bias_layout = Layout((out_features,), partial=partial)
        self.bias = new_parameter(bias_layout, self.group, mesh_dim, **options) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return _linear(x, self.weight, self.bias)
        if self.sequence_dim is not None:
            options = {"dim": self.sequence_dim, "name": self.name}
            return matmul_reduce_scatter(x, self.weight, self.group, bias=self.bias, **options)
        y = reduce_from_group(_linear(x, self.weight, None), self.group, self.name, in_place=True)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear`, with the gradient of `weight` written to its sink if it has one."""
    if get_sink(weight) is None:
        return linear(x, weight, bias)
    return column_parallel_linear(x, weight, bias, None, "")


def column_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: object, name: str) -> Tensor:
    """x [..., in] times this rank's weight [out_local, in]; the gradient of x is summed over the group.

    That sum travels while the weight gradient is computed. A frozen weight skips its GEMM, an x without gradient skips
    its GEMM and its all-reduce. group None: nobody else, no sum. The gradient of a weight with a sink goes there.
    """
    sink = get_sink(weight)
    parameter = weight
    x, weight, bias = autocast(x, weight, bias)  # outside: gradients come back in the parameters' dtype
    if weight is not parameter:  # a copy, whose gradient autograd casts back
        sink = None
    return _ColumnParallelLinear.apply(x, weight, bias, group, name, sink)


class _ColumnParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, group, name: str, sink) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.name, ctx.sink = group, name, sink
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):
        refuse_second_derivative("column_parallel_linear")
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dx = dw = db = work = None
        if needs_x:
            dx = input_gradient(grad, weight)
            if ctx.group is not None:
                work = ctx.group.all_reduce(dx, name=f"{ctx.name} input gradient", async_op=True)
        if needs_weight:
            target = None if ctx.sink is None else ctx.sink.target()
            if target is None:
                dw = weight_gradient(grad, x, weight)
            else:
                write_weight_gradient(grad, x, *target)
                dw = ctx.sink.nothing()
        if needs_bias:
            db = bias_gradient(grad)
        if work is not None:
            work.wait()
        return dx, dw, db, None, None, None
