"""Attention on the C++ CPU kernels (csrc/cpu/attention_*.cpp): allocates results, passes addresses and strides.

B batch, S sequence, T packed tokens, N heads (Nq, Nk), D head size. Arguments are checked by `pyfast.ops.attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyfast.kernels.dtypes import DTYPE_CODES, sum_dtype
from pyfast.kernels.extension import _C


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    causal: bool,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """(out, lse): out [B, Sq, Nq, Dv] or [T, Nq, Dv] like q; lse [B, Nq, Sq] or [Nq, T] in the sum dtype."""
    q, k, v = _rows(q), _rows(k), _rows(v)
    out = _empty_like(q) if q.shape[-1] == v.shape[-1] else q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = torch.empty(lse_shape(q), dtype=sum_dtype(q.dtype))
    sinks, cu_seqlens_q, cu_seqlens_k = _plain_arrays(q, sinks, cu_seqlens_q, cu_seqlens_k)
    options = (causal, window_left, window_right, scale, softcap)
    shape = _shape(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, options)
    workspace = torch.empty(_C.attention_forward_workspace(shape), dtype=torch.uint8)
    _C.attention_forward(
        shape, _strided(q), _strided(k), _strided(v), out.data_ptr(), lse.data_ptr(), workspace.data_ptr()
    )  # fmt: skip
    return out, lse


def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    causal: bool,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks), contiguous; dsinks is empty without sinks."""
    wide = sum_dtype(q.dtype)
    dsinks = torch.empty(q.shape[-2] if sinks is not None else 0, dtype=wide)
    sinks_dtype = wide if sinks is None else sinks.dtype
    q, k, v, out, dout = _rows(q), _rows(k), _rows(v), _rows(out), _rows(dout)
    dq, dk, dv = _empty_like(q), _empty_like(k), _empty_like(v)
    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    sinks, cu_seqlens_q, cu_seqlens_k = _plain_arrays(q, sinks, cu_seqlens_q, cu_seqlens_k)
    options = (causal, window_left, window_right, scale, softcap)
    shape = _shape(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, options)
    workspace = torch.empty(_C.attention_backward_workspace(shape), dtype=torch.uint8)
    _C.attention_backward(
        shape, _strided(q), _strided(k), _strided(v), _strided(out), _strided(dout), lse.data_ptr(), _address(dlse),
        dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), dsinks.data_ptr(), workspace.data_ptr(),
    )  # fmt: skip
    return dq, dk, dv, dsinks.to(sinks_dtype)


def lse_shape(q: Tensor) -> tuple[int, ...]:
    """[B, Nq, Sq] for q [B, Sq, Nq, D], [Nq, T] for q [T, Nq, D]."""
    return (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])


def _rows(x: Tensor) -> Tensor:
    """x with its last dimension contiguous; copied only if it is not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _strided(x: Tensor) -> tuple[int, int, int, int]:
    """Address and strides of batch, row, head."""
    strides = x.stride()
    return (x.data_ptr(), *strides[:3]) if len(strides) == 4 else (x.data_ptr(), 0, *strides[:2])


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _plain_arrays(
    q: Tensor, sinks: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The small arrays, contiguous; sinks in the sum dtype. Keep them referenced while the kernel runs."""
    if sinks is not None:
        sinks = sinks.to(sum_dtype(q.dtype)).contiguous()
    if cu_seqlens_q is not None:
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    return sinks, cu_seqlens_q, cu_seqlens_k


def _shape(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, options) -> tuple:
    """struct AttentionShape (csrc/kernels.h), field by field."""
    causal, window_left, window_right, scale, softcap = options
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    return (
        DTYPE_CODES[q.dtype], batch, q.shape[-3], k.shape[-3], q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1],
        _address(cu_seqlens_q), _address(cu_seqlens_k), causal, window_left, window_right, scale, softcap,
        _address(sinks), torch.get_num_threads(),
    )  # fmt: skip
