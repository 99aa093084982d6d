"""Routing on devices without a kernel of their own: the reference, and its gradient by autograd. No host sync.

Same functions, arguments and results as `pyfast.kernels.cpu_route`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyfast.kernels import reference_route as reference
from pyfast.kernels.dtypes import sum_dtype
from pyfast.kernels.full_precision import full_precision
from pyfast.kernels.route_results import RouteResults, empty_results
from pyfast.kernels.route_settings import RouteSettings


@full_precision
def route_forward(
    logits: Tensor, bias: Tensor | None, valid: Tensor | None, starts: Tensor | None, token_ids: Tensor | None,
    settings: RouteSettings,
) -> RouteResults:  # fmt: skip
    """See `cpu_route.route_forward`."""
    num_experts = logits.shape[1]
    token_ids = _token_ids(logits, token_ids)
    scope, scopes = _scope_of(logits, valid, starts)
    x = reference.jittered(logits.detach().to(sum_dtype(logits.dtype)), token_ids, settings)
    valid_tokens = torch.bincount(scope + 1, minlength=scopes + 1)[1:]
    results = empty_results(logits, scopes, settings)
    chosen, counts, dropped = results.chosen, results.counts, torch.zeros_like(results.dropped)
    capacity = reference.capacity_of(valid_tokens.sum(), num_experts, settings) if settings.limited else None
    if settings.choice == "expert_choice":
        experts, taken = reference.expert_choice(x, scope >= 0, capacity, settings)
        weights, load, chosen = reference.weigh(x, experts, settings), taken.sum(0, keepdim=True), experts.int()
        counts = _load(experts, torch.zeros_like(scope), 1, num_experts)[0]
        dropped = load.sum() - counts.sum()
    else:
        experts = reference.choose(x, bias, token_ids, settings)
        experts = experts.masked_fill((scope < 0).unsqueeze(1), reference.NO_EXPERT)
        weights, load = reference.weigh(x, experts, settings), _load(experts, scope, scopes, num_experts)
        if settings.limited:
            drop = reference.drop_over_capacity(experts, weights, capacity, num_experts, settings.drop_by_probability)
            chosen, counts = torch.where(drop, -2 - experts, experts).int(), torch.minimum(load.sum(0), capacity)
            dropped = drop.sum()
            experts, weights = experts.masked_fill(drop, reference.NO_EXPERT), weights.masked_fill(drop, 0.0)
    return RouteResults(
        weights, experts.int(), load, valid_tokens, counts, dropped, chosen,
        reference.score_sums(x, scope, scopes, settings) if settings.score_sums else results.score_sums,
        reference.z_sum(x, scope) if settings.z_sum else results.z_sum,
    )  # fmt: skip


@full_precision
def route_backward(
    dweights: Tensor, dscore_sums: Tensor | None, dz_sum: Tensor | None, logits: Tensor, chosen: Tensor,
    valid: Tensor | None, starts: Tensor | None, token_ids: Tensor | None, settings: RouteSettings,
) -> Tensor:  # fmt: skip
    """See `cpu_route.route_backward`."""
    scope, scopes = _scope_of(logits, valid, starts)
    experts = torch.where(chosen < -1, -2 - chosen, chosen).long()
    with torch.enable_grad():
        leaf = logits.detach().to(sum_dtype(logits.dtype)).requires_grad_()
        x = reference.jittered(leaf, _token_ids(logits, token_ids), settings)
        # rows outside the scopes may hold anything: they must not meet a gradient of 0 times NaN
        x = torch.where((scope >= 0).unsqueeze(1), x, 0.0)
        outputs = [reference.weigh(x, experts, settings)]
        gradients = [torch.where(chosen >= 0, dweights, 0.0)]
        if dscore_sums is not None:
            outputs.append(reference.score_sums(x, scope, scopes, settings))
            gradients.append(dscore_sums)
        if dz_sum is not None:
            outputs.append(reference.z_sum(x, scope))
            gradients.append(dz_sum)
        (dlogits,) = torch.autograd.grad(outputs, leaf, gradients)
    return dlogits.to(logits.dtype)


def _token_ids(logits: Tensor, token_ids: Tensor | None) -> Tensor:
    return torch.arange(logits.shape[0], device=logits.device) if token_ids is None else token_ids


def _scope_of(logits: Tensor, valid: Tensor | None, starts: Tensor | None) -> tuple[Tensor, int]:
    """(int64 [T]: the scope of each token, -1 for padding; S)."""
    position = torch.arange(logits.shape[0], device=logits.device)
    if starts is None:
        scope, scopes = torch.zeros_like(position), 1
    else:
        scopes = starts.shape[0] - 1
        scope = torch.searchsorted(starts, position, right=True) - 1
        scope = scope.masked_fill(scope >= scopes, -1)
    return scope if valid is None else scope.masked_fill(~valid, -1), scopes


def _load(experts: Tensor, scope: Tensor, scopes: int, num_experts: int) -> Tensor:
    """int64 [S, E]: slots that chose each expert."""
    chosen = torch.where(experts >= 0, scope.unsqueeze(1) * num_experts + experts, scopes * num_experts)
    return torch.bincount(chosen.flatten(), minlength=scopes * num_experts + 1)[:-1].view(scopes, num_experts)
