"""The kernel functions of `pyfast.kernels.cpu` in plain torch, for devices that have no kernel of their own yet.

Same names, arguments and results; right on every device, fast on none. Backward functions recompute the reference
under autograd, so there is one formula to trust (pyfast/kernels/reference.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyfast.kernels import reference
from pyfast.kernels.plain_attention import attention_backward, attention_forward  # noqa: F401
from pyfast.kernels.dtypes import sum_dtype


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `cpu.rms_norm_forward`."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    rstd = torch.rsqrt(wide.square().mean(-1) + eps).flatten()
    return reference.rms_norm(x, weight, eps=eps), rstd


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, need_dx: bool, need_dweight: bool
) -> tuple[Tensor, Tensor]:
    """See `cpu.rms_norm_backward`; eps is recovered from rstd."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    gradient = dy.to(wide.dtype) * weight
    rstd = rstd.view(x.shape[:-1]).unsqueeze(-1)
    normalised = wide * rstd
    empty = x.new_empty(0)
    dx = rstd * (gradient - normalised * (gradient * normalised).mean(-1, keepdim=True))
    dweight = (dy.to(wide.dtype) * normalised).flatten(0, -2).sum(0)
    return dx.to(x.dtype) if need_dx else empty, dweight.to(weight.dtype) if need_dweight else empty


def gemm(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False, scale: float = 1.0) -> Tensor:
    """See `cpu.gemm`."""
    wide = sum_dtype(out.dtype)
    product = (a.to(wide) @ b.to(wide)).mul_(scale)
    return out.copy_(product.add_(out) if accumulate else product)
