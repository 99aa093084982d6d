"""Attention on the C++ CPU kernels (csrc/cpu/attention_*.cpp): allocates results, passes addresses and strides.

B batch, S sequence, T packed tokens, N heads (Nq, Nk), D head size (Dv of the values). Arguments are checked by
`pyfast.ops.attention`. The functions named `attention_state_*` go on from what earlier keys gave, between rows that
runs describe (kernels/runs.py): one hop of a ring is one call, and every sum stays in the sum dtype (float32; float64
for float64).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyfast.kernels.dtypes import DTYPE_CODES, sum_dtype
from pyfast.kernels.extension import _C

_NO_ROWS = torch.tensor([[-1, 0, 0, 1]])
_BATCHED = (0, 0, 0, 0, 0, 0)  # no cu_seqlens, no runs


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
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        q, k, v = _rows(q), _rows(k), _rows(v)
    q_shape, width = q.shape, v.shape[-1]
    out = _empty_like(q) if q_shape[-1] == width else q.new_empty((*q_shape[:-1], width))
    lse = _empty_statistics(q)
    sinks, cu_seqlens_q, cu_seqlens_k = _plain_arrays(q, sinks, cu_seqlens_q, cu_seqlens_k)
    _call(
        _C.attention_forward,
        (DTYPE_CODES[q.dtype], _array(q), _array(k), _array(v), _documents(cu_seqlens_q, cu_seqlens_k),
         (causal, scale, window_left, window_right, softcap), _address(sinks), torch.get_num_threads(),
         out.data_ptr(), lse.data_ptr(), False, False),
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
    _call(
        _C.attention_backward,
        (DTYPE_CODES[q.dtype], _array(q), _array(k), _array(v), _documents(cu_seqlens_q, cu_seqlens_k),
         (causal, scale, window_left, window_right, softcap), _address(sinks), torch.get_num_threads(),
         _array(out), _array(dout), lse.data_ptr(), _address(dlse), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
         dsinks.data_ptr()),
    )  # fmt: skip
    return dq, dk, dv, dsinks if sinks is None else dsinks.to(sinks_dtype)


def attention_state_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    runs_q: Tensor,
    runs_k: Tensor,
    causal: bool,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    sinks: Tensor | None = None,
    state: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(acc [Tq, Nq, Dv], lse [Nq, Tq]): attention over the keys of this call and those in `state`, in the sum dtype.

    q [Tq, Nq, D], k [Tk, Nk, D], v [Tk, Nk, Dv], any strides. acc is normalised and not rounded; a query that has seen
    no key has 0 and -inf. `state`, the result over earlier keys, is continued in place and returned. `sinks` [Nq] go to
    exactly one of the calls, the last: a query that has seen no key by then takes no part of them.
    """
    wide = sum_dtype(q.dtype)
    q, k, v, runs_q, runs_k = _rows(q), _rows(k), _rows(v), runs_q.contiguous(), runs_k.contiguous()
    if state is None:
        acc, lse = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=wide), q.new_empty(lse_shape(q), dtype=wide)
    else:
        acc, lse = (x.contiguous() for x in state)
    sinks = None if sinks is None else sinks.to(wide).contiguous()
    _call(
        _C.attention_forward,
        (DTYPE_CODES[q.dtype], _array(q), _array(k), _array(v), _runs(runs_q, runs_k),
         (causal, scale, window_left, window_right, softcap), _address(sinks), torch.get_num_threads(),
         acc.data_ptr(), lse.data_ptr(), True, state is not None),
    )  # fmt: skip
    return (acc, lse) if state is None else _put_back(state, (acc, lse))


