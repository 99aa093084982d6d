"""Maps and row movement on the C++ CPU kernels (csrc/cpu/row_map.cpp, permute.cpp).

T tokens, K slots a token, E experts, R = T * K sorted rows, H width. Shapes and dtypes are checked by `pyfast.ops`;
values (expert ids, entries of the maps) by the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyfast.kernels.dtypes import DTYPE_CODES
from pyfast.kernels.errors import expert_error, map_error, tiles_error
from pyfast.kernels.extension import _C


def row_map(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(offsets [E+1], gather [R], slot [R], inverse [R]), all int32, of experts [T, K] (int32 or int64, any strides).

    Raises ValueError for an id that is neither -1 nor in [0, num_experts).
    """
    tokens, k = experts.shape
    offsets = torch.empty(num_experts + 1, dtype=torch.int32)
    gather, slot, inverse = (torch.empty(tokens * k, dtype=torch.int32) for _ in range(3))
    bad = _C.row_map(
        experts.data_ptr(), experts.dtype == torch.int64, tokens, k, *experts.stride(), num_experts,
        offsets.data_ptr(), gather.data_ptr(), slot.data_ptr(), inverse.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    if bad >= 0:
        token, number = divmod(bad, k)
        raise ValueError(expert_error(experts[token, number].item(), token, number, num_experts))
    return offsets, gather, slot, inverse


def tile_list(offsets: Tensor, block: int, bound: int) -> tuple[Tensor, Tensor]:
    """(tiles int32 [bound, 2], count int32 [1]): (expert, first row) of each tile of up to `block` sorted rows.

    A tile ends after `block` rows or where its expert's rows end. Tiles ascend; from count on they are (-1, -1).

    Args:
        offsets: int32 [E+1], ascending.
        block: rows of a full tile.
        bound: how many tiles there is room for, see `pyfast.kernels.tiles.tile_bound`.
    """
    tiles, count = torch.empty((bound, 2), dtype=torch.int32), torch.empty(1, dtype=torch.int32)
    offsets = offsets.contiguous()
    if not _C.tile_list(
        offsets.data_ptr(), offsets.numel() - 1, block, bound, tiles.data_ptr(), count.data_ptr()
    ):  # fmt: skip
        raise ValueError(tiles_error(bound))
    return tiles, count


def gather_rows(x: Tensor, gather: Tensor) -> Tensor:
    """rows [R, H] with rows[r] = x[gather[r]], 0 where gather[r] is -1; x [T, H]."""
    x = _rows(x)
    tokens, width = x.shape
    gather = gather.contiguous()
    rows = torch.empty((gather.numel(), width), dtype=x.dtype)
    bad = _C.gather_rows(
        DTYPE_CODES[x.dtype], x.data_ptr(), gather.data_ptr(), rows.data_ptr(), tokens, gather.numel(), width,
        x.stride(0), torch.get_num_threads(),
    )  # fmt: skip
    if bad >= 0:
        raise ValueError(map_error("gather", gather[bad].item(), bad, tokens))
    return rows


def unpermute_forward(rows: Tensor, inverse: Tensor, weights: Tensor | None, k: int) -> Tensor:
    """y [T, H] = the sum over each token's k slots of weights [T, K] (None: 1) times rows[inverse], -1 left out.

    weights are in the sum dtype (float32, float64 for float64); the sum is in it too, k ascending, rounded once.
    """
    rows, inverse = _rows(rows), inverse.contiguous()
    weights = None if weights is None else weights.contiguous()
    count, width = rows.shape
    tokens = inverse.numel() // k
    y = torch.empty((tokens, width), dtype=rows.dtype)
    bad = _C.gather_sum(
        DTYPE_CODES[rows.dtype], rows.data_ptr(), inverse.data_ptr(), 0 if weights is None else weights.data_ptr(),
        y.data_ptr(), tokens, k, count, width, rows.stride(0), torch.get_num_threads(),
    )  # fmt: skip
    if bad >= 0:
        raise ValueError(map_error("inverse", inverse[bad].item(), bad, count))
    return y


def unpermute_backward(
    dy: Tensor, rows: Tensor | None, gather: Tensor, slot: Tensor, weights: Tensor, need_drows: bool,
    need_dweights: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(drows [R, H] like dy, dweights [T, K] like weights) of `unpermute_forward`; not needed: empty.

    drows[r] = weights[slot[r]] dy[gather[r]], dweights[slot[r]] = <rows[r], dy[gather[r]]>, 0 where there is no row.
    rows may be None when dweights is not needed.
    """
    dy, weights, gather, slot = _rows(dy), weights.contiguous(), gather.contiguous(), slot.contiguous()
    rows = _rows(rows) if need_dweights else None
    count, width, (tokens, k) = gather.numel(), dy.shape[1], weights.shape
    drows = torch.empty((count, width) if need_drows else (0,), dtype=dy.dtype)
    dweights = torch.empty((tokens, k) if need_dweights else (0,), dtype=weights.dtype)
    bad = _C.gather_sum_backward(
        DTYPE_CODES[dy.dtype], dy.data_ptr(), rows.data_ptr() if need_dweights else 0, gather.data_ptr(),
        slot.data_ptr(), weights.data_ptr(), drows.data_ptr() if need_drows else 0,
        dweights.data_ptr() if need_dweights else 0, tokens, k, count, width, dy.stride(0),
        rows.stride(0) if need_dweights else 0, torch.get_num_threads(),
    )  # fmt: skip
    if bad >= count:
        raise ValueError(map_error("slot", slot[bad - count].item(), bad - count, tokens * k))
    if bad >= 0:
        raise ValueError(map_error("gather", gather[bad].item(), bad, tokens))
    return drows, dweights


def _rows(x: Tensor) -> Tensor:
    """x [rows, H] with contiguous columns. Copies only if it must."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()
