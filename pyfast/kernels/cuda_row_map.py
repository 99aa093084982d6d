"""Maps and row movement on the CUDA kernels (csrc/cuda): allocates results, passes addresses, strides and the stream.

T tokens, K slots a token, E experts, R = T * K sorted rows, H width. Nothing here waits for the device: what only the
kernels see (expert ids, entries of maps) fails a device-side assertion there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from pyfast.kernels.dtypes import DTYPE_CODES

# "p" address, "l" int64, "i" int: the parameters of each launcher in csrc/cuda, without the stream at the end.
LAUNCHERS = {
    "row_map": "pilllllppppp",
    "tile_list": "plllppp",
    "gather_rows": "lppp" + "llll",
    "gather_sum": "ipppp" + "lllll",
    "gather_sum_backward": "ippppppp" + "llllll",
}
TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int}


@contextmanager
def torch_stream(device: torch.device):
    """torch's current stream of `device`, which is the current device inside."""
    with torch.cuda.device(device):
        yield torch.cuda.current_stream(device).cuda_stream


class CudaRowMap:
    """The functions of `pyfast.kernels.cpu_row_map` on a library of launchers.

    Args:
        library: the compiled csrc/cuda (`cuda_library.load`).
        stream_of: device -> context manager that gives the address of the stream to launch on.
    """

    def __init__(
        self, library: ctypes.CDLL, stream_of: Callable[[torch.device], AbstractContextManager[int]] = torch_stream
    ) -> None:
        self._library, self._stream_of = library, stream_of
        for name, parameters in LAUNCHERS.items():
            launcher = getattr(library, f"pyfast_cuda_{name}")
            launcher.argtypes = [*(TYPES[p] for p in parameters), ctypes.c_void_p]
            launcher.restype = ctypes.c_int
        library.pyfast_cuda_row_map_workspace.argtypes = [ctypes.c_int64] * 3
        library.pyfast_cuda_row_map_workspace.restype = ctypes.c_int64
        library.pyfast_cuda_error_string.argtypes = [ctypes.c_int]
        library.pyfast_cuda_error_string.restype = ctypes.c_char_p

    def _launch(self, name: str, device: torch.device, *arguments: int | None) -> None:
        with self._stream_of(device) as stream:
            error = getattr(self._library, f"pyfast_cuda_{name}")(*arguments, stream)
        if error:
            text = self._library.pyfast_cuda_error_string(error).decode()
            raise RuntimeError(f"the CUDA kernel {name} could not be launched: error {error}, {text}")

    def row_map(self, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `cpu_row_map.row_map`."""
        tokens, k = experts.shape
        sizes = (num_experts + 1, tokens * k, tokens * k, tokens * k)
        offsets, gather, slot, inverse = (experts.new_empty(size, dtype=torch.int32) for size in sizes)
        needed = self._library.pyfast_cuda_row_map_workspace(tokens, k, num_experts)
        workspace = experts.new_empty(needed, dtype=torch.uint8)
        self._launch(
            "row_map", experts.device, experts.data_ptr(), experts.dtype == torch.int64, tokens, k, *experts.stride(),
            num_experts, offsets.data_ptr(), gather.data_ptr(), slot.data_ptr(), inverse.data_ptr(),
            workspace.data_ptr(),
        )  # fmt: skip
        return offsets, gather, slot, inverse

    def tile_list(self, offsets: Tensor, block: int, bound: int) -> tuple[Tensor, Tensor]:
        """See `cpu_row_map.tile_list`; offsets that need more tiles than `bound` fail a device-side assertion."""
        offsets = offsets.contiguous()
        tiles, count = offsets.new_empty((bound, 2)), offsets.new_empty(1)
        workspace = torch.empty_like(offsets)
        self._launch(
            "tile_list", offsets.device, offsets.data_ptr(), offsets.numel() - 1, block, bound, tiles.data_ptr(),
            count.data_ptr(), workspace.data_ptr(),
        )  # fmt: skip
        return tiles, count

    def gather_rows(self, x: Tensor, gather: Tensor) -> Tensor:
        """See `cpu_row_map.gather_rows`."""
        x, gather = _rows(x), gather.contiguous()
        tokens, width = x.shape
        rows = x.new_empty((gather.numel(), width))
        self._launch(
            "gather_rows", x.device, x.element_size(), x.data_ptr(), gather.data_ptr(), rows.data_ptr(), tokens,
            gather.numel(), width, x.stride(0),
        )  # fmt: skip
        return rows

    def unpermute_forward(self, rows: Tensor, inverse: Tensor, weights: Tensor | None, k: int) -> Tensor:
        """See `cpu_row_map.unpermute_forward`."""
        rows, inverse = _rows(rows), inverse.contiguous()
        weights = None if weights is None else weights.contiguous()
        count, width = rows.shape
        tokens = inverse.numel() // k
        y = rows.new_empty((tokens, width))
        self._launch(
            "gather_sum", rows.device, DTYPE_CODES[rows.dtype], rows.data_ptr(), inverse.data_ptr(),
            None if weights is None else weights.data_ptr(), y.data_ptr(), tokens, k, count, width, rows.stride(0),
        )  # fmt: skip
        return y

    def unpermute_backward(
        self, dy: Tensor, rows: Tensor | None, gather: Tensor, slot: Tensor, weights: Tensor, need_drows: bool,
        need_dweights: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See `cpu_row_map.unpermute_backward`."""
        dy, weights, gather, slot = _rows(dy), weights.contiguous(), gather.contiguous(), slot.contiguous()
        rows = _rows(rows) if need_dweights else None
        count, width, (tokens, k) = gather.numel(), dy.shape[1], weights.shape
        drows = dy.new_empty((count, width) if need_drows else (0,))
        dweights = weights.new_zeros((tokens, k) if need_dweights else (0,))
        self._launch(
            "gather_sum_backward", dy.device, DTYPE_CODES[dy.dtype], dy.data_ptr(),
            rows.data_ptr() if need_dweights else None, gather.data_ptr(), slot.data_ptr(), weights.data_ptr(),
            drows.data_ptr() if need_drows else None, dweights.data_ptr() if need_dweights else None, tokens, k, count,
            width, dy.stride(0), rows.stride(0) if need_dweights else 0,
        )  # fmt: skip
        return drows, dweights


def _rows(x: Tensor) -> Tensor:
    """x [rows, H] with contiguous columns. Copies only if it must."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()
