"""Softmax attention, exact and blocked: scores are never stored (Dao et al. 2022; Dao 2023).

B batch, S sequence, T packed tokens, N heads (Nq, Nk), D head size (Dv of the values).
"""

from __future__ import annotations

import numbers

import torch
from torch import Tensor

from pyfast import kernels
from pyfast.kernels.dtypes import sum_dtype
from pyfast.ops.checks import FLOAT_DTYPES, autocast, check_bool, check_float, check_number, check_same
from pyfast.ops.dispatch import Op, differentiable

MAX_HEAD_SIZE = 256
_UNBOUNDED = (-1, -1)
_WIDEST = 1 << 40  # no sequence is longer, and positions plus a window stay far from 2^63


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = _UNBOUNDED,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T + mask) v for each head; query head n reads kv head n // (Nq // Nk).

    Args:
        q: [B, Sq, Nq, D], or packed [Tq, Nq, D] with cu_seqlens_q; float32, bfloat16, float16 or float64, any strides
            (copied if the last dimension is not contiguous). Sums are float32 (float64 for float64). Under
            torch.autocast q, k and v are cast to its dtype first, as torch does.
        k: [B, Sk, Nk, D] or [Tk, Nk, D]; Nq must be a multiple of Nk.
        v: [B, Sk, Nk, Dv] or [Tk, Nk, Dv]. D and Dv are 1..256 and may differ.
        causal: query i sees keys up to i + Sk - Sq (bottom-right aligned).
        scale: multiplies the scores; default D ** -0.5.
        window: (left, right): query i sees only the keys from i - left to i + right, both included, counted from its
            place i + Sk - Sq; -1 is unbounded. Hugging Face's sliding_window=W is (W - 1, 0).
        softcap: when positive, scores become softcap * tanh(score / softcap) (before the mask).
        sinks: [Nq], one more logit a head without a value, that joins the softmax and lse; differentiable.
        cu_seqlens_q: int32 [documents + 1], ascending starts of the documents in q, any lengths, zero too; rows outside
            them have out 0, lse -inf and gradient 0, whatever they hold.
        cu_seqlens_k: the same for k and v; default cu_seqlens_q.
        return_lse: also return lse, the log of each row's sum of exponentials.

    Returns:
        out [B, Sq, Nq, Dv] or [Tq, Nq, Dv], contiguous, in q's dtype; with return_lse (out, lse), lse [B, Nq, Sq] or
        [Nq, Tq] float32 (float64 for float64), natural log, differentiable. A row that sees no key: out 0, lse -inf,
        gradient 0. The same bits for any number of threads.

    Raises:
        TypeError, ValueError: naming the argument that does not fit, before anything is computed.
    """
    q, k, v = autocast(q, k, v)
    if not _fit(q, k, v, packed=cu_seqlens_q is not None):
        _check_tensors(q, k, v, packed=cu_seqlens_q is not None)
    if sinks is not None:
        _check_sinks(sinks, q)
    if cu_seqlens_q is not None:
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        _check_cu_seqlens(cu_seqlens_q, cu_seqlens_k, q)
    elif cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k is given without cu_seqlens_q; packed attention needs cu_seqlens_q")
    causal, return_lse = check_bool("causal", causal), check_bool("return_lse", return_lse)
    left, right = window if window is _UNBOUNDED else _check_window(window)
    scale = q.shape[-1] ** -0.5 if scale is None else check_number("scale", scale)
    softcap = check_number("softcap", softcap, least=0)
    out, lse = _attention(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, causal, scale, left, right, softcap)
    return (out, lse) if return_lse else out


def _fit(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> bool:
    """Whether `_check_tensors` has nothing to say, in one expression: it takes a tenth of a small call otherwise."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return False
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    return (
        len(q_shape) == len(k_shape) == (3 if packed else 4)
        and (k_shape == v_shape or k_shape[:-1] == v_shape[:-1])
        and (packed or q_shape[0] == k_shape[0])
        and 0 < q_shape[-1] == k_shape[-1] <= MAX_HEAD_SIZE
        and 0 < v_shape[-1] <= MAX_HEAD_SIZE
        and q_shape[-2] > 0 < k_shape[-2]
        and q_shape[-2] % k_shape[-2] == 0
        and q.dtype == k.dtype == v.dtype
        and q.dtype in FLOAT_DTYPES
        and q.layout == k.layout == v.layout == torch.strided
        and ((q.is_cpu and k.is_cpu and v.is_cpu) or q.device == k.device == v.device)
    )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    check_float("q", q)
    check_same("k", k, "q", q)
    check_same("v", v, "q", q)
    dims, letters = (3, "[T, N, D]") if packed else (4, "[B, S, N, D]")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != dims:
            hint = "" if packed or x.dim() != 3 else ": give cu_seqlens_q for packed documents"
            raise ValueError(f"{name} has shape {tuple(x.shape)}; {letters} is needed{hint}")
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if k_shape[:-1] != v_shape[:-1]:
        raise ValueError(f"v has shape {tuple(v_shape)}; all but the last size must be those of k, {tuple(k_shape)}")
    if not packed and q_shape[0] != k_shape[0]:
        raise ValueError(f"k has batch size {k_shape[0]}, q has {q_shape[0]}; they must be the same")
    if q_shape[-1] != k_shape[-1]:
        raise ValueError(f"k has head size {k_shape[-1]}, q has {q_shape[-1]}; they must be the same")
    for name, size in (("q", q_shape[-1]), ("v", v_shape[-1])):
        if not 1 <= size <= MAX_HEAD_SIZE:
            raise ValueError(f"{name} has head size {size}; 1 to {MAX_HEAD_SIZE} are allowed")
    heads_q, heads_k = q_shape[-2], k_shape[-2]
    if heads_q < 1 or heads_k < 1 or heads_q % heads_k:
        raise ValueError(f"q has {heads_q} heads, k has {heads_k}; q's number must be a multiple of k's")


