"""Merging attention over disjoint sets of keys. B batch, S sequence, T packed tokens, N heads, D head size."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyfast.kernels.dtypes import sum_dtype
from pyfast.ops.checks import check_float, check_same


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the (out, lse) over each of them.

    A side whose lse is -inf (no keys, or too far below the other to count) is left out, not multiplied by 0: its `out`
    may hold anything. Merge before adding a sink, or give the sink to one side only.

    Args:
        out_a, out_b: [B, S, N, D] or [T, N, D], as `attention` returns them. Keep partial results in float32: each merge
            rounds to their dtype.
        lse_a, lse_b: [B, N, S] or [N, T], float32 (float64 for float64).

    Returns:
        (out, lse) in the dtypes of the arguments; out 0 and lse -inf where neither side has a key. Differentiable.

    Raises:
        TypeError, ValueError: naming the argument that does not fit.
    """
    check_float("out_a", out_a)
    check_same("out_b", out_b, "out_a", out_a)
    if out_a.dim() not in (3, 4) or out_a.shape != out_b.shape:
        raise ValueError(
            f"out_a has shape {tuple(out_a.shape)}, out_b {tuple(out_b.shape)}; both must be the same [B, S, N, D] or "
            "[T, N, D]"
        )
    wide = sum_dtype(out_a.dtype)
    rows = out_a.shape[:-1]
    expected = (*rows[:-2], rows[-1], rows[-2])
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if not isinstance(lse, Tensor) or lse.dtype != wide:
            what = lse.dtype if isinstance(lse, Tensor) else type(lse).__name__
            raise TypeError(f"{name} is {what}; it must be {wide}, as attention returns it for {out_a.dtype}")
        if lse.shape != expected:
            raise ValueError(f"{name} has shape {tuple(lse.shape)}; {expected} belongs to out {tuple(out_a.shape)}")
        if lse.device != out_a.device:
            raise ValueError(f"{name} is on {lse.device}, out_a on {out_a.device}; move them to one device")

    # m = max(a, b); w = exp(lse - m); out = sum of w out / Z, lse = m + log Z. With m = -inf nothing is subtracted.
    top = torch.maximum(lse_a, lse_b).detach()
    top = torch.where(top == -math.inf, 0.0, top)
    weight_a, weight_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = weight_a + weight_b
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    out = _share(out_a, weight_a / total) + _share(out_b, weight_b / total)
    lse = torch.where(empty, -math.inf, top + torch.log(total))
    return out.to(out_a.dtype), lse


def _share(out: Tensor, weight: Tensor) -> Tensor:
    """weight * out, and 0 with no gradient to either where the weight is 0. weight [.., N, S], out [.., S, N, D]."""
    weight = weight.transpose(-1, -2).unsqueeze(-1)
    nothing = weight == 0
    return torch.where(nothing, 0.0, torch.where(nothing, 0.0, out.to(weight.dtype)) * weight)
