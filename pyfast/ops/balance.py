"""Keeping experts evenly loaded: the auxiliary loss, and the bias that needs no loss. E experts, K slots, S scopes.

A *scope* is the set of tokens over which evenness is asked for: a document ("sequence"), the tokens of one call
("micro_batch"), or those of a whole optimizer step ("global_batch"). With n tokens in a scope, load_e the slots that
chose expert e, p_te the probability that token t gives expert e:

    loss = sum over scopes of  E / (K n) * sum_e load_e * sum_t p_te

which is n times the loss of Switch Transformers: a *sum over tokens*, worth 1 a token when evenly loaded. The caller
divides by the step's number of tokens, as with the cross entropy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pyfast.comm import Group
from pyfast.ops.checks import FLOAT32_MAX, check_float, check_number
from pyfast.ops.dispatch import Op

BALANCE_SCOPES = ("sequence", "micro_batch", "global_batch")
_INTEGERS = (torch.int32, torch.int64)


class BalanceTerms(NamedTuple):
    """What one call knows of its scopes: everything that the balancing loss needs."""

    score_sums: Tensor  # [S, E] float32 (float64 for float64), differentiable: sums of p over the call's tokens
    load: Tensor  # int64 [S, E]: slots that chose each expert, before any is dropped
    valid_tokens: Tensor  # int64 [S]


def balance_loss(
    terms: BalanceTerms,
    k: int,
    *,
    group: Group | dist.ProcessGroup | None = None,
    load: Tensor | None = None,
    valid_tokens: Tensor | None = None,
    name: str = "balance_loss",
) -> Tensor:
    """The switch load balancing loss, summed over valid tokens; see the formula above.

    A scope may be larger than the call: then the load and number of tokens of all of it are needed, either given, or
    summed over `group`. Each call's loss is then its tokens' share, and the shares of all calls add up to the loss of
    one call with all tokens, gradients too.

    Args:
        terms: `Routing.balance_terms`.
        k: experts a token chooses.
        group: the ranks over which the tokens of the scopes are spread; integers are summed over it, no gradient.
            Every rank must have as many scopes, in the same order.
        load: integer [E] or [S, E], that of the whole scopes; with `valid_tokens` instead of `group`.
        valid_tokens: integer [] or [S].
        name: what the collective is called in records and errors.

    Returns:
        A scalar like score_sums; 0 for scopes without a token. Differentiable through score_sums.

    Raises:
        TypeError, ValueError: naming the argument that does not fit.

    Source: Fedus, Zoph and Shazeer (2021); per sequence: DeepSeek-V3 (2024); over the global batch: Qiu et al. (2025).
    """
    scopes, experts = _check_terms(terms)
    if not isinstance(k, int) or isinstance(k, bool):
        raise TypeError(f"k is {k!r}; an integer is needed")
    if not 1 <= k <= experts:
        raise ValueError(f"k is {k}; an integer from 1 to {experts}, the number of experts, is needed")
    if (load is None) != (valid_tokens is None):
        missing = "load" if load is None else "valid_tokens"
        raise ValueError(f"{missing} is missing: load and valid_tokens are given together, or neither")
    if load is None:
        load, valid_tokens = _over_group(terms, group, name)
    elif group is not None:
        raise ValueError("group and load are both given; give load and valid_tokens of the whole scope, or the group")
    else:
        load = _whole("load", load, (scopes, experts), terms.load.device)
        valid_tokens = _whole("valid_tokens", valid_tokens, (scopes,), terms.load.device)
    per_token = load.double() * experts / (k * valid_tokens.clamp(min=1).unsqueeze(1))
    return (terms.score_sums * per_token.to(terms.score_sums.dtype)).sum()


def _check_terms(terms: BalanceTerms) -> tuple[int, int]:
    """(S, E), once terms fit together."""
    if not isinstance(terms, BalanceTerms):
        raise TypeError(f"terms is a {type(terms).__name__}; Routing.balance_terms is needed")
    check_float("terms.score_sums", terms.score_sums)
    if terms.score_sums.dim() != 2:
        raise ValueError(f"terms.score_sums has shape {tuple(terms.score_sums.shape)}; [scopes, experts] is needed")
    scopes, experts = terms.score_sums.shape
    for name, shape in (("load", (scopes, experts)), ("valid_tokens", (scopes,))):
        counts = getattr(terms, name)
        _check_integers(f"terms.{name}", counts)
        if counts.shape != shape:
            raise ValueError(f"terms.{name} has shape {tuple(counts.shape)}; it must be {shape}, as score_sums says")
    return scopes, experts


def _check_integers(name: str, counts: Tensor) -> None:
    if not isinstance(counts, Tensor) or counts.dtype not in _INTEGERS:
        kind = counts.dtype if isinstance(counts, Tensor) else type(counts).__name__
        raise TypeError(f"{name} is {kind}; an integer tensor (int32 or int64) is needed: counts are never rounded")


def _whole(name: str, counts: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """`counts` of whole scopes as `shape`; of a single scope, the first dimension may be missing."""
    _check_integers(name, counts)
    if counts.shape not in (shape, shape[1:]) or (counts.shape == shape[1:] and shape[0] != 1):
        raise ValueError(f"{name} has shape {tuple(counts.shape)}; it must be {shape}, as in terms")
    if counts.device != device:
        raise ValueError(f"{name} is on {counts.device}, terms on {device}; move them to one device")
    return counts.reshape(shape)


def _over_group(terms: BalanceTerms, group: Group | dist.ProcessGroup | None, name: str) -> tuple[Tensor, Tensor]:
    group_name = group.group_name if isinstance(group, dist.ProcessGroup) else _name_of(Group.wrap(group))
    if not group_name:
        return terms.load, terms.valid_tokens
    sums = _sum_counts(torch.cat([terms.load, terms.valid_tokens.unsqueeze(1)], 1), group_name, name)
    return sums[:, :-1], sums[:, -1]


def _name_of(group: Group) -> str:
    return group.process_group.group_name if group.size > 1 else ""


def _sum_counts_over_group(counts: Tensor, group: str, name: str) -> Tensor:
    out = torch.empty_like(counts, memory_format=torch.contiguous_format)
    Group.named(group).all_reduce(counts, name=name, out=out)
    return out


_sum_counts = Op(
    "sum_counts_over_group",
    "(Tensor counts, str group, str name) -> Tensor",
    _sum_counts_over_group,
    lambda counts, group, name: torch.empty_like(counts, memory_format=torch.contiguous_format),
)


@torch.no_grad()
def update_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """Move the balancing bias one step, in place: up by `rate` where an expert got fewer slots than the mean, down
    where it got more. Once per optimizer step, with the counts of the whole step.

    Args:
        bias: float32 [E], the `bias` of `route`.
        counts: int32 or int64 [E]: `Routing.load` (slots chosen, before any is dropped), summed over the step's
            micro-batches and over all ranks that hold tokens, so that every rank moves its bias alike.
        rate: the step, at least 0 (DeepSeek-V3: 0.001).

    Returns:
        bias itself. The comparison with the mean is made in integers: it is exact.

    Raises:
        TypeError, ValueError: naming the argument that does not fit.

    Source: auxiliary-loss-free load balancing (Wang et al., 2024; DeepSeek-V3, 2024).
    """
    _check_integers("counts", counts)
    if counts.dim() != 1:
        raise ValueError(f"counts has shape {tuple(counts.shape)}; [experts] is needed")
    check_bias(bias, "counts", counts)
    counts = counts.long()
    rate = check_number("rate", rate, least=0, most=FLOAT32_MAX)
    return bias.add_(torch.sign(counts.sum() - bias.shape[0] * counts).to(bias.dtype), alpha=rate)


def check_bias(bias: Tensor, other_name: str, other: Tensor) -> None:
    """Raise TypeError / ValueError unless `bias` is a float32 [E] without a gradient that fits `other` [..., E]."""
    if not isinstance(bias, Tensor) or bias.dtype != torch.float32:
        kind = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise TypeError(
            f"bias is {kind}; a float32 tensor is needed: steps of 0.001 vanish in half precision, so keep it float32 "
            "when the model is converted"
        )
    if bias.shape != other.shape[-1:]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}; it must be ({other.shape[-1]},), one number an expert")
    if bias.requires_grad:
        raise ValueError("bias requires a gradient, and none reaches it: it only chooses. Make it a buffer")
    if bias.device != other.device:
        raise ValueError(f"bias is on {bias.device}, {other_name} on {other.device}; move them to one device")
