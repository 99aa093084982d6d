"""Routing: which experts a token goes to, and with what weights. T tokens, E experts, K slots a token, S scopes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pyfast import kernels
from pyfast.comm import Group
from pyfast.kernels.route_results import RouteResults, empty_results
from pyfast.kernels.route_settings import CHOICES, RouteSettings
from pyfast.ops.balance import BALANCE_SCOPES, BalanceTerms, balance_loss, check_bias
from pyfast.ops.checks import FLOAT32_MAX, check_bool, check_float, check_number
from pyfast.ops.dispatch import Op, differentiable

_MOST_INTEGER = 2**63 - 1  # of an op's arguments
MOST_EXPERTS = 65534  # noise numbers (token, expert) pairs with 16 bits for the expert


class Routing(NamedTuple):
    """Where the tokens of one call go. Nothing here refers to earlier calls, and nothing remembers this one."""

    experts: Tensor  # int32 [T, K] in descending order of what they were chosen by; -1: dropped, or padding
    weights: Tensor  # [T, K] float32 (float64 for float64), differentiable by logits; 0 where the expert is -1
    counts: Tensor  # int64 [E]: slots that go to each expert, = the number of times it stands in `experts`
    dropped: Tensor  # int64 []: slots that chose an expert and were dropped
    load: Tensor  # int64 [E]: slots that chose each expert, before any was dropped: what a balancing bias goes by
    balance_loss: Tensor | None  # [] like weights, a sum over valid tokens; None unless asked for
    z_loss: Tensor | None  # [] like weights, a sum over valid tokens; None unless asked for
    balance_terms: BalanceTerms | None  # what the balancing loss was made of, for `balance_loss` with other counts


def route(
    logits: Tensor,
    k: int,
    *,
    score: str = "softmax",
    softmax_over: str = "all",
    normalize: bool = True,
    scale: float = 1.0,
    bias: Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    group_score: str = "top2",
    valid: Tensor | int | None = None,
    cu_seqlens: Tensor | None = None,
    token_ids: Tensor | None = None,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    drop: str = "position",
    choice: str = "top_k",
    slots: int | None = None,
    jitter: float = 0.0,
    random_steps: int = 0,
    seed: int | None = None,
    step: int | None = None,
    balance: str | None = None,
    group: Group | dist.ProcessGroup | None = None,
    global_load: Tensor | None = None,
    global_valid_tokens: Tensor | None = None,
    z_loss: bool = False,
    name: str = "route",
) -> Routing:
    """Choose k experts for each token, and weights for them, in one pass over the router's logits.

    Scores are p = softmax(logits) or sigmoid(logits), in float32 (float64). The experts of the k greatest scores are
    chosen, ties to the lowest number; their weights are scale * p, divided by the sum of the k if `normalize`. (For a
    softmax that is the softmax over the chosen logits, and is computed as such.)

    Args:
        logits: [T, E] float32, bfloat16, float16 or float64, any strides.
        k: experts a token, 1 to E.
        score: "softmax" or "sigmoid".
        softmax_over: "all": p as above. "chosen": choose by the logits, then take the softmax over the k chosen; the
            auxiliary losses still see the softmax over all.
        normalize: divide the weights by their sum (of sigmoids: plus 1e-20). Has no effect with "chosen".
        scale: factor of the weights, at least 0, after normalising.
        bias: float32 [E], added to the scores (to the logits with "chosen") when experts are chosen, never to weights.
        num_groups, topk_groups: experts are num_groups groups of neighbours; only those in the topk_groups best groups
            may be chosen (the others count as -inf, whatever the sign of the scores). 1 group: no limit.
        group_score: a group is worth the sum of its two best (biased) scores, "top2", or its best, "max".
        valid: which tokens are real: bool [T], or how many (an int, or an integer tensor []), the first ones. Padding
            gets experts -1 and weights 0, whatever its logits are, and enters no count, no loss and no gradient.
        cu_seqlens: int32 [documents + 1] ascending starts of documents; tokens outside all of them are padding.
        token_ids: int64 [T], numbers of the tokens in the global batch: noise and balanced routing go by them, so that
            they do not depend on the layout. Default 0, 1, ...
        capacity: the most slots an expert takes from this call (0: none at all); None: any number.
        capacity_factor: the same as ceil(capacity_factor * (valid tokens * k) / E), above 0; so at least 1.
        drop: who is dropped beyond capacity: "position": all but the first tokens; "probability": all but the largest
            weights, ties to the earliest token. A dropped slot has expert -1 and weight 0; the other weights stay.
        choice: "top_k" as above. "balanced": token t takes experts t k, t k + 1, ... modulo E, whatever the scores,
            with the weights that these give them: even loads, for benchmarks. "expert_choice": see Notes.
        slots: "expert_choice" only: K of the result, default E.
        jitter: multiply logits by uniform noise in [1 - jitter, 1 + jitter], 0 to 1; a function of (seed, step, token
            id, expert) alone.
        random_steps: anneal from random to learned routing: at `step` a token takes k random experts (of the allowed
            groups) with probability 1 - step / random_steps, with the weights that its scores give them.
        seed, step: integers from 0 to 2^64 - 1 (as torch.initial_seed() is) and to 2^63 - 1; needed with jitter and
            random_steps.
        balance: ask for the balancing loss over tokens of a "sequence" (each document of cu_seqlens), "micro_batch"
            (this call) or "global_batch" (the step); see `balance_loss` for formula and scale.
        group: the ranks over which the tokens of a scope are spread: for a sequence those of context parallelism, for
            a micro-batch also those of sequence parallelism, for a global batch all with tokens of the step.
        global_load, global_valid_tokens: with balance, the load and number of valid tokens of the whole scopes,
            instead of a group: integer [E] and [] (sequence: [documents, E] and [documents]).
        z_loss: ask for the sum over valid tokens of logsumexp(logits)^2.
        name: what the collective is called in records and errors.

    Returns:
        A `Routing`.

    Raises:
        TypeError, ValueError: naming the argument that does not fit, before anything is computed or sent.

    Notes:
        A token with a NaN among its logits (or +inf, for a softmax) still gets k distinct experts; weights that depend
        on it are NaN, so that a check of the loss sees it. A row of nothing but -inf has weights 0.

        Expert choice (Zhou et al., 2022): every expert takes the `capacity` tokens (default: capacity_factor 1) whose
        scores for it are the greatest, ties to the earliest. A token has 0 to E experts: they stand first in its
        `slots`, in descending order of score, the rest is -1. A token that more than `slots` experts took keeps the
        best; `dropped` counts the others. It looks at later tokens: not for training causal models to be sampled from.

    Source: Shazeer et al. (2017), Fedus et al. (2021); groups, sigmoid and bias: DeepSeek-V3 (2024); z-loss: Zoph et
    al. (2022).
    """
    _check_logits(logits, k)
    settings = _settings(
        logits.shape[1], k, score, softmax_over, normalize, scale, num_groups, topk_groups, group_score, choice, slots,
        jitter, random_steps, seed, step, capacity, capacity_factor, drop, balance is not None, z_loss,
    )  # fmt: skip
    _check_balance(settings, balance, cu_seqlens, group, global_load, global_valid_tokens)
    if bias is not None:
        _check_bias(bias, logits, settings)
    valid, starts = _check_valid(valid, logits), _check_cu_seqlens(cu_seqlens, logits, balance == "sequence")
    if token_ids is not None:
        _check_token_ids(token_ids, logits)
    results = RouteResults(*_route(logits, bias, valid, starts, token_ids, *settings))
    load = results.load.sum(0)  # never a view of balance_terms.load: callers add loads up in place
    terms = loss = None
    if balance is not None:
        terms = BalanceTerms(results.score_sums, results.load, results.valid_tokens)
        loss = balance_loss(
            terms, k, group=group, load=global_load, valid_tokens=global_valid_tokens, name=f"{name} balance"
        )
    return Routing(
        experts=results.experts, weights=results.weights, counts=results.counts if settings.limited else load.clone(),
        dropped=results.dropped, load=load, balance_loss=loss, z_loss=results.z_sum if z_loss else None,
        balance_terms=terms,
    )  # fmt: skip


# ---- checks ---------------------------------------------------------------------------------------------------------


def _check_logits(logits: Tensor, k: int) -> None:
    check_float("logits", logits)
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= MOST_EXPERTS:
        raise ValueError(
            f"logits has shape {tuple(logits.shape)}; [tokens, experts] with 1 to {MOST_EXPERTS} experts is needed"
        )
    _check_integer("k", k, 1, logits.shape[1], "the number of experts")


def _check_integer(name: str, value: object, least: int, most: int | None = None, why: str = "") -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; an integer is needed")
    if value < least or (most is not None and value > most):
        bound = f"of at least {least}" if most is None else f"from {least} to {most}{', ' + why if why else ''},"
        raise ValueError(f"{name} is {value}; an integer {bound} is needed")
    return value


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed are {', '.join(map(repr, allowed))}")


def _settings(
    experts, k, score, softmax_over, normalize, scale, num_groups, topk_groups, group_score, choice, slots, jitter,
    random_steps, seed, step, capacity, capacity_factor, drop, score_sums, z_sum,
) -> RouteSettings:  # fmt: skip
    """The plain arguments, checked."""
    _one_of("score", score, ("softmax", "sigmoid"))
    _one_of("softmax_over", softmax_over, ("all", "chosen"))
    _one_of("group_score", group_score, ("top2", "max"))
    _one_of("drop", drop, ("position", "probability"))
    _one_of("choice", choice, CHOICES)
    if softmax_over == "chosen" and score != "softmax":
        raise ValueError("softmax_over is 'chosen' with score 'sigmoid'; it goes with score 'softmax' only")
    _check_groups(experts, k, num_groups, topk_groups, group_score)
    capacity, capacity_factor = _check_capacity(capacity, capacity_factor, choice)
    jitter = check_number("jitter", jitter, least=0)
    if jitter > 1:
        raise ValueError(f"jitter is {jitter:g}; a number from 0 to 1 is needed: beyond 1 it turns logits round")
    _check_integer("random_steps", random_steps, 0, _MOST_INTEGER)
    seed, step = _check_seed(seed, step, jitter > 0 or random_steps > 0)
    if choice != "top_k":
        _check_not_top_k(choice, num_groups, random_steps)
    if slots is not None and choice != "expert_choice":
        raise ValueError(f"slots is {slots} with choice {choice!r}; it goes with 'expert_choice' only, else it is k")
    if choice == "expert_choice":
        slots = experts if slots is None else _check_integer("slots", slots, 1, experts, "the number of experts")
    return RouteSettings(
        k, "softmax_chosen" if softmax_over == "chosen" else score, check_bool("normalize", normalize),
        check_number("scale", scale, least=0, most=FLOAT32_MAX), num_groups, topk_groups, group_score == "top2", choice,
        k if slots is None else slots, jitter, random_steps, seed, step, capacity, capacity_factor,
        drop == "probability", score_sums, check_bool("z_loss", z_sum),
    )  # fmt: skip


def _check_groups(experts: int, k: int, num_groups: int, topk_groups: int, group_score: str) -> None:
    _check_integer("num_groups", num_groups, 1, experts, "the number of experts")
    _check_integer("topk_groups", topk_groups, 1, num_groups, "num_groups")
    if experts % num_groups:
        raise ValueError(f"num_groups is {num_groups}, which does not divide the number of experts, {experts}")
    size = experts // num_groups
    if topk_groups * size < k:
        raise ValueError(
            f"topk_groups is {topk_groups}: {topk_groups} groups of {size} experts are fewer than k = {k}; allow more"
        )
    if num_groups > 1 and size < 2 and group_score == "top2":
        raise ValueError(f"group_score is 'top2' with {num_groups} groups of one expert; use 'max'")


def _check_capacity(capacity: int | None, capacity_factor: float | None, choice: str) -> tuple[int, float]:
    if capacity is not None and capacity_factor is not None:
        raise ValueError("capacity and capacity_factor are both given; give one")
    if capacity is not None:
        return _check_integer("capacity", capacity, 0, _MOST_INTEGER), 0.0
    if capacity_factor is not None:
        factor = check_number("capacity_factor", capacity_factor, least=0)
        if factor == 0:
            raise ValueError("capacity_factor is 0; it must be above 0 (None: no limit, capacity=0: drop everything)")
        return -1, factor
    return -1, 1.0 if choice == "expert_choice" else 0.0


def _check_seed(seed: int | None, step: int | None, needed: bool) -> tuple[int, int]:
    for name, value, most in (("seed", seed, 2**64 - 1), ("step", step, _MOST_INTEGER)):
        if value is None and needed:
            raise ValueError(f"{name} is missing: jitter and random_steps are functions of an explicit seed and step")
        if value is not None:
            _check_integer(name, value, 0, most)
    seed = 0 if seed is None else seed
    return seed if seed <= _MOST_INTEGER else seed - 2**64, 0 if step is None else step  # the same 64 bits


def _check_not_top_k(choice: str, num_groups: int, random_steps: int) -> None:
    if num_groups > 1:
        raise ValueError(f"num_groups is {num_groups} with choice {choice!r}; groups go with 'top_k' only")
    if random_steps > 0:
        raise ValueError(f"random_steps is {random_steps} with choice {choice!r}; it goes with 'top_k' only")


def _check_balance(settings, balance, cu_seqlens, group, global_load, global_valid_tokens) -> None:
    if balance is None:
        given = {"group": group, "global_load": global_load, "global_valid_tokens": global_valid_tokens}
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} is given without balance; choose balance from {', '.join(BALANCE_SCOPES)}")
        return
    _one_of("balance", balance, BALANCE_SCOPES)
    if settings.choice == "expert_choice":
        raise ValueError(
            "balance is given with choice 'expert_choice', which is balanced by construction; leave it out"
        )
    if balance == "sequence" and cu_seqlens is None:
        raise ValueError("balance is 'sequence' without cu_seqlens; give the starts of the documents")
    if balance == "global_batch" and group is None and global_load is None:
        raise ValueError(
            "balance is 'global_batch' without its counts; give global_load and global_valid_tokens, or the group of "
            "all ranks whose tokens make up the step"
        )


def _check_bias(bias: Tensor, logits: Tensor, settings: RouteSettings) -> None:
    check_bias(bias, "logits", logits)
    if settings.choice != "top_k":
        raise ValueError(f"bias is given with choice {settings.choice!r}, where it changes nothing; leave it out")


def _check_valid(valid: Tensor | int | None, logits: Tensor) -> Tensor | None:
    """A bool [T], or None."""
    tokens = logits.shape[0]
    if valid is None:
        return None
    if isinstance(valid, int) and not isinstance(valid, bool):
        _check_integer("valid", valid, 0, tokens, "the number of tokens")
        return torch.arange(tokens, device=logits.device) < valid
    if not isinstance(valid, Tensor):
        raise TypeError(f"valid is {valid!r}; a bool tensor [T], or the number of valid tokens, is needed")
    if valid.device != logits.device:
        raise ValueError(f"valid is on {valid.device}, logits on {logits.device}; move them to one device")
    if valid.dim() == 0 and valid.dtype in (torch.int32, torch.int64):
        return torch.arange(tokens, device=logits.device) < valid
    if valid.dtype != torch.bool or valid.shape != (tokens,):
        raise ValueError(
            f"valid has shape {tuple(valid.shape)} and dtype {valid.dtype}; it must be bool ({tokens},), or an integer "
            "scalar"
        )
    return valid


def _check_cu_seqlens(cu_seqlens: Tensor | None, logits: Tensor, per_document: bool) -> Tensor | None:
    """Starts of the scopes, int64: of the documents, or of all of them together."""
    if cu_seqlens is None:
        return None
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32:
        what = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens is {what}; an int32 tensor [documents + 1] is needed")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; [documents + 1] is needed")
    if cu_seqlens.device != logits.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, logits on {logits.device}; move them to one device")
    return _scopes_op(cu_seqlens, logits.shape[0], per_document)


def _check_token_ids(token_ids: Tensor, logits: Tensor) -> None:
    if not isinstance(token_ids, Tensor) or token_ids.dtype != torch.int64:
        kind = token_ids.dtype if isinstance(token_ids, Tensor) else type(token_ids).__name__
        raise TypeError(f"token_ids is {kind}; an int64 tensor [T] is needed")
    if token_ids.shape != logits.shape[:1] or token_ids.device != logits.device:
        raise ValueError(
            f"token_ids has shape {tuple(token_ids.shape)} on {token_ids.device}; it must be ({logits.shape[0]},) on "
            f"{logits.device}"
        )


# ---- the op ---------------------------------------------------------------------------------------------------------


def _scopes(cu_seqlens: Tensor, tokens: int, per_document: bool) -> Tensor:
    """int64 starts of the documents, or of all of them together. An op: compiled calls know their values only here."""
    values = cu_seqlens.tolist()
    if values[0] < 0 or values[-1] > tokens or values != sorted(values):
        raise ValueError(f"cu_seqlens is {values}; starts must ascend within 0..{tokens}, the number of tokens")
    starts = cu_seqlens.long()
    return starts if per_document else torch.stack([starts[0], starts[-1]])


def _scopes_fake(cu_seqlens: Tensor, tokens: int, per_document: bool) -> Tensor:
    return cu_seqlens.new_empty(cu_seqlens.shape[0] if per_document else 2, dtype=torch.int64)


def _forward(logits, bias, valid, starts, token_ids, *settings) -> tuple[Tensor, ...]:
    forward = kernels.for_device(logits.device).route_forward
    return tuple(forward(logits, bias, valid, starts, token_ids, RouteSettings(*settings)))


def _forward_fake(logits, bias, valid, starts, token_ids, *settings) -> tuple[Tensor, ...]:
    return tuple(empty_results(logits, 1 if starts is None else starts.shape[0] - 1, RouteSettings(*settings)))


def _backward(dweights, dscore_sums, dz_sum, logits, chosen, valid, starts, token_ids, *settings) -> Tensor:
    backward = kernels.for_device(logits.device).route_backward
    return backward(
        dweights, dscore_sums, dz_sum, logits, chosen, valid, starts, token_ids, RouteSettings(*settings)
    )  # fmt: skip


def _backward_fake(dweights, dscore_sums, dz_sum, logits, chosen, valid, starts, token_ids, *settings) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _setup_context(ctx, inputs, output) -> None:
    logits, _, valid, starts, token_ids, *settings = inputs
    results, ctx.settings = RouteResults(*output), RouteSettings(*settings)
    chosen = results.chosen if ctx.settings.limited else results.experts
    ctx.save_for_backward(logits, chosen, valid, starts, token_ids)
    constant = [results.experts, results.load, results.valid_tokens, results.counts, results.dropped, results.chosen]
    if not ctx.settings.score_sums:
        constant.append(results.score_sums)
    if not ctx.settings.z_sum:
        constant.append(results.z_sum)
    ctx.mark_non_differentiable(*constant)


def _gradients(ctx, *grads):
    upstream, settings = RouteResults(*grads), ctx.settings
    dscore_sums = upstream.score_sums if settings.score_sums else None
    dz_sum = upstream.z_sum if settings.z_sum else None
    dlogits = _backward_op(upstream.weights, dscore_sums, dz_sum, *ctx.saved_tensors, *settings)
    return dlogits, *[None] * (4 + len(settings))


_TENSORS = "Tensor? valid, Tensor? starts, Tensor? token_ids"
_scopes_op = Op(
    "route_scopes", "(Tensor cu_seqlens, SymInt tokens, bool per_document) -> Tensor", _scopes, _scopes_fake
)  # fmt: skip
_forward_op = Op(
    "route",
    f"(Tensor logits, Tensor? bias, {_TENSORS}, {RouteSettings.SCHEMA}) -> ({', '.join(['Tensor'] * 9)})",
    _forward,
    _forward_fake,
)
_backward_op = Op(
    "route_backward",
    "(Tensor dweights, Tensor? dscore_sums, Tensor? dz_sum, Tensor logits, Tensor chosen, "
    f"{_TENSORS}, {RouteSettings.SCHEMA}) -> Tensor",
    _backward,
    _backward_fake,
)
_route = differentiable(_forward_op, _setup_context, _gradients)
