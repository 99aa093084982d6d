"""The C++ CPU kernels over torch tensors: allocate results, pass addresses and strides.

Functions here trust their arguments: `pyfast.ops` has checked shapes and dtypes. Each takes and returns plain tensors
and knows nothing of autograd. `pyfast.kernels.plain` offers the same functions in plain torch for other devices.
"""

from __future__ import annotations

import importlib.machinery
import os

import torch
from torch import Tensor

from pyfast import _C
from pyfast.kernels.cpu_attention import attention_backward, attention_forward  # noqa: F401
from pyfast.kernels.dtypes import DTYPE_CODES, sum_dtype


def _load_best() -> None:
    """Load the kernel library for the best instruction set this processor has."""
    here = os.path.dirname(_C.__file__)
    torch_lib = os.path.join(os.path.dirname(torch.__file__), "lib")
    torch_cpu = next(
        (
            os.path.join(torch_lib, name)
            for name in ("libtorch_cpu.so", "libtorch_cpu.dylib")
            if os.path.exists(os.path.join(torch_lib, name))
        ),
        "libtorch_cpu.so",
    )
    for isa in _C.supported_isas():
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            path = os.path.join(here, f"_cpu_{isa}{suffix}")
            if os.path.exists(path):
                _C.load(path, torch_cpu)
                return
    raise ImportError(f"no CPU kernel library (_cpu_*) lies in {here}: build pyfast again with `pip install .`")


_load_best()


def as_rows(x: Tensor) -> tuple[Tensor, int, int]:
    """View x [..., width] as rows with one stride: (tensor, rows, row stride in elements). Copies only if it must."""
    width = x.shape[-1]
    if x.is_contiguous():
        return x, x.numel() // width if width else 0, width
    if x.stride(-1) == 1 or width == 1:
        if x.dim() == 2:
            return x, x.shape[0], x.stride(0)
        try:
            flat = x.view(-1, width)
            return flat, flat.shape[0], flat.stride(0)
        except RuntimeError:
            pass
    x = x.contiguous()
    return x, x.numel() // width if width else 0, width


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y like x, and 1 / rms of each row [rows] (float32, float64 for float64)."""
    y = torch.empty(x.shape, dtype=x.dtype)
    rows_tensor, rows, stride = as_rows(x)
    rstd = torch.empty(rows, dtype=sum_dtype(x.dtype))
    weight = weight.contiguous()
    _C.rms_norm_forward(
        DTYPE_CODES[x.dtype], rows_tensor.data_ptr(), weight.data_ptr(), y.data_ptr(), rstd.data_ptr(),
        rows, x.shape[-1], stride, eps, torch.get_num_threads(),
    )  # fmt: skip
    return y, rstd


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, need_dx: bool, need_dweight: bool
) -> tuple[Tensor, Tensor]:
    """dx like x, dweight like weight; what is not needed comes back empty."""
    dy_rows, rows, dy_stride = as_rows(dy)
    x_rows, _, x_stride = as_rows(x)
    weight = weight.contiguous()
    dx = torch.empty(x.shape if need_dx else (0,), dtype=x.dtype)
    dweight = torch.empty(weight.shape if need_dweight else (0,), dtype=sum_dtype(x.dtype))
    _C.rms_norm_backward(
        DTYPE_CODES[x.dtype], dy_rows.data_ptr(), x_rows.data_ptr(), weight.data_ptr(), rstd.data_ptr(),
        dx.data_ptr() if need_dx else 0, dweight.data_ptr() if need_dweight else 0,
        rows, x.shape[-1], dy_stride, x_stride, torch.get_num_threads(),
    )  # fmt: skip
    return dx, dweight.to(weight.dtype)


def gemm(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False, scale: float = 1.0) -> Tensor:
    """out [m, n] = scale * a [m, k] @ b [k, n], added to out when `accumulate`; returns out.

    Any strides (transposes cost nothing); all float64, or any mix of float32, bfloat16 and float16 summed in float32
    and rounded to out's dtype once. The same bits for any number of threads.
    """
    if out.stride(1) != 1 and out.shape[1] > 1:
        if out.stride(0) != 1 and out.shape[0] > 1:
            raise ValueError(f"out has strides {out.stride()}; one of its dimensions must be contiguous")
        gemm(b.t(), a.t(), out.t(), accumulate, scale)
        return out
    _C.gemm(
        DTYPE_CODES[a.dtype], a.data_ptr(), *a.stride(), DTYPE_CODES[b.dtype], b.data_ptr(), *b.stride(),
        DTYPE_CODES[out.dtype], out.data_ptr(), out.stride(0),
        a.shape[0], b.shape[1], a.shape[1], scale, accumulate, torch.get_num_threads(),
    )  # fmt: skip
    return out