def attention_delta(out: Tensor, dout: Tensor, dlse: Tensor | None = None) -> Tensor:
    """rowsum(out * dout) - dlse, [Nq, Tq] in the sum dtype: what `attention_state_backward` needs of out and dout.

    out [Tq, Nq, Dv] like dout or in the sum dtype, any strides; dlse [Nq, Tq].
    """
    wide = sum_dtype(dout.dtype)
    out, dout = _rows(out), _rows(dout)
    dlse = None if dlse is None else dlse.to(wide).contiguous()
    delta = torch.empty(lse_shape(dout), dtype=wide)
    _C.attention_delta(
        DTYPE_CODES[dout.dtype], out.dtype == wide, _array(out), _array(dout), _address(dlse), delta.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return delta


def attention_state_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    runs_q: Tensor,
    runs_k: Tensor,
    causal: bool,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
) -> None:
    """Add what these queries and keys give to dq [Tq, Nq, D], dk [Tk, Nk, D] and dv [Tk, Nk, Dv], in place.

    dq, dk, dv are in the sum dtype; one that is None is not computed. lse and delta [Nq, Tq] are those over all keys,
    of this call and others (sinks included). The gradient of the sinks is -(exp(sinks - lse) * delta).sum(Tq).
    """
    wide = sum_dtype(q.dtype)
    q, k, v, dout, runs_q, runs_k = _rows(q), _rows(k), _rows(v), _rows(dout), runs_q.contiguous(), runs_k.contiguous()
    lse, delta = lse.to(wide).contiguous(), delta.to(wide).contiguous()
    given = (dq, dk, dv)
    sums = tuple(None if x is None else x.contiguous() for x in given)
    _call(
        _C.attention_state_backward,
        (DTYPE_CODES[q.dtype], _array(q), _array(k), _array(v), _runs(runs_q, runs_k),
         (causal, scale, window_left, window_right, softcap), torch.get_num_threads(),
         _array(dout), lse.data_ptr(), delta.data_ptr(), *map(_address, sums)),
    )  # fmt: skip
    _put_back(given, sums)


def _put_back(given: tuple, results: tuple) -> tuple:
    """Results into the tensors that were given, where they are not those themselves; returns the given ones."""
    for target, result in zip(given, results, strict=True):
        if target is not result and target is not None:
            target.copy_(result)
    return given


def lse_shape(q: Tensor) -> tuple[int, ...]:
    """[B, Nq, Sq] for q [B, Sq, Nq, D], [Nq, T] for q [T, Nq, D]."""
    return (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])


def _rows(x: Tensor) -> Tensor:
    """x with its last dimension contiguous; copied only if it is not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _empty_statistics(q: Tensor) -> Tensor:
    """lse or delta of q, uninitialised; `new_empty` without a dtype takes half the time."""
    wide = sum_dtype(q.dtype)
    return q.new_empty(lse_shape(q)) if wide is q.dtype else q.new_empty(lse_shape(q), dtype=wide)


def _call(kernel: Callable[..., int], arguments: tuple) -> None:
    """Run a kernel: small workspaces are the binding's own, for others it asks."""
    missing = kernel(*arguments, 0)
    if missing:
        workspace = torch.empty(missing, dtype=torch.uint8)
        kernel(*arguments, workspace.data_ptr())


def _array(x: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return x.data_ptr(), x.shape, x.stride()


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


def _documents(cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> tuple[int, ...]:
    """Which rows are whose, as csrc/bindings_attention.cpp takes it: starts of documents, or one a batch element."""
    if cu_seqlens_q is None:
        return _BATCHED
    return cu_seqlens_q.data_ptr(), cu_seqlens_k.data_ptr(), 0, 0, cu_seqlens_q.shape[0], cu_seqlens_k.shape[0]


def _runs(runs_q: Tensor, runs_k: Tensor) -> tuple[int, ...]:
    """The same for runs."""
    # no runs at all have no address either, which would say that there is no table: one run without rows says it
    runs_q, runs_k = (runs if runs.shape[0] else _NO_ROWS for runs in (runs_q, runs_k))
    return 0, 0, runs_q.data_ptr(), runs_k.data_ptr(), runs_q.shape[0], runs_k.shape[0]
