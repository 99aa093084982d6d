"""Every op of the package in plain torch: dense, slow, readable, differentiable. The oracle of the fast kernels.

Arithmetic is done in float32 (float64 for float64 inputs) and rounded once at the end. Shapes: B batch, S sequence,
T packed tokens, H model width, N heads (Nq, Nk), D head size, F ffn width, V vocabulary, P positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyfast.kernels import stochastic
from pyfast.kernels.runs import rows_of_runs


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are summed: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---------------------------------------------------------------------------------------------------------------------
# Pointwise and row-wise
# ---------------------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019). x [..., H], weight [H]."""
    wide = accumulation_dtype(x.dtype)
    x_wide = x.to(wide)
    scale = torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    return (x_wide * scale * weight.to(wide)).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None) -> Tensor:
    """Rotary position embedding, half-split as in Llama (Su et al., 2021).

    x [..., S, N, D]; cos, sin [P, R/2]: the first R of D are rotated, pairs are (i, i + R/2). positions: integer [S] or
    [B, S], default 0..S-1.
    """
    length, half = x.shape[-3], cos.shape[1]
    wide = accumulation_dtype(x.dtype)
    rows = slice(0, length) if positions is None else positions
    cos_SND = cos[rows].to(wide).unsqueeze(-2)
    sin_SND = sin[rows].to(wide).unsqueeze(-2)
    first, second, rest = x[..., :half].to(wide), x[..., half : 2 * half].to(wide), x[..., 2 * half :]
    turned = (first * cos_SND - second * sin_SND, second * cos_SND + first * sin_SND)
    return torch.cat([*(part.to(x.dtype) for part in turned), rest], dim=-1)


def swiglu(x: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up (Shazeer, 2020). x [..., 2F] with the gate first, or the gate [..., F] when `up` is given."""
    gate, up = x.chunk(2, dim=-1) if up is None else (x, up)
    wide = accumulation_dtype(gate.dtype)
    gate_wide = gate.to(wide)
    return (gate_wide * torch.sigmoid(gate_wide) * up.to(wide)).to(gate.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Attention
# ---------------------------------------------------------------------------------------------------------------------


def attention_mask(
    queries: int, keys: int, *, causal: bool, window: tuple[int, int] = (-1, -1), device: torch.device | None = None
) -> Tensor:
    """Boolean [Sq, Sk], True where query i may look at key j; query i stands at position i + Sk - Sq (bottom-right)."""
    position = torch.arange(queries, device=device).unsqueeze(1) + (keys - queries)
    key = torch.arange(keys, device=device).unsqueeze(0)
    left, right = window
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        visible &= key <= position
    if left >= 0:
        visible &= key >= position - left
    if right >= 0:
        visible &= key <= position + right
    return visible


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention by dense maths; always returns (out, lse), both differentiable.

    q [B, Sq, Nq, D], k [B, Sk, Nk, D], v [B, Sk, Nk, Dv] -> out [B, Sq, Nq, Dv], lse [B, Nq, Sq]; or packed, with
    cu_seqlens: q [T, Nq, D] -> out [T, Nq, Dv], lse [Nq, T]. Query head n reads kv head n // (Nq // Nk).
    `sinks` [Nq] is one more logit a head, without a value, that joins the softmax and lse. A row without keys (also one
    outside every document) has out 0, lse -inf and gives no gradient, with sinks too. cu_seqlens_k defaults to
    cu_seqlens_q.
    """
    options = {"causal": causal, "scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    if cu_seqlens_q is None:
        return _dense_attention(q, k, v, **options)
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    wide = accumulation_dtype(q.dtype)

    def outside(rows: int) -> tuple[Tensor, Tensor]:
        return q.new_zeros(rows, q.shape[1], v.shape[2]), q.new_full((q.shape[1], rows), -math.inf, dtype=wide)

    pieces = [outside(starts_q[0])]
    for i in range(len(starts_q) - 1):
        rows_q, rows_k = slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1])
        out, lse = _dense_attention(q[None, rows_q], k[None, rows_k], v[None, rows_k], **options)
        pieces.append((out[0], lse[0]))
    pieces.append(outside(q.shape[0] - starts_q[-1]))
    return torch.cat([out for out, _ in pieces]), torch.cat([lse for _, lse in pieces], dim=1)


def _dense_attention(q, k, v, *, causal, scale, window, softcap, sinks) -> tuple[Tensor, Tensor]:
    visible = attention_mask(q.shape[1], k.shape[1], causal=causal, window=window, device=q.device)
    return _masked_attention(q, k, v, visible, scale=scale, softcap=softcap, sinks=sinks)


