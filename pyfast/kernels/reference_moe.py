"""Grouped GEMM and expert MLP in plain torch: dense, every expert over every row, differentiable. The oracle.

T tokens, R rows, K top-k, E experts, H model width, F expert width. Arithmetic in float32 (float64 for float64),
rounded once at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyfast.kernels.reference import accumulation_dtype


def grouped_gemm(
    x: Tensor, w: Tensor, offsets: Tensor, *, transpose: bool = False, bias: Tensor | None = None
) -> Tensor:
    """y[r] = x[r] @ w[e].T + bias[e] (w[e] with `transpose`) for offsets[e] <= r < offsets[e + 1]; 0 in other rows."""
    wide = accumulation_dtype(x.dtype)
    all_y = torch.einsum("rn,enk->erk" if transpose else "rk,enk->ern", x.to(wide), w.to(wide))
    if bias is not None:
        all_y = all_y + bias.to(wide).unsqueeze(1)
    row = torch.arange(x.shape[0], device=x.device)
    mine = (row >= offsets[:-1].unsqueeze(1)) & (row < offsets[1:].unsqueeze(1))  # [E, R]
    return torch.where(mine.unsqueeze(2), all_y, 0.0).sum(0).to(x.dtype)


def moe_mlp(x: Tensor, experts: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """y[t] = sum over k of weights[t, k] w_down[e] (silu(g) u), (g, u) = w_gate_up[e] x[t], e = experts[t, k] >= 0."""
    wide = accumulation_dtype(x.dtype)
    gate, up = torch.einsum("th,efh->etf", x.to(wide), w_gate_up.to(wide)).chunk(2, dim=-1)
    all_y = torch.einsum("etf,ehf->eth", gate * torch.sigmoid(gate) * up, w_down.to(wide))
    expert = torch.arange(w_gate_up.shape[0], device=x.device).view(-1, 1, 1)
    share = torch.where(experts.unsqueeze(0) == expert, weights.to(wide).unsqueeze(0), 0.0).sum(2)  # [E, T]
    return torch.einsum("et,eth->th", share, all_y).to(x.dtype)
