"""Routing in plain torch, dense and differentiable: T tokens, E experts, K slots a token, S scopes.

What is chosen (`choose`, `expert_choice`, `drop_over_capacity`) and what follows from it (`weigh`, `score_sums`,
`z_sum`) are apart: the choice has no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyfast.kernels.route_settings import TINY, RouteSettings, jitter_factors, random_keys

NO_EXPERT = -1


def scores_of(x: Tensor, score: str) -> Tensor:
    """p [T, E] of logits x: what experts are weighed by. A row of nothing but -inf has p = 0."""
    if score == "sigmoid":
        return torch.sigmoid(x)
    return _softmax(x, torch.ones_like(x, dtype=torch.bool))


def _softmax(x: Tensor, among: Tensor) -> Tensor:
    """Softmax over the last dimension among some entries; 0 elsewhere, and where all of them are -inf."""
    x = x.masked_fill(~among, -torch.inf)
    empty = (x == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(x.masked_fill(empty, 0.0), -1).masked_fill(empty | ~among, 0.0)


def choose(x: Tensor, bias: Tensor | None, token_ids: Tensor, settings: RouteSettings) -> Tensor:
    """int64 [T, K]: the experts of each token in descending order of what they are chosen by, ties to the lowest."""
    tokens, experts = x.shape
    k = settings.k
    if settings.choice == "balanced":
        return (token_ids.unsqueeze(1) % experts * k + torch.arange(k, device=x.device)) % experts
    keys = choice_keys(x, bias, settings)
    if settings.random > 0:
        random, uniform = random_keys(settings, token_ids, experts)
        keys = torch.where(random.unsqueeze(1), uniform.to(keys.dtype), keys)
    keys = torch.where(keys.isnan(), x, keys)  # a softmax beside a NaN: the logit stands in
    keys = torch.where(keys.isnan(), torch.inf, keys)
    order = torch.sort(keys, dim=-1, descending=True, stable=True).indices
    if settings.num_groups > 1:  # experts of the other groups last; theirs would be keys of -inf, below any other -inf
        outside = outside_of_best_groups(keys, settings).gather(1, order)
        order = order.gather(1, torch.sort(outside.to(torch.int8), dim=-1, stable=True).indices)
    return order[:, :k]


def choice_keys(x: Tensor, bias: Tensor | None, settings: RouteSettings) -> Tensor:
    """[T, E]: logits, in whose order the scores are too; scores where sums of them are compared."""
    by_score = bias is not None or (settings.num_groups > 1 and settings.group_top2)
    keys = scores_of(x, settings.score) if by_score and settings.score != "softmax_chosen" else x
    return keys if bias is None else keys + bias.to(keys.dtype)


def outside_of_best_groups(keys: Tensor, settings: RouteSettings) -> Tensor:
    """bool [T, E]: experts that are in none of the best groups (DeepSeek-V3, 2024)."""
    tokens, experts = keys.shape
    grouped = keys.view(tokens, settings.num_groups, experts // settings.num_groups)
    group_scores = grouped.topk(2, dim=-1).values.sum(-1) if settings.group_top2 else grouped.amax(-1)
    group_scores = torch.where(group_scores.isnan(), torch.inf, group_scores)
    best = torch.sort(group_scores, dim=-1, descending=True, stable=True).indices[:, : settings.topk_groups]
    outside = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, best, False)
    return outside.repeat_interleave(experts // settings.num_groups, dim=1)


def expert_choice(x: Tensor, valid: Tensor, capacity: Tensor, settings: RouteSettings) -> tuple[Tensor, Tensor]:
    """(int64 [T, K]: the experts that took each token, -1 for none; bool [T, E]: all that did) (Zhou et al., 2022)."""
    keys = x if settings.score == "softmax_chosen" else scores_of(x, settings.score)
    keys = torch.where(keys.isnan(), x, keys)
    keys = torch.where(keys.isnan(), torch.inf, keys)
    order = torch.sort(keys, dim=0, descending=True, stable=True).indices
    order = order.gather(0, torch.sort((~valid)[order].to(torch.int8), dim=0, stable=True).indices)
    rank = torch.arange(x.shape[0], device=x.device).unsqueeze(1).expand_as(order)
    taken = torch.zeros_like(order).scatter(0, order, rank) < torch.minimum(capacity, valid.sum())
    order = torch.sort(keys, dim=1, descending=True, stable=True).indices
    order = order.gather(1, torch.sort((~taken).gather(1, order).to(torch.int8), dim=1, stable=True).indices)
    order = order[:, : settings.slots]
    return torch.where(taken.gather(1, order), order, NO_EXPERT), taken


def weigh(x: Tensor, experts: Tensor, settings: RouteSettings) -> Tensor:
    """[T, K]: weights of the chosen experts (int64, -1: 0), before any is dropped."""
    present = experts >= 0
    chosen = x.gather(1, experts.clamp(min=0))
    if settings.score == "sigmoid":
        weights = torch.where(present, torch.sigmoid(chosen), 0.0)
        if settings.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    elif settings.score == "softmax_chosen" or settings.normalize:
        weights = _softmax(chosen, present)
    else:
        weights = torch.where(present, scores_of(x, "softmax").gather(1, experts.clamp(min=0)), 0.0)
    return weights * settings.scale


def drop_over_capacity(experts: Tensor, weights: Tensor, capacity: Tensor, num_experts: int, by_weight: bool) -> Tensor:
    """bool [T, K]: slots that their expert drops, beyond the first `capacity` (or the largest; ties to the first)."""
    slots = experts.flatten()
    order = torch.arange(slots.numel(), device=slots.device)
    if by_weight:
        key = torch.where(weights.isnan(), torch.inf, weights).flatten()
        order = torch.sort(key, descending=True, stable=True).indices
    order = order[torch.sort(slots[order], stable=True).indices]
    start = torch.searchsorted(slots[order].contiguous(), torch.arange(num_experts, device=slots.device))
    position = torch.arange(slots.numel(), device=slots.device) - start[slots[order].clamp(min=0)]
    dropped = torch.zeros_like(slots, dtype=torch.bool)
    dropped[order] = (position >= capacity) & (slots[order] >= 0)
    return dropped.view(experts.shape)


def capacity_of(valid_tokens: Tensor, num_experts: int, settings: RouteSettings) -> Tensor:
    """int64 []: the slots an expert takes; a count given, or ceil(factor * (valid tokens * k) / E)."""
    if settings.capacity >= 0:
        return torch.full((), settings.capacity, device=valid_tokens.device)
    slots = settings.capacity_factor * (valid_tokens * settings.k).double() / num_experts
    return torch.ceil(slots).clamp(max=2.0**62).long()


def score_sums(x: Tensor, scope: Tensor, scopes: int, settings: RouteSettings) -> Tensor:
    """[S, E]: sums of p / (sum of p over the experts) over the tokens of each scope; scope int64 [T], -1: in none."""
    p = scores_of(x, settings.score)
    if settings.score == "sigmoid":
        p = p / (p.sum(-1, keepdim=True) + TINY)
    member = scope.unsqueeze(0) == torch.arange(scopes, device=x.device).unsqueeze(1)
    return torch.stack([torch.where(rows.unsqueeze(1), p, 0.0).sum(0) for rows in member]) if scopes else p[:0]


def z_sum(x: Tensor, scope: Tensor) -> Tensor:
    """[]: the sum of (log sum exp x)^2 over the tokens that are in a scope; rows of nothing but -inf give 0."""
    empty = (x == -torch.inf).all(-1) | (scope < 0)
    return torch.where(empty, 0.0, torch.logsumexp(x.masked_fill(empty.unsqueeze(1), 0.0), -1).square()).sum()


def jittered(x: Tensor, token_ids: Tensor, settings: RouteSettings) -> Tensor:
    """x times uniform noise in [1 - jitter, 1 + jitter] (Fedus, Zoph and Shazeer, 2021)."""
    return x * jitter_factors(settings, token_ids, x.shape[1], x.dtype) if settings.jitter > 0 else x
