"""What every routing kernel returns: T tokens, E experts, K slots a token, S scopes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyfast.kernels.dtypes import sum_dtype
from pyfast.kernels.route_settings import RouteSettings


class RouteResults(NamedTuple):
    """What `route_forward` gives. What was not asked for, or cannot happen, is empty: see each."""

    weights: Tensor  # [T, K] float32 (float64 for float64), 0 where the expert is -1
    experts: Tensor  # int32 [T, K], -1: no expert
    load: Tensor  # int64 [S, E]: slots that chose the expert
    valid_tokens: Tensor  # int64 [S]
    counts: Tensor  # int64 [E]: slots that the expert keeps; empty without a capacity: all of them
    dropped: Tensor  # int64 []: slots that are dropped
    chosen: Tensor  # int32 [T, K]: as experts, but -2 - e where expert e dropped the slot; empty without a capacity
    score_sums: Tensor  # [S, E] like weights; empty unless settings.score_sums
    z_sum: Tensor  # [] like weights; empty unless settings.z_sum


def empty_results(logits: Tensor, scopes: int, settings: RouteSettings) -> RouteResults:
    """The results with their shapes and dtypes, uninitialised."""
    tokens, experts = logits.shape
    slots, wide, limited = settings.slots, sum_dtype(logits.dtype), settings.limited
    integers, floats = {"dtype": torch.int64, "device": logits.device}, {"dtype": wide, "device": logits.device}
    return RouteResults(
        experts=logits.new_empty(tokens, slots, dtype=torch.int32),
        weights=torch.empty(tokens, slots, **floats),
        load=torch.empty(scopes, experts, **integers),
        valid_tokens=torch.empty(scopes, **integers),
        counts=torch.empty(experts if limited else 0, **integers),
        dropped=torch.empty((), **integers),
        chosen=logits.new_empty((tokens, slots) if limited else (0,), dtype=torch.int32),
        score_sums=torch.empty((scopes, experts) if settings.score_sums else (0,), **floats),
        z_sum=torch.empty(() if settings.z_sum else (0,), **floats),
    )