def _masked_attention(q, k, v, visible, *, scale, softcap, sinks) -> tuple[Tensor, Tensor]:
    wide = accumulation_dtype(q.dtype)
    groups = q.shape[2] // k.shape[2]
    k_wide, v_wide = (x.to(wide).repeat_interleave(groups, dim=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bqnd,bknd->bnqk", q.to(wide), k_wide) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -math.inf)
    empty = ~visible.any(dim=1)  # [Sq]

    # The maximum is a constant of the maths: it cancels in out, and its gradient in lse is what the softmax gives.
    top = scores.detach().amax(-1) if k.shape[1] else scores.new_full(scores.shape[:-1], -math.inf)
    if sinks is not None:
        sink = sinks.to(wide).view(1, -1, 1)
        top = torch.maximum(top, sink.detach())
    top = top.masked_fill(empty | (top == -math.inf), 0.0)
    weights = torch.exp(scores - top.unsqueeze(-1))
    total = weights.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sink - top)
    total = total.masked_fill(empty, 1.0)
    out = torch.einsum("bnqk,bknd->bqnd", weights / total.unsqueeze(-1), v_wide)
    lse = (top + torch.log(total)).masked_fill(empty, -math.inf)
    return out.to(q.dtype), lse


def runs_mask(
    runs_q: Tensor, runs_k: Tensor, rows_q: int, rows_k: int, *, causal: bool, window: tuple[int, int] = (-1, -1)
) -> Tensor:
    """Boolean [rows_q, rows_k], True where a query row may look at a key row; see kernels/runs.py for what runs are."""
    document_q, position_q = (x.unsqueeze(1) for x in rows_of_runs(runs_q, rows_q))
    document_k, position_k = rows_of_runs(runs_k, rows_k)
    ahead = position_k - position_q
    visible = (document_q == document_k) & (document_q >= 0)
    left, right = window
    if causal:
        visible &= ahead <= 0
    if left >= 0:
        visible &= -ahead <= left
    if right >= 0:
        visible &= ahead <= right
    return visible


def attention_over_runs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    runs_q: Tensor,
    runs_k: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention between the rows of two shards, dense and differentiable: out [Tq, Nq, Dv], lse [Nq, Tq].

    As `attention`, with the documents and positions of the rows given by runs. Rows of no document: out 0, lse -inf, no
    gradient, whatever they hold.
    """
    visible = runs_mask(runs_q, runs_k, q.shape[0], k.shape[0], causal=causal, window=window).to(q.device)
    nobody_q, nobody_k = (
        (rows_of_runs(runs, x.shape[0])[0] < 0).view(-1, 1, 1).to(q.device) for runs, x in ((runs_q, q), (runs_k, k))
    )
    q, k, v = q.masked_fill(nobody_q, 0), k.masked_fill(nobody_k, 0), v.masked_fill(nobody_k, 0)
    out, lse = _masked_attention(q[None], k[None], v[None], visible, scale=scale, softcap=softcap, sinks=sinks)
    return out[0], lse[0]


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the results over each.

    out [..., S, N, D], lse [..., N, S]. Where neither side has a key: out 0, lse -inf, no gradient.
    """
    wide = accumulation_dtype(out_a.dtype)
    lse_a, lse_b = lse_a.to(wide), lse_b.to(wide)
    top = torch.maximum(lse_a, lse_b).detach()
    empty = top == -math.inf
    top = top.masked_fill(empty, 0.0)
    weight_a, weight_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = (weight_a + weight_b).masked_fill(empty, 1.0)

    def share(weight: Tensor) -> Tensor:  # [..., N, S] -> [..., S, N, 1]
        return (weight / total).transpose(-1, -2).unsqueeze(-1)

    out = share(weight_a) * out_a.to(wide) + share(weight_b) * out_b.to(wide)
    return out.to(out_a.dtype), (top + torch.log(total)).masked_fill(empty, -math.inf)


# ---------------------------------------------------------------------------------------------------------------------
# Linear + cross entropy
# ---------------------------------------------------------------------------------------------------------------------


def _logits(h: Tensor, w: Tensor, softcap: float) -> Tensor:
    wide = accumulation_dtype(h.dtype)
    logits = h.to(wide) @ w.to(wide).T
    return softcap * torch.tanh(logits / softcap) if softcap > 0 else logits


def linear_cross_entropy(
    h: Tensor,
    w: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "sum",
) -> Tensor:
    """Cross entropy of softmax(h w^T), plus z_loss * lse^2 a token. h [..., H], w [V, H], target int64 [...].

    float32 (float64 for float64): the sum over tokens whose target is not `ignore_index`, their "mean" (0 without any),
    or "none": [...] with 0 where ignored. The whole vocabulary on one rank; see `vocabulary_shard` for a part of it.
    """
    lse, logit = vocabulary_shard(h, w, target, ignore_index=ignore_index, softcap=softcap)
    return combine_shards([lse], [logit], target, ignore_index=ignore_index, z_loss=z_loss, reduction=reduction)


def vocabulary_shard(
    h: Tensor, w: Tensor, target: Tensor, *, start: int = 0, ignore_index: int = -100, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """What one shard of the vocabulary, rows [start, start + V_local) of w, gives: (lse [...], target logit [...]).

    The lse is over the shard's own rows; the target logit is 0 where the shard does not hold the target. Rows that are
    ignored give 0 and no gradient, whatever h holds there.
    """
    valid = target != ignore_index
    logits = _logits(h[valid], w, softcap)
    local = target[valid] - start
    here = (local >= 0) & (local < w.shape[0])
    if w.shape[0]:
        picked = logits.gather(-1, local.clamp(0, w.shape[0] - 1).unsqueeze(-1)).squeeze(-1)
    else:
        picked = logits.sum(-1)  # no rows: zeros that stay in the graph
    zeros = logits.new_zeros(target.shape)
    lse = zeros.masked_scatter(valid, torch.logsumexp(logits, -1))
    return lse, zeros.masked_scatter(valid, torch.where(here, picked, 0.0))


def combine_shards(
    lses: Sequence[Tensor],
    target_logits: Sequence[Tensor],
    target: Tensor,
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    reduction: str = "sum",
) -> Tensor:
    """The loss over the whole vocabulary from the (lse, target logit) of each shard, in rank order."""
    valid = target != ignore_index
    lse = torch.logsumexp(torch.stack(list(lses)), 0)
    loss = lse - torch.stack(list(target_logits)).sum(0) + z_loss * lse.square()
    loss = torch.where(valid, loss, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / valid.sum().clamp(min=1) if reduction == "mean" else loss.sum()


def linear_cross_entropy_backward(
    grad: Tensor,
    h: Tensor,
    w: Tensor,
    target: Tensor,
    lse: Tensor,
    *,
    start: int = 0,
    ignore_index: int = -100,
    softcap: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(dh, dw) of one vocabulary shard by the closed form, from each token's upstream gradient and global lse [...].

    dlogit = grad * (softmax * (1 + 2 z_loss lse) - onehot), times 1 - (logit/softcap)^2 under a softcap. dh is this
    shard's part of a sum over shards. Both are in the accumulation dtype.
    """
    valid = target != ignore_index
    rows, columns = h[valid].to(accumulation_dtype(h.dtype)), w.to(accumulation_dtype(h.dtype))
    logits = _logits(rows, columns, softcap)
    lse_valid = lse[valid].unsqueeze(-1)
    local = (target[valid] - start).unsqueeze(-1)
    onehot = local == torch.arange(w.shape[0], device=w.device)
    dlogits = torch.exp(logits - lse_valid) * (1 + 2 * z_loss * lse_valid) - onehot.to(logits.dtype)
    if softcap > 0:
        dlogits = dlogits * (1 - (logits / softcap).square())
    dlogits = dlogits * grad[valid].unsqueeze(-1)
    dh = rows.new_zeros(h.shape)
    dh[valid] = dlogits @ columns
    return dh, dlogits.T @ rows


# ---------------------------------------------------------------------------------------------------------------------
# Optimizer
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    master: Tensor | None = None,
    grad_scale: float = 1.0,
    seed: int = 0,
    first_index: int = 0,
    places: Tensor | None = None,
) -> None:
    """One AdamW step in place (Loshchilov and Hutter, 2019), decay decoupled from the gradient. `step` counts from 1.

    The weights are read from and written to `master` when it is given; param is then its rounding. bfloat16 moments are
    rounded stochastically, by bits of (seed, step, index), index = first_index + position or what `places` makes of it.
    """
    weights = param if master is None else master
    wide = accumulation_dtype(weights.dtype)
    beta1, beta2 = betas
    g = grad.to(wide) * grad_scale
    m = exp_avg.to(wide) * beta1 + g * (1 - beta1)
    v = exp_avg_sq.to(wide) * beta2 + g.square() * (1 - beta2)
    denominator = v.sqrt() / math.sqrt(1 - beta2**step) + eps
    updated = weights.to(wide) * (1 - learning_rate * weight_decay)
    updated = updated - learning_rate / (1 - beta1**step) * m / denominator
    if exp_avg.dtype == torch.bfloat16:
        bits = stochastic.random_bits(seed, step, stochastic.indices(first_index, m.numel(), places).to(m.device))
        m, v = stochastic.round_randomly(m, bits), stochastic.round_randomly(v, bits >> 16)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    weights.copy_(updated)
    if master is not None:
        param.copy_(updated)
