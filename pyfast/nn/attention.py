"""Causal grouped-query self-attention from a fused projection. Shapes: B S T H Nq Nk D as in the package."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from pyfast import ops
from pyfast.nn.linear import ColumnParallelLinear, RowParallelLinear
from pyfast.nn.norm import RMSNorm
from pyfast.nn.parameter import active_group, check_divisible
from pyfast.nn.recompute import Light, call


class KeyValueCache(Protocol):
    """What `Attention` asks of a cache: take the new keys and values, give back all of them."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...


class Attention(nn.Module):
    """Causal self-attention: x [B, S, H], or packed [T, H] with cu_seqlens -> like x.

    Arguments:
        width: H. heads, kv_heads: Nq, Nk (Ainslie et al., 2023); query head n reads kv head n // (Nq // Nk). kv_heads
            is heads by default.
        head_size: D, independent of the width; width / heads by default.
        qk_norm: RMSNorm over D on queries and keys before the rotation, as in Qwen3.
        window: keys each query sees, its own among them; None: all earlier ones.
        bias, output_bias: of the fused projection, and of the output projection.
        scale: of the scores, default D^-0.5.
        group, mesh_dim, name: as in ColumnParallelLinear; each rank holds Nq / P and Nk / P heads.
        sequence_dim: the dimension along which x and the result are cut over the group, as in ColumnParallelLinear;
            q, k and v share one gather. cos, sin, positions and cu_seqlens stay those of the whole sequence.
    Raises ValueError when heads or kv_heads do not divide over the group, or kv_heads does not divide heads.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        head_size: int | None = None,
        *,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        window: int | None = None,
        bias: bool = False,
        output_bias: bool = False,
        scale: float | None = None,
        group: object | None = None,
        mesh_dim: str = "tp",
        name: str = "attention",
        sequence_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        group = active_group(group)
        kv_heads = heads if kv_heads is None else kv_heads
        if head_size is None:
            if heads < 1 or width % heads:
                raise ValueError(f"heads={heads} does not divide width={width}; give head_size")
            head_size = width // heads
        check_divisible(group, heads=heads, kv_heads=kv_heads)
        if heads % kv_heads:
            raise ValueError(f"kv_heads={kv_heads} must divide heads={heads}")
        if window is not None and window < 1:
            raise ValueError(f"window={window} must be at least 1 (a query sees its own key), or None for no window")
        ranks = 1 if group is None else group.size
        self.heads, self.kv_heads, self.head_size = heads // ranks, kv_heads // ranks, head_size
        self.split = (self.heads, self.kv_heads, self.kv_heads)
        self.window = (-1, -1) if window is None else (window - 1, 0)
        self.scale = scale
        tensor = {"dtype": dtype, "device": device}
        options = {"group": group, "mesh_dim": mesh_dim, "sequence_dim": sequence_dim, **tensor}
        parts = (heads * head_size, kv_heads * head_size, kv_heads * head_size)
        self.qkv = ColumnParallelLinear(width, sum(parts), bias=bias, parts=parts, name=f"{name}.qkv", **options)
        self.output = RowParallelLinear(heads * head_size, width, bias=output_bias, name=f"{name}.output", **options)
        partial = (mesh_dim,)
        self.q_norm = RMSNorm(head_size, eps=norm_eps, partial=partial, **tensor) if qk_norm else None
        self.k_norm = RMSNorm(head_size, eps=norm_eps, partial=partial, **tensor) if qk_norm else None

    def forward(
        self,
        x: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: KeyValueCache | None = None,
        light: Light = call,
    ) -> Tensor:
        """cos, sin float32 [P, D/2] (None: no rotation), positions int [S], [T] or [B, S], cu_seqlens int32 [docs + 1].

        `cache` takes the new keys and values and gives all of them; the queries are then the last S positions.
        light: runs what is cheap to compute again in backward, see pyfast.nn.recompute.
        """
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_size))
        q, k, v = qkv.split(self.split, dim=-2)  # strided views: the kernels take them as they are
        if self.q_norm is not None or cos is not None:
            q = light(_norm_and_rotate, q, self.q_norm, cos, sin, positions)
            k = light(_norm_and_rotate, k, self.k_norm, cos, sin, positions)
        if cache is not None:
            k, v = cache.append(k, v)
        out = ops.attention(
            q,
            k,
            v,
            causal=True,
            scale=self.scale,
            window=self.window,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
        )
        return self.output(out.flatten(-2))


def _norm_and_rotate(
    x: Tensor, norm: RMSNorm | None, cos: Tensor | None, sin: Tensor | None, positions: Tensor | None
) -> Tensor:
    """Queries or keys [..., N, D] as attention takes them."""
    x = x if norm is None else norm(x)
    return x if cos is None else ops.rotary(x, cos, sin, positions=positions)
