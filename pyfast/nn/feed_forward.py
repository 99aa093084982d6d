"""The SwiGLU feed-forward layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyfast import ops
from pyfast.nn.linear import ColumnParallelLinear, RowParallelLinear
from pyfast.nn.parameter import active_group
from pyfast.nn.recompute import Light, call


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer, 2020): x [..., width] -> [..., width].

    gate and up are one projection of 2 * ffn_width outputs, gate first. Under a group each rank holds a part of the
    ffn_width columns; one all-reduce forward, one backward. With `sequence_dim`, x and the result are cut over the
    group along that dimension (see ColumnParallelLinear), and gate and up share one gather.
    """

    def __init__(
        self,
        width: int,
        ffn_width: int,
        *,
        bias: bool = False,
        group: object | None = None,
        mesh_dim: str = "tp",
        name: str = "ffn",
        sequence_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        group = active_group(group)  # both layers share one channel
        options = {"bias": bias, "group": group, "mesh_dim": mesh_dim, "dtype": dtype, "device": device}
        options["sequence_dim"] = sequence_dim
        parts = (ffn_width, ffn_width)
        self.gate_up = ColumnParallelLinear(width, 2 * ffn_width, parts=parts, name=f"{name}.gate_up", **options)
        self.down = RowParallelLinear(ffn_width, width, name=f"{name}.down", **options)

    def forward(self, x: Tensor, *, light: Light = call) -> Tensor:
        """light: runs what is cheap to compute again in backward, see pyfast.nn.recompute."""
        return self.down(light(ops.swiglu, self.gate_up(x)))
