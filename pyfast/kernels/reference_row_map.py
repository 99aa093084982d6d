"""What maps and row movement mean: sorting by lists, moving by dense 0/1 matrices. Differentiable, the oracle of tests.

T tokens, K slots a token, E experts, R = T * K sorted rows, H width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyfast.kernels.dtypes import sum_dtype


def row_map(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(offsets [E+1], gather [R], slot [R], inverse [R]) of experts [T, K], by Python's stable sort."""
    ids = experts.flatten().tolist()
    order = sorted((slot for slot, expert in enumerate(ids) if expert >= 0), key=lambda slot: ids[slot])
    inverse = [-1] * len(ids)
    for row, slot in enumerate(order):
        inverse[slot] = row
    slots = order + [-1] * (len(ids) - len(order))
    gather = [slot // experts.shape[1] if slot >= 0 else -1 for slot in slots]
    offsets = [0]
    for expert in range(num_experts):
        offsets.append(offsets[-1] + ids.count(expert))
    return tuple(torch.tensor(values, dtype=torch.int32) for values in (offsets, gather, slots, inverse))


def tile_list(offsets: Tensor, block: int) -> list[tuple[int, int]]:
    """(expert, first row) of each tile."""
    bounds = offsets.tolist()
    return [(e, row) for e in range(len(bounds) - 1) for row in range(bounds[e], bounds[e + 1], block)]


def gather_rows(x: Tensor, gather: Tensor) -> Tensor:
    """rows [R, H] = a 0/1 matrix [R, T] times x [T, H]."""
    wide = sum_dtype(x.dtype)
    return (_selection(gather, x.shape[0]).to(wide) @ x.to(wide)).to(x.dtype)


def unpermute(rows: Tensor, inverse: Tensor, weights: Tensor | None, k: int) -> Tensor:
    """y [T, H] = [T, R] times rows [R, H]: the matrix holds the weight of each row in each token."""
    wide = sum_dtype(rows.dtype)
    chosen_TKR = _selection(inverse, rows.shape[0]).to(wide).unflatten(0, (-1, k))
    if weights is not None:
        chosen_TKR = chosen_TKR * weights.to(wide)[:, :, None]
    return (chosen_TKR.sum(1) @ rows.to(wide)).to(rows.dtype)


def _selection(indices: Tensor, size: int) -> Tensor:
    """Row i is 1 at indices[i] and 0 elsewhere, all 0 for -1."""
    return indices[:, None] == torch.arange(size, device=indices.device)
