"""Capacity of ops.route, and expert choice: who is dropped, against loops in Python."""

from __future__ import annotations

import pytest
import torch

from pyfast import ops
from pyfast.kernels import cpu, plain
from pyfast.kernels.route_settings import RouteSettings


def kept_by_position(experts: list[list[int]], capacity: int, num_experts: int) -> list[list[int]]:
    """The first tokens stay, in order."""
    taken = [0] * num_experts
    result = []
    for row in experts:
        result.append([])
        for e in row:
            taken[e] += 1
            result[-1].append(e if taken[e] <= capacity else -1)
    return result


def kept_by_weight(experts: list[list[int]], weights: list[list[float]], capacity: int, num_experts: int):
    """The largest weights stay, ties to the earliest token."""
    keep = set()
    for e in range(num_experts):
        slots = [(-weights[t][i], t, i) for t, row in enumerate(experts) for i, chosen in enumerate(row) if chosen == e]
        keep |= {(t, i) for _, t, i in sorted(slots)[:capacity]}
    return [[e if (t, i) in keep else -1 for i, e in enumerate(row)] for t, row in enumerate(experts)]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("drop", ["position", "probability"])
@pytest.mark.parametrize("capacity", [0, 1, 7, 200, 1000])
@pytest.mark.parametrize("levels", [4, 100_000], ids=["many ties", "no ties"])
def test_capacity_keeps_the_first_tokens_or_the_largest_weights(levels, capacity, drop, normalize):
    torch.manual_seed(0)
    logits = torch.randint(0, levels, (700, 6)).float() * (4 / levels)
    full = ops.route(logits, 2, normalize=normalize)
    routing = ops.route(logits, 2, normalize=normalize, capacity=capacity, drop=drop)
    experts, weights = full.experts.tolist(), full.weights.tolist()
    if drop == "position":
        expected = kept_by_position(experts, capacity, 6)
    else:
        expected = kept_by_weight(experts, weights, capacity, 6)
    assert routing.experts.tolist() == expected
    kept = routing.experts >= 0
    assert torch.equal(routing.weights, torch.where(kept, full.weights, 0.0))  # the others keep their weights
    assert torch.equal(routing.load, full.counts)
    assert torch.equal(routing.counts, full.counts.clamp(max=capacity))
    assert routing.dropped == (~kept).sum()


def test_capacity_is_a_ceiling_and_never_means_dropless_when_it_rounds_to_0():
    logits = torch.zeros(10, 4)
    logits[:, 0] = 1.0  # everyone wants expert 0
    for factor, capacity in ((1.0, 3), (1.2, 3), (1.21, 4), (0.01, 1), (1e-9, 1), (100.0, 10)):
        assert ops.route(logits, 1, capacity_factor=factor).counts.tolist() == [capacity, 0, 0, 0], factor
    assert ops.route(logits, 1, capacity=0).counts.tolist() == [0, 0, 0, 0]
    assert ops.route(logits, 1, capacity_factor=1.0, valid=6).counts.tolist() == [2, 0, 0, 0]  # of valid tokens
    assert ops.route(logits, 2, capacity_factor=1.0).counts.tolist() == [5, 5, 0, 0]


@pytest.mark.parametrize("drop", ["position", "probability"])
@pytest.mark.parametrize("options", [dict(), dict(normalize=False), dict(score="sigmoid")], ids=str)
def test_a_dropped_slot_has_no_gradient_but_its_score_still_divides(options, drop):
    torch.manual_seed(0)
    logits = torch.randn(60, 5, dtype=torch.float64, requires_grad=True)
    routing = ops.route(logits, 3, capacity=20, drop=drop, **options)
    assert routing.dropped > 20
    upstream = torch.randn_like(routing.weights)
    (grad,) = torch.autograd.grad(routing.weights, logits, upstream)
    full = ops.route(logits, 3, **options)
    p = torch.sigmoid(logits) if options.get("score") else torch.softmax(logits, -1)
    weights = p.gather(1, full.experts.long())
    weights = weights / weights.sum(-1, keepdim=True) if options.get("normalize", True) else weights
    (expected,) = torch.autograd.grad((weights * upstream)[routing.experts >= 0].sum(), logits)
    torch.testing.assert_close(grad, expected)


def test_weights_of_nan_are_kept_first_so_that_they_show():
    logits = torch.randn(20, 3)
    logits[17] = float("nan")
    routing = ops.route(logits, 3, capacity=2, drop="probability")
    assert routing.weights[17].isnan().all() and (routing.experts[17] >= 0).all()


