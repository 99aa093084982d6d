"""Routing against the chain of torch ops that models use: scores, topk, gather, division, bincount; and its gradient.

T tokens, E experts, K slots a token. Bytes counted: logits read once and dlogits written once.
"""

from __future__ import annotations

import pytest
import torch
from support import dtype_name
from torch import Tensor

from pyfast import ops

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
SHAPES = [(2048, 8, 2), (4096, 64, 8), (2048, 256, 8)]
FULL = [(2048, 8, 1), (16384, 8, 2), (4096, 16, 2), (16384, 64, 8), (4096, 128, 8), (16384, 128, 8), (16384, 256, 8)]
shapes = pytest.mark.parametrize(
    "shape", SHAPES + [pytest.param(s, marks=pytest.mark.full) for s in FULL], ids=lambda s: "x".join(map(str, s))
)


def distinct(tokens: int, experts: int, dtype: torch.dtype) -> Tensor:
    """Logits without ties in a row: torch's topk promises no order among equals."""
    logits = torch.rand(tokens, experts).argsort(-1) / 32 - experts / 64
    return logits.to(dtype).requires_grad_()


def softmax_chain(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mixtral's and Qwen3-MoE's router."""
    p = torch.softmax(logits, -1, dtype=torch.float32)
    weights, experts = torch.topk(p, k, -1)
    if k > 1:  # one weight over itself is 1 and has no gradient
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts, torch.bincount(experts.flatten(), minlength=logits.shape[1])


def grouped_chain(logits: Tensor, bias: Tensor, k: int, groups: int, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """DeepSeek-V3's router."""
    p = torch.sigmoid(logits.float())
    choice = (p + bias).detach().unflatten(1, (groups, -1))
    best = choice.topk(2, -1).values.sum(-1).topk(top, -1).indices
    mask = torch.ones(choice.shape[:2], dtype=torch.bool).scatter(1, best, False)
    experts = choice.masked_fill(mask.unsqueeze(-1), -torch.inf).flatten(1).topk(k, -1).indices
    weights = p.gather(1, experts)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights, experts, torch.bincount(experts.flatten(), minlength=logits.shape[1])


def losses_chain(logits: Tensor, k: int) -> tuple[Tensor, ...]:
    """softmax_chain with the balancing loss and z-loss, as sums over tokens."""
    weights, experts, counts = softmax_chain(logits, k)
    p = torch.softmax(logits, -1, dtype=torch.float32)
    balance = logits.shape[1] / (k * logits.shape[0]) * (counts * p.sum(0)).sum()
    return weights, experts, counts, balance, torch.logsumexp(logits.float(), -1).square().sum()


def step(function, logits: Tensor, upstream: Tensor):
    """A candidate: (weights, experts, counts, *losses) and the gradient."""

    def run() -> list[Tensor]:
        weights, experts, counts, *losses = function(logits)
        ones = [torch.ones(()) for _ in losses]
        (grad,) = torch.autograd.grad([weights, *losses], logits, [upstream, *ones])
        return [weights, experts, counts, *losses, grad]

    return run


@pytest.mark.benchmark(group="route, softmax, forward + backward, against softmax, topk, division, bincount")
@shapes
@pytest.mark.parametrize("dtype", TOLERANCE, ids=dtype_name)
def bench_route(race, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    tokens, experts, k = shape
    logits, upstream = distinct(tokens, experts, dtype), torch.randn(tokens, k)
    race(
        {
            "pyfast": step(lambda x: _three(ops.route(x, k, normalize=k > 1)), logits, upstream),
            "torch": step(lambda x: softmax_chain(x, k), logits, upstream),
        },
        tolerance=TOLERANCE[dtype], moved_bytes=2 * logits.nbytes,
    )  # fmt: skip


@pytest.mark.benchmark(group="route, sigmoid in 8 groups of which 4, with a bias, against DeepSeek-V3's router")
@pytest.mark.parametrize("shape", [(2048, 64, 6), (4096, 256, 8)], ids=lambda s: "x".join(map(str, s)))
def bench_route_groups(race, shape: tuple[int, int, int]) -> None:
    tokens, experts, k = shape
    logits, upstream = torch.randn(tokens, experts, requires_grad=True), torch.randn(tokens, k)
    bias = torch.randn(experts) * 0.1
    options = dict(score="sigmoid", bias=bias, num_groups=8, topk_groups=4)
    race(
        {
            "pyfast": step(lambda x: _three(ops.route(x, k, **options)), logits, upstream),
            "torch": step(lambda x: grouped_chain(x, bias, k, 8, 4), logits, upstream),
        },
        tolerance=1e-5, moved_bytes=2 * logits.nbytes,
    )  # fmt: skip


@pytest.mark.benchmark(group="route, softmax with balancing loss and z-loss, forward + backward")
@shapes
def bench_route_losses(race, shape: tuple[int, int, int]) -> None:
    tokens, experts, k = shape
    logits, upstream = distinct(tokens, experts, torch.float32), torch.randn(tokens, k)

    def ours(x: Tensor) -> tuple[Tensor, ...]:
        routing = ops.route(x, k, normalize=k > 1, balance="micro_batch", z_loss=True)
        return *_three(routing), routing.balance_loss, routing.z_loss

    race(
        {"pyfast": step(ours, logits, upstream), "torch": step(lambda x: losses_chain(x, k), logits, upstream)},
        tolerance=1e-5, moved_bytes=2 * logits.nbytes,
    )  # fmt: skip


def _three(routing) -> tuple[Tensor, Tensor, Tensor]:
    return routing.weights, routing.experts, routing.counts
