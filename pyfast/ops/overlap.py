"""What the collective matmuls share before anything is sent: which transport, and whether the arguments fit.

Wang et al., "Overlap communication with dependent computation via decomposition" (ASPLOS 2023); Chang et al., "FLUX"
(2024), for products that take their operands as they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pyfast.comm import Group
from pyfast.ops.checks import check_float, check_same
from pyfast.ops.overlap_collective import CollectiveTransport
from pyfast.ops.overlap_shared import SharedTransport

Transport = SharedTransport | CollectiveTransport
TRANSPORTS = ("auto", "shared_memory", "collective")


def transport_for(group: Group | dist.ProcessGroup, device: torch.device, transport: str) -> Transport:
    """How `group` moves tensors of `device`: through shared memory where all its ranks have it, unless said otherwise.

    Raises:
        ValueError: an unknown transport, or shared memory asked for where the ranks do not have it.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport is {transport!r}, must be one of {', '.join(map(repr, TRANSPORTS))}")
    group = Group.wrap(group)
    memory = None
    if transport != "collective" and device.type == "cpu":
        memory = group.symmetric()
    if memory is not None:
        return SharedTransport(group, memory)
    if transport == "shared_memory":
        raise ValueError(
            f"transport is 'shared_memory', but the ranks of group '{group.name}' do not share memory: it needs CPU "
            "tensors, all ranks on one Linux host, and a group made by Group.create or a mesh"
        )
    return CollectiveTransport(group)


def explain_transport(group: Group | dist.ProcessGroup, device: torch.device | str = "cpu") -> str:
    """One sentence: how the collective matmuls of `group` travel, and why. Collective at the first call."""
    chosen = transport_for(group, torch.device(device), "auto")
    if chosen.name == "shared_memory":
        return "shared_memory: all ranks map each other's buffers; products read peers' rows where they lie"
    return "collective: the ranks do not share memory; a collective, then a whole product"


def check_product(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], least_dims: int) -> None:
    """Raise TypeError / ValueError unless x [..., in] can be multiplied by each weight [out, in], + bias [out]."""
    if torch.compiler.is_compiling():
        raise NotImplementedError("collective matmuls under torch.compile are not supported yet: call them outside")
    check_float("x", x)
    if x.dim() < least_dims:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; at least {least_dims} dimensions are needed, the last the width"
        )
    for w, bias in zip(weights, biases, strict=True):
        check_same("w", w, "x", x)
        if w.dim() != 2 or w.shape[1] != x.shape[-1]:
            raise ValueError(f"w has shape {tuple(w.shape)}; it must be (out, {x.shape[-1]}), the last being x's width")
        if bias is not None:
            check_same("bias", bias, "x", x)
            if bias.shape != w.shape[:1]:
                raise ValueError(f"bias has shape {tuple(bias.shape)}; it must be ({w.shape[0]},), w's outputs")


def check_dim(dim: int, x: Tensor) -> int:
    """`dim` from the front; ValueError unless it is a dimension of x before the last."""
    if not -x.dim() <= dim < x.dim() or dim % x.dim() == x.dim() - 1:
        raise ValueError(f"dim is {dim}; it must be a dimension of x {tuple(x.shape)} other than the last, its width")
    return dim % x.dim()
