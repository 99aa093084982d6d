"""Attention in plain torch for devices without a kernel of their own: dense maths, the arguments of `cpu_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from pyfast.kernels import reference
from pyfast.kernels.dtypes import sum_dtype
from pyfast.kernels.full_precision import full_precision


@full_precision
def attention_forward(
    q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, causal, scale, window_left, window_right, softcap
) -> tuple[Tensor, Tensor]:
    """See `cpu_attention.attention_forward`."""
    out, lse = reference.attention(
        q, k, v, causal=causal, scale=scale, window=(window_left, window_right), softcap=softcap, sinks=sinks,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
    )  # fmt: skip
    return out.contiguous(), lse.contiguous()


@full_precision
def attention_backward(
    dout, dlse, q, k, v, out, lse, sinks, cu_seqlens_q, cu_seqlens_k, *options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `cpu_attention.attention_backward`: recomputes the reference under autograd."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v) + (() if sinks is None else (sinks,))]
    with torch.enable_grad():
        outputs = attention_forward(
            *inputs[:3], None if sinks is None else inputs[3], cu_seqlens_q, cu_seqlens_k, *options
        )
    upstream = (dout, torch.zeros_like(lse) if dlse is None else dlse.to(lse.dtype))
    grads = torch.autograd.grad(outputs, inputs, upstream, allow_unused=True, materialize_grads=True)
    dsinks = q.new_empty(0) if sinks is None else grads[3]
    return grads[0].contiguous(), grads[1].contiguous(), grads[2].contiguous(), dsinks


@full_precision
def attention_state_forward(
    q, k, v, runs_q, runs_k, causal, scale, window_left, window_right, softcap, sinks=None, state=None
) -> tuple[Tensor, Tensor]:
    """See `cpu_attention.attention_state_forward`."""
    wide = sum_dtype(q.dtype)
    acc, lse = reference.attention_over_runs(
        q.to(wide), k.to(wide), v.to(wide), runs_q, runs_k, causal=causal, scale=scale,
        window=(window_left, window_right), softcap=softcap,
    )  # fmt: skip
    if state is not None:
        acc, lse = reference.merge_attention(*state, acc, lse)
    if sinks is not None:  # a row that has seen no key stays as it is
        total = torch.logaddexp(lse, sinks.to(wide).unsqueeze(1)).where(lse > -torch.inf, lse)
        acc = acc * torch.exp(lse - total).nan_to_num(0.0).T.unsqueeze(-1)
        lse = total
    if state is None:
        return acc.contiguous(), lse.contiguous()
    state[0].copy_(acc)
    state[1].copy_(lse)
    return state


def attention_delta(out: Tensor, dout: Tensor, dlse: Tensor | None = None) -> Tensor:
    """See `cpu_attention.attention_delta`."""
    wide = sum_dtype(dout.dtype)
    delta = (out.to(wide) * dout.to(wide)).sum(-1).T
    return delta.contiguous() if dlse is None else delta - dlse


@full_precision
def attention_state_backward(
    dout, q, k, v, lse, delta, runs_q, runs_k, causal, scale, window_left, window_right, softcap, dq, dk, dv
) -> None:
    """See `cpu_attention.attention_state_backward`."""
    wide, group = sum_dtype(q.dtype), q.shape[1] // k.shape[1]
    visible = reference.runs_mask(
        runs_q, runs_k, q.shape[0], k.shape[0], causal=causal, window=(window_left, window_right)
    ).to(q.device)
    # Rows that see nothing or are seen by nobody may hold anything: their products must not spread.
    blind, unseen = ~visible.any(1).view(-1, 1, 1), ~visible.any(0).view(-1, 1, 1)
    q, dout = (x.to(wide).masked_fill(blind, 0) for x in (q, dout))
    k, v = (x.to(wide).masked_fill(unseen, 0).repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qnd,knd->nqk", q, k) * scale
    slope = None
    if softcap > 0:
        share = torch.tanh(scores / softcap)
        scores, slope = softcap * share, 1 - share.square()
    p = torch.exp(scores - lse.unsqueeze(-1)).masked_fill(~visible, 0)
    ds = p * (torch.einsum("qnd,knd->nqk", dout, v) - delta.masked_fill(blind.view(1, -1), 0).unsqueeze(-1))
    ds = ds if slope is None else ds * slope
    if dq is not None:
        dq += torch.einsum("nqk,knd->qnd", ds, k) * scale
    if dk is not None:
        dk += torch.einsum("nqk,qnd->knd", ds, q).unflatten(1, (-1, group)).sum(2) * scale
    if dv is not None:
        dv += torch.einsum("nqk,qnd->knd", p, dout).unflatten(1, (-1, group)).sum(2)
