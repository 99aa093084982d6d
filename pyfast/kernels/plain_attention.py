"""Attention in plain torch for devices without a kernel of their own: dense maths, the arguments of `cpu_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from pyfast.kernels import reference
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
