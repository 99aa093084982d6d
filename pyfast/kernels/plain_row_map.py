"""Maps and row movement in plain torch, the functions of `cpu_row_map`: for devices without kernels of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from pyfast.kernels.dtypes import sum_dtype
from pyfast.kernels.errors import expert_error, tiles_error
from pyfast.kernels.full_precision import full_precision


def row_map(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `cpu_row_map.row_map`. Looks at the ids on the host to refuse those that do not exist."""
    wrong = ((experts < -1) | (experts >= num_experts)).nonzero()
    if len(wrong):
        token, number = wrong[0].tolist()
        raise ValueError(expert_error(experts[token, number].item(), token, number, num_experts))
    k, device = experts.shape[1], experts.device
    flat = experts.reshape(-1)
    dropped = flat < 0
    keys, order = torch.where(dropped, num_experts, flat).sort(stable=True)
    offsets = torch.searchsorted(keys, torch.arange(num_experts + 1, dtype=keys.dtype, device=device), out_int32=True)
    row = torch.arange(flat.numel(), dtype=torch.int32, device=device)
    slot = torch.where(row < offsets[-1], order.to(torch.int32), -1)
    gather = torch.where(slot < 0, -1, slot // k)
    inverse = torch.where(dropped, -1, torch.empty_like(row).scatter_(0, order, row))
    return offsets, gather, slot, inverse


def tile_list(offsets: Tensor, block: int, bound: int) -> tuple[Tensor, Tensor]:
    """See `cpu_row_map.tile_list`."""
    tiles_E = (offsets.diff() + block - 1) // block
    last_E = tiles_E.cumsum(0, dtype=torch.int32)
    if last_E[-1].item() > bound or tiles_E.min().item() < 0:
        raise ValueError(tiles_error(bound))
    tile = torch.arange(bound, dtype=torch.int32, device=offsets.device)
    expert = torch.searchsorted(last_E, tile, right=True, out_int32=True).clamp_(max=len(last_E) - 1)
    row = offsets[expert] + (tile - (last_E - tiles_E)[expert]) * block
    tiles = torch.stack([expert, row.to(torch.int32)], 1)
    return torch.where((tile < last_E[-1])[:, None], tiles, -1), last_E[-1:].clone()


def gather_rows(x: Tensor, gather: Tensor) -> Tensor:
    """See `cpu_row_map.gather_rows`."""
    return torch.where((gather >= 0)[:, None], x[gather.clamp(min=0)], 0)


@full_precision
def unpermute_forward(rows: Tensor, inverse: Tensor, weights: Tensor | None, k: int) -> Tensor:
    """See `cpu_row_map.unpermute_forward`."""
    terms = gather_rows(rows, inverse).to(sum_dtype(rows.dtype)).unflatten(0, (-1, k))
    return (terms if weights is None else terms * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


@full_precision
def unpermute_backward(
    dy: Tensor, rows: Tensor | None, gather: Tensor, slot: Tensor, weights: Tensor, need_drows: bool,
    need_dweights: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `cpu_row_map.unpermute_backward`."""
    wide = sum_dtype(dy.dtype)
    dy_R, kept = gather_rows(dy, gather).to(wide), slot >= 0
    drows, dweights = dy.new_empty(0), weights.new_empty(0)
    if need_drows:
        drows = torch.where(kept, weights.flatten()[slot.clamp(min=0)], 0)[:, None] * dy_R
    if need_dweights:
        dots = torch.where(kept[:, None], rows, 0).to(wide).mul(dy_R).sum(1)
        # Every slot has at most one row; rows without a slot go to a place of their own, behind the others.
        target = torch.where(kept, slot, weights.numel()).long()
        flat = weights.new_zeros(weights.numel() + 1, dtype=wide).scatter(0, target, dots)
        dweights = flat[:-1].view(weights.shape)
    return drows.to(dy.dtype), dweights
