"""Maps and row movement on NVIDIA GPUs, the functions of `cpu_row_map`: Triton, and plain torch for float64.

Nothing is read back from the device to check it: an expert id that does not exist fails a device-side assertion, the
entries of maps are trusted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyfast.kernels import plain_row_map
from pyfast.kernels.triton import permute
from pyfast.kernels.triton.row_map import row_map, tile_list  # noqa: F401


def gather_rows(x: Tensor, gather: Tensor) -> Tensor:
    """See `cpu_row_map.gather_rows`."""
    return permute.gather_rows(x, gather)


def unpermute_forward(rows: Tensor, inverse: Tensor, weights: Tensor | None, k: int) -> Tensor:
    """See `cpu_row_map.unpermute_forward`."""
    kernel = plain_row_map if rows.dtype == torch.float64 else permute
    return kernel.unpermute_forward(rows, inverse, weights, k)


def unpermute_backward(
    dy: Tensor, rows: Tensor | None, gather: Tensor, slot: Tensor, weights: Tensor, need_drows: bool,
    need_dweights: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `cpu_row_map.unpermute_backward`."""
    kernel = plain_row_map if dy.dtype == torch.float64 else permute
    return kernel.unpermute_backward(dy, rows, gather, slot, weights, need_drows, need_dweights)
