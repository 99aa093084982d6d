"""Routing in C++ (csrc/cpu/route_*.cpp): T tokens, E experts, K slots a token, S scopes."""

from __future__ import annotations

import torch
from torch import Tensor

from pyfast.kernels.dtypes import DTYPE_CODES
from pyfast.kernels.extension import _C
from pyfast.kernels.route_results import RouteResults, empty_results
from pyfast.kernels.route_settings import CHOICES, SCORES, RouteSettings


def route_forward(
    logits: Tensor, bias: Tensor | None, valid: Tensor | None, starts: Tensor | None, token_ids: Tensor | None,
    settings: RouteSettings,
) -> RouteResults:  # fmt: skip
    """Choose experts for logits [T, E].

    bias: float32 [E]. valid: bool [T]. starts: int64 [S + 1] ascending, the scopes of the sums; tokens outside them
    are padding. token_ids: int64 [T]. Each may be None.
    """
    shared, keep = _shared(logits, bias, valid, starts, token_ids, settings)
    results = empty_results(logits, 1 if starts is None else starts.shape[0] - 1, settings)
    results.dropped.zero_()
    addresses = (
        results.experts, results.weights, results.chosen, results.load, results.counts, results.dropped,
        results.valid_tokens, results.score_sums, results.z_sum,
    )  # fmt: skip
    optional = {2: settings.limited, 4: settings.limited, 7: settings.score_sums, 8: settings.z_sum}
    _C.route_forward(shared, tuple(t.data_ptr() if optional.get(i, True) else 0 for i, t in enumerate(addresses)))
    del keep
    return results


def route_backward(
    dweights: Tensor, dscore_sums: Tensor | None, dz_sum: Tensor | None, logits: Tensor, chosen: Tensor,
    valid: Tensor | None, starts: Tensor | None, token_ids: Tensor | None, settings: RouteSettings,
) -> Tensor:  # fmt: skip
    """dlogits, contiguous like logits, from the gradients of `route_forward`'s weights, score_sums and z_sum."""
    shared, keep = _shared(logits, None, valid, starts, token_ids, settings)
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    gradients = [dweights.contiguous(), None if dscore_sums is None else dscore_sums.contiguous(), dz_sum]
    _C.route_backward(
        shared, (chosen.data_ptr(), *(0 if g is None else g.data_ptr() for g in gradients), dlogits.data_ptr())
    )
    del keep
    return dlogits


def _shared(
    logits: Tensor, bias: Tensor | None, valid: Tensor | None, starts: Tensor | None, token_ids: Tensor | None,
    s: RouteSettings,
) -> tuple[tuple, tuple]:  # fmt: skip
    """(struct Route's fields, the tensors whose memory they point to)."""
    tokens, experts = logits.shape
    if logits.stride(1) != 1 and experts > 1:
        logits = logits.contiguous()
    optional = tuple(None if t is None else t.contiguous() for t in (bias, valid, starts, token_ids))
    fields = (
        DTYPE_CODES[logits.dtype], logits.data_ptr(), tokens, experts, s.slots, logits.stride(0),
        *(0 if t is None else t.data_ptr() for t in optional), 1 if starts is None else starts.shape[0] - 1,
        SCORES.index(s.score), s.normalize, s.scale, s.num_groups, s.topk_groups, s.group_top2,
        CHOICES.index(s.choice), s.jitter, s.random, s.jitter_key if s.jitter else 0, s.random_key if s.random else 0,
        s.k, s.capacity, s.capacity_factor, s.drop_by_probability, torch.get_num_threads(),
    )  # fmt: skip
    return fields, (logits, *optional)