def _check_sinks(sinks: Tensor, q: Tensor) -> None:
    check_float("sinks", sinks)
    if sinks.shape != (q.shape[-2],):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}; it must be ({q.shape[-2]},), one a query head")
    if sinks.device != q.device:
        raise ValueError(f"sinks is on {sinks.device}, q on {q.device}; move them to one device")


def _check_cu_seqlens(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, q: Tensor) -> None:
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32:
            what = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
            raise TypeError(f"{name} is {what}; an int32 tensor is needed")
        if cu_seqlens.layout is not torch.strided:
            raise TypeError(f"{name} has layout {cu_seqlens.layout}; a dense tensor is needed")
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(f"{name} has shape {tuple(cu_seqlens.shape)}; [documents + 1] is needed")
        if cu_seqlens.device != q.device:
            raise ValueError(f"{name} is on {cu_seqlens.device}, q on {q.device}; move them to one device")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k has {cu_seqlens_k.shape[0] - 1} documents, cu_seqlens_q has {cu_seqlens_q.shape[0] - 1}; "
            "they must be the same (a document may have length 0)"
        )


def _check_starts(name: str, cu_seqlens: Tensor, rows: int) -> None:
    """The values of cu_seqlens: checked inside the op, where a compiled call knows them too."""
    starts = cu_seqlens.tolist()
    if starts[0] < 0 or starts[-1] > rows or starts != sorted(starts):
        raise ValueError(f"{name} is {starts}; starts of documents must ascend within 0..{rows}, the number of rows")


def _check_window(window: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window is {window!r}; (left, right) is needed, -1 for unbounded")
    left, right = window
    for side in window:
        # numpy's integers too; a tensor would be read on every call, a bool or a float is a slip.
        if isinstance(side, bool) or not isinstance(side, (int, numbers.Integral)) or side < -1:
            raise ValueError(f"window is {window!r}; both sides are integers >= 0, or -1 for unbounded")
    return int(min(left, _WIDEST)), int(min(right, _WIDEST))


def _forward(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, *options) -> tuple[Tensor, Tensor]:
    if cu_seqlens_q is not None:
        _check_starts("cu_seqlens_q", cu_seqlens_q, q.shape[0])
        if cu_seqlens_k is not cu_seqlens_q or k.shape[0] < q.shape[0]:
            _check_starts("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    return kernels.for_device(q.device).attention_forward(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, *options)


def _forward_fake(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, *options) -> tuple[Tensor, Tensor]:
    lse = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(lse, dtype=sum_dtype(q.dtype))


def _backward(dout: Tensor, *rest) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return kernels.for_device(dout.device).attention_backward(dout, *rest)


def _backward_fake(dout, dlse, q, k, v, out, lse, sinks, *rest) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0, dtype=sum_dtype(q.dtype)) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, sinks, cu_seqlens_q, cu_seqlens_k)
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout: Tensor | None, dlse: Tensor | None):
    q, k, v, out, lse, sinks, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv, dsinks = _backward_op(
        dout, dlse, q, k, v, out, lse, sinks, cu_seqlens_q, cu_seqlens_k, *ctx.options
    )  # fmt: skip
    need = ctx.needs_input_grad
    grads = (dq, dk, dv, dsinks if sinks is not None else None)
    return *(grad if needed else None for grad, needed in zip(grads, need, strict=False)), *([None] * 7)


_TENSORS = "Tensor q, Tensor k, Tensor v"
_ARRAYS = "Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
_OPTIONS = "bool causal, float scale, int window_left, int window_right, float softcap"
_forward_op = Op("attention", f"({_TENSORS}, {_ARRAYS}, {_OPTIONS}) -> (Tensor, Tensor)", _forward, _forward_fake)
_backward_op = Op(
    "attention_backward",
    f"(Tensor dout, Tensor? dlse, {_TENSORS}, Tensor out, Tensor lse, {_ARRAYS}, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
_attention = differentiable(_forward_op, _setup_context, _gradients)
