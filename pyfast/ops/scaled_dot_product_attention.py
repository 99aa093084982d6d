"""Attention by torch's signature: the arguments and the layout of F.scaled_dot_product_attention.

B batch, H heads (Hq, Hk), L queries, S keys, D head size (Dv of the values), as in torch's documentation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pyfast.ops.attention import attention
from pyfast.ops.checks import check_bool, check_float, check_number


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention on pyfast's kernels: the same arguments, the same result.

    Args:
        query: [.., Hq, L, D], any leading dimensions, none too ([H, L, D], or [L, D] for one head); float32, bfloat16,
            float16 or float64, any strides. Under torch.autocast it is cast as torch casts it.
        key, value: [.., Hk, S, D], [.., Hk, S, Dv], the same leading dimensions.
        attn_mask: None, or a boolean mask of keys, true = seen, the same for all heads and queries of a sequence:
            [.., 1, 1, S], or one expanded from that. Masks that differ between queries or heads, and those that are
            added to the scores, are refused: give windows, documents, softcap to `ops.attention` instead.
        dropout_p: must be 0.
        is_causal: query i sees the keys up to i, counted from the first of both (top-left aligned, as in torch);
            not together with attn_mask.
        scale: multiplies the scores; default D ** -0.5.
        enable_gqa: allow Hq to be a multiple of Hk; query head h reads head h // (Hq // Hk).

    Returns:
        [.., Hq, L, Dv] in query's dtype. A query that sees no key: 0.

    Raises:
        TypeError, ValueError: naming the argument that does not fit, before anything is computed.
    """
    _check(query, key, value, dropout_p, enable_gqa)
    is_causal = check_bool("is_causal", is_causal)
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask is given with is_causal=True; torch allows one of them, and so does this")
    shape = query.shape
    # [B, S, H, D]
    q, k, v = (_with_batch(x).transpose(1, 2) for x in (query, key, value))
    if attn_mask is not None:
        out = _attend_where(_seen_keys(attn_mask, query, key), q, k, v, scale)
    elif is_causal:
        out = _attend_causally(q, k, v, scale)
    else:
        out = attention(q, k, v, scale=scale)
    return out.transpose(1, 2).reshape(*shape[:-1], value.shape[-1])


def _check(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, enable_gqa: bool) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_float(name, x)
        if x.dim() < 2 or x.dim() != query.dim():
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, query has {tuple(query.shape)}; all need [.., H, S, D] of as many "
                "dimensions, two at least"
            )
        if x.shape[:-3] != query.shape[:-3]:
            raise ValueError(
                f"{name} has leading dimensions {tuple(x.shape[:-3])}, query has {tuple(query.shape[:-3])}; they must "
                "be the same: expand it"
            )
    if check_number("dropout_p", dropout_p) != 0:
        raise ValueError(f"dropout_p is {dropout_p}; pyfast attention has no dropout, 0.0 is needed")
    if not check_bool("enable_gqa", enable_gqa) and query.dim() > 2 and query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"query has {query.shape[-3]} heads, key has {key.shape[-3]}; they must be the same, or enable_gqa=True"
        )


def _with_batch(x: Tensor) -> Tensor:
    """[.., H, S, D] -> [B, H, S, D]."""
    while x.dim() < 4:
        x = x.unsqueeze(0)
    return x.flatten(0, -4)


def _attend_causally(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Top-left aligned, of [B, L or S, H, D]; `attention` counts from the last query and the last key."""
    queries, keys = q.shape[1], k.shape[1]
    if queries <= keys:  # nobody sees the keys from `queries` on
        return attention(q, k[:, :queries], v[:, :queries], causal=True, scale=scale)
    # Query i stands at i + keys - queries there, and sees up to i: that many keys to its right.
    return attention(q, k, v, window=(-1, queries - keys), scale=scale)


def _seen_keys(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as bool [B, S]; ValueError or TypeError unless all queries and heads of a sequence share it."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        what = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"attn_mask is {what}; a boolean mask of keys is needed (masks added to scores are refused)")
    full = (*query.shape[:-1], key.shape[-2])
    try:
        expanded = mask.expand(full)
    except RuntimeError:
        raise ValueError(f"attn_mask has shape {tuple(mask.shape)}; it must broadcast to {full}") from None
    if mask.device != query.device:
        raise ValueError(f"attn_mask is on {mask.device}, query on {query.device}; move them to one device")
    shared = [expanded.stride(dim) == 0 or full[dim] == 1 for dim in (-2, -3)[: query.dim() - 1]]
    if not all(shared):
        raise ValueError(
            f"attn_mask of shape {tuple(mask.shape)} may differ between queries or heads, which is not supported; give "
            "[.., 1, 1, S], or say it to ops.attention by causal, window or cu_seqlens"
        )
    # Without heads and queries.
    return _with_batch(expanded)[:, 0, 0] if full[-2] else mask.new_ones(_with_batch(query).shape[0], full[-1])


def _attend_where(seen: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Each sequence of the batch as two documents: all queries with the keys they see, no query with the other keys."""
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    # Seen keys first. Sizes depend on no value: nothing waits for the device, and torch.compile sees one graph.
    order = torch.sort((~seen).to(torch.uint8), dim=1, stable=True).indices
    rows = (order + torch.arange(batch, device=q.device)[:, None] * keys).flatten()
    k, v = k.flatten(0, 1).index_select(0, rows), v.flatten(0, 1).index_select(0, rows)
    ends_q = torch.arange(1, batch + 1, device=q.device)[:, None] * queries
    starts_k = torch.arange(batch, device=q.device)[:, None] * keys
    ends_k = torch.cat([starts_k + seen.sum(1, keepdim=True), starts_k + keys], 1)
    cu_q, cu_k = (F.pad(ends.flatten(), (1, 0)).int() for ends in (ends_q.expand(-1, 2), ends_k))
    out = attention(q.flatten(0, 1), k, v, scale=scale, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    return out.unflatten(0, (batch, queries))
