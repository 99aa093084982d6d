"""Products over rows of several ranks on the C++ kernel (csrc/cpu/panel_gemm.cpp): read and written where they lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyfast.kernels.dtypes import DTYPE_CODES
from pyfast.kernels.extension import _C
from pyfast.kernels.panels import Flags


def panel_gemm(
    panels: Tensor, factors: Sequence[Tensor], b: Tensor, out: Tensor, flags: Flags, *, accumulate: bool = False
) -> int:
    """out[rows of a panel] (+)= factors[rank][rows of the panel] @ b, panel after panel; see csrc/panel_kernels.h.

    Args:
        panels: int64 [count, 4]: (rank, row in factors[rank], row in out, rows).
        factors: one [rows, k] for each rank, all of one dtype and row stride, columns contiguous.
        b: [k, n], any strides.
        out: [rows, n], columns contiguous.

    Returns:
        -1, or 4 * rank + how that rank failed to bring its rows.
    """
    ranks = torch.tensor(
        [(a.data_ptr(), *pair) for a, *pair in zip(factors, flags.arrives, flags.leaves, strict=True)],
        dtype=torch.int64,
    )
    first = factors[0]
    return _C.panel_gemm(
        DTYPE_CODES[first.dtype], DTYPE_CODES[b.dtype], DTYPE_CODES[out.dtype], ranks.data_ptr(),
        flags.peers.data_ptr(), len(factors), panels.data_ptr(), panels.shape[0], first.stride(0), b.data_ptr(),
        *b.stride(), out.data_ptr(), out.stride(0), *reversed(b.shape), accumulate, flags.epoch, flags.timeout_s,
        torch.get_num_threads(),
    )  # fmt: skip