# ---- expert choice --------------------------------------------------------------------------------------------------


def expert_choice(p: torch.Tensor, capacity: int, slots: int, valid: list[int]) -> list[list[int]]:
    """Each expert's best tokens, then each token's best experts, in Python."""
    takers: list[list[int]] = [[] for _ in p]
    for e in range(p.shape[1]):
        for t in sorted(valid, key=lambda t: (-p[t, e].item(), t))[:capacity]:
            takers[t].append(e)
    rows = [sorted(row, key=lambda e: (-p[t, e].item(), e))[:slots] for t, row in enumerate(takers)]
    return [row + [-1] * (slots - len(row)) for row in rows]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize(
    ("slots", "limit"), [(None, {}), (2, {}), (3, dict(capacity=5)), (6, dict(capacity_factor=1.5))]
)
def test_experts_choose_tokens(slots, limit, ties, score):
    torch.manual_seed(0)
    logits = torch.randn(50, 6)
    logits = logits.round() if ties else logits
    valid = torch.rand(50) < 0.8
    routing = ops.route(
        logits, 2, choice="expert_choice", score=score, slots=slots, valid=valid, normalize=False, **limit
    )
    p = cpu_scores(logits, score)
    capacity = limit.get("capacity", -int(-limit.get("capacity_factor", 1.0) * int(valid.sum()) * 2 // 6))
    expected = expert_choice(p, capacity, slots or 6, valid.nonzero().flatten().tolist())
    assert routing.experts.tolist() == expected
    assert routing.load.tolist() == [capacity] * 6
    kept = routing.experts >= 0
    assert torch.equal(routing.counts, torch.bincount(routing.experts[kept], minlength=6))
    assert routing.dropped == 6 * capacity - kept.sum() and (routing.dropped == 0 or slots in (2, 3))
    weights = torch.where(kept, p.gather(1, routing.experts.long().clamp(min=0)), 0.0)
    torch.testing.assert_close(routing.weights, weights)


def cpu_scores(logits: torch.Tensor, score: str) -> torch.Tensor:
    """The scores as the kernel rounds them, by expert: equal ones must be equal here too."""
    routing = ops.route(logits, logits.shape[1], score=score, normalize=False)
    return torch.empty_like(logits).scatter(1, routing.experts.long(), routing.weights)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_expert_choice_gradients(normalize, score):
    torch.manual_seed(0)
    logits = torch.randn(12, 5, dtype=torch.float64, requires_grad=True)

    def function(logits):
        options = dict(choice="expert_choice", slots=2, score=score, normalize=normalize, z_loss=True)
        routing = ops.route(logits, 2, **options)
        return routing.weights, routing.z_loss

    torch.autograd.gradcheck(function, logits)


@pytest.mark.parametrize("seed", range(12))
def test_plain_backend_agrees_on_expert_choice(seed):
    torch.manual_seed(seed)
    pick = lambda *values: values[int(torch.randint(len(values), ()))]  # noqa: E731
    tokens, experts = pick(0, 1, 33, 700), pick(1, 8, 17)
    logits = torch.randn(tokens, experts, dtype=torch.float64)
    capacity, factor = pick((-1, 1.0), (5, 0.0), (-1, 0.3))
    s = RouteSettings(
        k=pick(1, experts), score=pick("softmax", "softmax_chosen", "sigmoid"), normalize=pick(True, False), scale=1.0,
        num_groups=1, topk_groups=1, group_top2=True, choice="expert_choice", slots=pick(1, experts), jitter=0.0,
        random_steps=0, seed=0, step=0, capacity=capacity, capacity_factor=factor, drop_by_probability=False,
        score_sums=False, z_sum=pick(True, False),
    )  # fmt: skip
    tensors = (None, pick(None, torch.rand(tokens) < 0.8), pick(None, torch.tensor([tokens // 3, tokens])), None)
    actual, expected = (module.route_forward(logits, *tensors, s) for module in (cpu, plain))
    for field, a, b in zip(actual._fields, actual, expected, strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, f=field: f"{f}: {m}")


def test_what_expert_choice_refuses_is_named():
    logits = torch.randn(6, 8)
    for options, words in (
        (dict(balance="micro_batch"), "balanced by construction"),
        (dict(bias=torch.zeros(8)), "bias is given"),
        (dict(num_groups=2), "num_groups is 2"),
        (dict(slots=9), "slots is 9"),
    ):
        with pytest.raises(ValueError, match=words):
            ops.route(logits, 2, choice="expert_choice", **options)
