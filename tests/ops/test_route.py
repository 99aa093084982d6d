"""ops.route: which experts, which weights, which gradients, against torch in float64 and transformers' routers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from pyfast import ops
from pyfast.kernels import cpu, plain
from pyfast.kernels.route_settings import RouteSettings
from pyfast.ops.route import _backward_op

DTYPES = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 4e-3, torch.float16: 5e-4}
INF, NAN = math.inf, math.nan


def oracle(logits, k, *, score="softmax", softmax_over="all", normalize=True, scale=1.0, bias=None, num_groups=1,
           topk_groups=1, group_score="top2"):  # fmt: skip
    """(experts, weights) by torch's own ops in float64; no ties among the scores."""
    x = logits.double()
    p = torch.sigmoid(x) if score == "sigmoid" else torch.softmax(x, -1)
    choice = x if softmax_over == "chosen" else p
    choice = choice.detach() if bias is None else choice.detach() + bias.double()
    if num_groups > 1:
        grouped = choice.unflatten(1, (num_groups, -1))
        groups = grouped.topk(2, -1).values.sum(-1) if group_score == "top2" else grouped.max(-1).values
        best = groups.topk(topk_groups, -1).indices
        mask = torch.ones_like(groups, dtype=torch.bool).scatter(1, best, False)
        choice = grouped.masked_fill(mask.unsqueeze(-1), -INF).flatten(1)
    experts = choice.topk(k, -1).indices
    if softmax_over == "chosen":
        weights = torch.softmax(x.gather(1, experts), -1)
    else:
        weights = p.gather(1, experts)
        if normalize:
            weights = weights / weights.sum(-1, keepdim=True)
    return experts, scale * weights


def settings(**given) -> RouteSettings:
    """RouteSettings with the values of ops.route's defaults."""
    defaults = dict(
        k=2, score="softmax", normalize=True, scale=1.0, num_groups=1, topk_groups=1, group_top2=True, choice="top_k",
        slots=given.get("k", 2), jitter=0.0, random_steps=0, seed=0, step=0, capacity=-1, capacity_factor=0.0,
        drop_by_probability=False, score_sums=False, z_sum=False,
    )  # fmt: skip
    return RouteSettings(**defaults | given)


def relative_error(actual, expected) -> float:
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-300)).item()


def check(logits, k, **options):
    """Experts, weights and the gradient equal the oracle's."""
    leaf, leaf64 = logits.detach().requires_grad_(), logits.detach().double().requires_grad_()
    routing = ops.route(leaf, k, **options)
    experts, weights = oracle(leaf64, k, **options)
    assert torch.equal(routing.experts.long(), experts)
    upstream = torch.randn(weights.shape, dtype=torch.float64)
    routing.weights.backward(upstream.to(routing.weights.dtype))
    weights.backward(upstream)
    rounding = 1e-14 if logits.dtype == torch.float64 else 1e-6
    assert relative_error(routing.weights, weights.detach()) < rounding
    assert leaf.grad.dtype == logits.dtype
    error = (leaf.grad.double() - leaf64.grad).norm()  # the gradient may be 0 after cancellation: k = 1, normalised
    assert error < 4 * DTYPES[logits.dtype] * leaf64.grad.norm() + rounding * upstream.norm() * weights.max()
    assert torch.equal(routing.counts, torch.bincount(experts.flatten(), minlength=logits.shape[1]))
    return routing


def distinct_logits(tokens, experts, dtype=torch.float32):
    """No two equal in a row, also in half precision."""
    order = torch.rand(tokens, experts).argsort(-1)
    return ((order - experts / 2) / 16).to(dtype) if dtype.itemsize == 2 else torch.randn(tokens, experts, dtype=dtype)


SCORES = [
    dict(score="softmax", normalize=True),
    dict(score="softmax", normalize=False),
    dict(score="softmax", softmax_over="chosen"),
    dict(score="sigmoid", normalize=True, scale=2.5),
    dict(score="sigmoid", normalize=False),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", SCORES, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (5, 2), (8, 8), (16, 1), (37, 6), (128, 8), (256, 8)])
def test_scores_and_weights_equal_torch_in_float64(experts, k, options, dtype):
    torch.manual_seed(0)
    routing = check(distinct_logits(65, experts, dtype), k, **options)
    assert routing.experts.dtype == torch.int32 and routing.experts.shape == routing.weights.shape == (65, k)
    assert routing.weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert routing.counts.dtype == routing.load.dtype == routing.dropped.dtype == torch.int64
    assert routing.dropped == 0 and torch.equal(routing.counts, routing.load)


@pytest.mark.parametrize("options", SCORES, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("groups", [dict(num_groups=4, topk_groups=2), dict(num_groups=8, topk_groups=3)], ids=str)
@pytest.mark.parametrize("group_score", ["top2", "max"])
@pytest.mark.parametrize("biased", [True, False])
def test_groups_and_bias_equal_torch_in_float64(biased, group_score, groups, options):
    torch.manual_seed(0)
    bias = torch.randn(32) * 0.3 if biased else None
    check(torch.randn(65, 32, dtype=torch.float64), 5, bias=bias, group_score=group_score, **groups, **options)


@pytest.mark.parametrize("sign", [1, -1])
def test_experts_outside_the_best_groups_are_never_chosen_even_when_all_scores_are_negative(sign):
    """A mask of 0 instead of -inf would win against negative biased scores."""
    torch.manual_seed(0)
    logits, bias = torch.randn(200, 16), torch.full((16,), -5.0 if sign < 0 else 5.0)
    routing = ops.route(logits, 4, score="sigmoid", bias=bias, num_groups=4, topk_groups=1)
    group = routing.experts // 4
    assert (group == group[:, :1]).all()
    blocked = torch.full((16,), -INF)  # and not even when the allowed ones are at -inf themselves
    routing = ops.route(logits, 4, score="sigmoid", bias=blocked, num_groups=4, topk_groups=1)
    assert torch.equal(routing.experts, torch.arange(4, dtype=torch.int32).expand(200, 4))


def test_a_closed_expert_of_an_allowed_group_comes_before_those_of_other_groups():
    """Masked with -inf, experts outside of the groups would tie with it, and lower numbers win."""
    logits = torch.full((3, 12), -INF)
    logits[:, 5] = 0.0
    routing = ops.route(logits, 3, num_groups=3, topk_groups=1, group_score="max")
    assert routing.experts.tolist() == [[5, 4, 6]] * 3
    assert routing.weights.tolist() == [[1.0, 0.0, 0.0]] * 3


def test_a_group_whose_two_best_are_infinities_of_both_signs_counts_once():
    """inf - inf is no number, and must not open a group more than allowed: a NaN among the logits ranks as inf."""
    logits = torch.tensor([[0.0, 1.0, NAN, -INF], [INF, -INF, 1.0, 0.0]])
    routing = ops.route(logits, 2, softmax_over="chosen", num_groups=2, topk_groups=1)
    assert routing.experts.tolist() == [[2, 3], [0, 1]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_bias_changes_the_choice_and_never_the_weights(score, normalize):
    torch.manual_seed(0)
    logits, bias = torch.randn(99, 16), torch.zeros(16)
    bias[3] = 10.0
    options = dict(score=score, normalize=normalize)
    routing = ops.route(logits, 2, bias=bias, **options)
    assert (routing.experts[:, 0] == 3).all()  # in the order of what they were chosen by
    p = (torch.sigmoid if score == "sigmoid" else lambda x: torch.softmax(x, -1))(logits.double())
    weights = p.gather(1, routing.experts.long())
    weights = weights / weights.sum(-1, keepdim=True) if normalize else weights
    torch.testing.assert_close(routing.weights, weights.float())
    unbiased = ops.route(logits, 2, bias=torch.zeros(16), **options)
    assert torch.equal(unbiased.experts, ops.route(logits, 2, **options).experts)
    assert bias.dtype == torch.float32


@pytest.mark.parametrize("experts", [5, 16, 40])
def test_ties_go_to_the_lowest_expert_in_descending_order_of_score(experts):
    torch.manual_seed(0)
    logits = torch.randint(0, 3, (300, experts)).float()
    routing = ops.route(logits, 4)
    for row, chosen in zip(logits.tolist(), routing.experts.tolist(), strict=True):
        assert chosen == sorted(range(experts), key=lambda e: (-row[e], e))[:4]


def test_scores_that_round_to_the_same_number_still_follow_the_logits():
    logits = torch.tensor([[20.0, 30.0, 40.0, -300.0, -200.0]])
    assert ops.route(logits, 5, score="sigmoid").experts.tolist() == [[2, 1, 0, 4, 3]]
    assert ops.route(logits, 5, normalize=False).experts.tolist() == [[2, 1, 0, 4, 3]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("grouped", [True, False])
def test_nan_logits_give_k_distinct_experts_and_weights_that_say_so(score, grouped):
    torch.manual_seed(0)
    logits = torch.randn(6, 20)
    logits[0] = NAN
    logits[1, 7] = NAN
    logits[2, 19] = NAN
    logits[3] = torch.tensor([INF, NAN, -INF, 1.0]).repeat(5)
    options = dict(num_groups=5, topk_groups=2, bias=torch.randn(20)) if grouped else {}
    routing = ops.route(logits, 4, score=score, **options)
    for chosen in routing.experts.tolist():
        assert len(set(chosen)) == 4 and all(0 <= e < 20 for e in chosen)
    assert routing.weights[:4].isnan().any(-1).all()  # it does not vanish
    assert routing.weights[4:].isfinite().all()
    assert routing.counts.sum() == 24


@pytest.mark.parametrize("options", SCORES, ids=lambda o: "-".join(map(str, o.values())))
def test_infinite_logits_close_experts_and_give_no_nan(options):
    logits = torch.randn(5, 8)
    logits[:, 3:] = -INF
    logits[4] = -INF
    logits.requires_grad_()
    routing = ops.route(logits, 4, **options, balance="micro_batch", z_loss=True)
    (routing.weights.square().sum() + routing.balance_loss + routing.z_loss).backward()
    assert routing.experts[:4, :3].sort().values.tolist() == [[0, 1, 2]] * 4
    assert routing.experts[:, 3].tolist() == [3] * 5
    assert (routing.weights[:, 3] == 0).all() and (routing.weights[4] == 0).all()
    assert logits.grad.isfinite().all() and (logits.grad[:, 3:] == 0).all()


def test_a_weight_of_exactly_0_has_the_right_gradient():
    """p = 0 in float32; a formula that divides by the weight would give NaN."""
    logits = torch.tensor([[0.0, 200.0, 1.0], [-200.0, -201.0, -202.0]], requires_grad=True)
    for options in SCORES:
        logits.grad = None
        routing = ops.route(logits, 3, **options)
        upstream = torch.tensor([[1.0, 2.0, -3.0], [0.5, 1.0, -1.0]])
        routing.weights.backward(upstream)
        leaf = logits.detach().double().requires_grad_()
        experts, weights = oracle(leaf, 3, **options)
        if options["score"] == "sigmoid" and options["normalize"]:
            weights = weights[:1]  # sigmoids of -200 are 0 in float32: their quotients are those of 0 by 1e-20
            assert (routing.weights[1] == 0).all()
            upstream = upstream[:1]
        weights.backward(upstream.double())
        torch.testing.assert_close(logits.grad, leaf.grad.float(), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("options", SCORES, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("extra", [{}, dict(capacity=3), dict(jitter=0.2, seed=1, step=2)], ids=str)
def test_gradcheck_runs_the_real_kernel(options, extra):
    torch.manual_seed(0)
    logits = torch.randn(9, 7, dtype=torch.float64, requires_grad=True)
    starts = torch.tensor([0, 4, 4, 8], dtype=torch.int32)

    def function(logits):
        routing = ops.route(logits, 3, balance="sequence", cu_seqlens=starts, z_loss=True, **options, **extra)
        return routing.weights, routing.balance_loss, routing.z_loss

    torch.autograd.gradcheck(function, logits)


def test_sigmoid_gradient_is_right_far_from_zero():
    """1 - sigmoid(x) cancels; the slope is computed from exp(-|x|)."""
    x = torch.linspace(-60, 60, 241).unsqueeze(1).requires_grad_()
    ops.route(x, 1, score="sigmoid", normalize=False).weights.sum().backward()
    p = torch.sigmoid(x.detach().double())
    torch.testing.assert_close(x.grad.double(), p * torch.sigmoid(-x.detach().double()), rtol=1e-6, atol=0)


def test_strided_logits_and_expanded_gradients():
    wide = torch.randn(30, 64)
    for x in (wide[:, 3:19], wide[:, ::4], wide.t()[:16].t(), wide[:1, :16].expand(30, 16), wide[::2, :16]):
        leaf, dense = x.detach().requires_grad_(), x.detach().clone().requires_grad_()
        for routing in (ops.route(leaf, 3, normalize=False), ops.route(dense, 3, normalize=False)):
            routing.weights.sum().backward()
        assert torch.equal(leaf.grad, dense.grad)
        assert torch.equal(ops.route(leaf, 3).experts, ops.route(dense, 3).experts)


@pytest.mark.parametrize("options", [
    dict(balance="micro_batch", z_loss=True), dict(capacity_factor=1.0), dict(capacity=100, drop="probability"),
    dict(score="sigmoid", balance="sequence", cu_seqlens=torch.tensor([0, 100, 1700, 1999], dtype=torch.int32)),
], ids=str)  # fmt: skip
def test_same_bits_for_any_number_of_threads(options):
    torch.manual_seed(0)
    x, upstream = torch.randn(2000, 24), torch.randn(2000, 3)
    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        leaf = x.clone().requires_grad_()
        routing = ops.route(leaf, 3, **options)
        losses = [loss for loss in (routing.balance_loss, routing.z_loss) if loss is not None]
        ((routing.weights * upstream).sum() + sum(losses)).backward()
        results.append([leaf.grad, routing.experts, routing.weights, routing.counts, routing.dropped, *losses])
    torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


def test_empty():
    logits = torch.randn(0, 8, requires_grad=True)
    routing = ops.route(logits, 2, balance="micro_batch", z_loss=True, capacity_factor=1.0)
    (routing.weights.sum() + routing.balance_loss + routing.z_loss).backward()
    assert logits.grad.shape == (0, 8) and routing.experts.shape == (0, 2)
    assert routing.counts.tolist() == [0] * 8 and routing.balance_loss == routing.z_loss == routing.dropped == 0


def test_results_share_no_memory_so_that_counts_can_be_added_up_in_place():
    routing = ops.route(torch.randn(9, 4), 2, balance="micro_batch")
    expected = routing.load.clone()
    for total in (routing.load, routing.counts):
        total += 1
    assert torch.equal(routing.load, expected + 1) and torch.equal(routing.counts, expected + 1)
    assert torch.equal(routing.balance_terms.load[0], expected)


def test_nothing_but_logits_and_experts_is_kept_for_backward():
    logits, kept = torch.randn(40, 16, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        routing = ops.route(logits, 4, z_loss=True)
    assert {t.data_ptr() for t in kept} == {logits.data_ptr(), routing.experts.data_ptr()}


# ---- padding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["mask", "number", "tensor", "cu_seqlens"])
def test_padding_changes_no_choice_count_loss_or_gradient_of_the_others(form):
    torch.manual_seed(0)
    real = torch.randn(20, 8)
    padded = torch.cat([real, torch.full((9, 8), NAN)])
    mask = torch.arange(29) < 20
    if form == "mask":  # anywhere
        order = torch.randperm(29)
        padded, mask = padded[order], mask[order]
        real = padded[mask]
    options = {
        "mask": dict(valid=mask), "number": dict(valid=20), "tensor": dict(valid=torch.tensor(20)),
        "cu_seqlens": dict(cu_seqlens=torch.tensor([0, 7, 20], dtype=torch.int32)),
    }[form]  # fmt: skip
    results = []
    for x, extra in ((real, {}), (padded, options)):
        leaf = x.clone().requires_grad_()
        routing = ops.route(leaf, 2, balance="micro_batch", z_loss=True, capacity_factor=0.7, **extra)
        (routing.weights.square().sum() + routing.balance_loss + routing.z_loss).backward()
        results.append((routing, leaf.grad))
    (alone, alone_grad), (routing, grad) = results
    assert torch.equal(routing.experts[mask], alone.experts) and (routing.experts[~mask] == -1).all()
    assert torch.equal(routing.weights[mask], alone.weights) and (routing.weights[~mask] == 0).all()
    for field in ("counts", "load", "dropped"):
        assert torch.equal(getattr(routing, field), getattr(alone, field)), field
    for field in ("balance_loss", "z_loss"):
        torch.testing.assert_close(getattr(routing, field), getattr(alone, field))
    torch.testing.assert_close(grad[mask], alone_grad)
    assert (grad[~mask] == 0).all()


# ---- random numbers, forced balance ---------------------------------------------------------------------------------


def test_noise_is_a_function_of_seed_step_and_token_id():
    torch.manual_seed(0)
    logits = torch.randn(50, 16) * 0.1

    def routed(rows=slice(None), ids=None, seed=3, step=7):
        return ops.route(logits[rows], 2, jitter=0.5, seed=seed, step=step, token_ids=ids).weights

    whole = routed()
    assert torch.equal(whole, routed())
    assert not torch.equal(whole, routed(step=8)) and not torch.equal(whole, routed(seed=4))
    halves = [routed(rows, torch.arange(50)[rows]) for rows in (slice(0, 25), slice(25, 50))]
    assert torch.equal(whole, torch.cat(halves))  # however the tokens are spread
    assert not torch.equal(whole, ops.route(logits, 2).weights)


def test_jitter_is_uniform_within_its_bounds_and_multiplies_logits_and_gradients():
    logits = torch.ones(4000, 8, dtype=torch.float64, requires_grad=True)
    routing = ops.route(logits, 8, score="sigmoid", normalize=False, jitter=0.25, seed=1, step=0)
    noise = torch.logit(routing.weights.detach())  # in the order of the noise
    assert noise.min() >= 0.75 and noise.max() <= 1.25 and abs(noise.mean() - 1) < 0.01
    assert abs(noise.std() - 0.5 / 12**0.5) < 0.01
    routing.weights.sum().backward()
    slope = routing.weights * (1 - routing.weights)
    expected = torch.zeros_like(logits).scatter(1, routing.experts.long(), (slope * noise).detach())
    torch.testing.assert_close(logits.grad, expected)


@pytest.mark.parametrize("backend", [cpu, plain], ids=["cpu", "plain"])
def test_jitter_of_1_leaves_closed_experts_closed(backend):
    """The random number of this seed, step, token and expert is 0: a factor of 0 would make NaN of -inf."""
    logits = torch.zeros(1, 8)
    logits[0, 2] = -INF
    s = settings(k=8, jitter=1.0, seed=0, step=0, slots=8)
    results = backend.route_forward(logits, None, None, None, torch.tensor([336531]), s)
    assert results.weights.isfinite().all() and results.experts[0, -1] == 2 and results.weights[0, -1] == 0


def test_a_seed_may_have_64_bits_in_a_compiled_call_too():
    """torch.initial_seed() is one."""
    logits = torch.randn(5, 8)

    def weights(x):
        return ops.route(x, 2, jitter=0.3, random_steps=9, seed=2**64 - 1, step=2).weights

    leaf = logits.clone().requires_grad_()
    compiled = torch.compile(weights, fullgraph=True, backend="aot_eager")
    assert torch.equal(weights(logits), weights(leaf)) and torch.equal(weights(logits), compiled(leaf))
    assert not torch.equal(weights(logits), ops.route(logits, 2, jitter=0.3, random_steps=9, seed=1, step=2).weights)


def test_random_routing_anneals_to_learned_routing():
    torch.manual_seed(0)
    logits = torch.zeros(8000, 8)
    logits[:, :2] = 5.0  # learned: always experts 0 and 1
    shares = []
    for step in (0, 25, 50, 75, 100, 1000):
        routing = ops.route(logits, 2, random_steps=100, seed=0, step=step)
        learned = ((routing.experts == torch.tensor([0, 1])).all(-1)).double().mean().item()
        shares.append((learned - 1 / 56) / (1 - 1 / 56))  # a random pair is (0, 1) once in 56
        assert all(len(set(row)) == 2 for row in routing.experts[:50].tolist())
        torch.testing.assert_close(
            routing.weights, torch.softmax(logits.gather(1, routing.experts.long()), -1)
        )  # the weights are the learned scores' all the same
        if step == 0:
            assert (routing.counts - 2000).abs().max() < 200
    for share, expected in zip(shares, (0, 0.25, 0.5, 0.75, 1, 1), strict=True):
        assert abs(share - expected) < 0.03
    assert shares[-2:] == [1.0, 1.0]


@pytest.mark.parametrize(("tokens", "experts", "k"), [(64, 8, 2), (65, 8, 3), (7, 16, 4)])
def test_forced_balance_gives_even_counts_and_learned_weights(tokens, experts, k):
    torch.manual_seed(0)
    logits = torch.randn(tokens, experts, dtype=torch.float64, requires_grad=True)
    routing = ops.route(logits, k, choice="balanced", normalize=False)
    assert routing.counts.max() - routing.counts.min() <= 1 and routing.counts.sum() == tokens * k
    assert all(len(set(row)) == k for row in routing.experts.tolist())
    torch.testing.assert_close(routing.weights, torch.softmax(logits, -1).gather(1, routing.experts.long()))
    halves = [
        ops.route(logits[rows], k, choice="balanced", token_ids=torch.arange(tokens)[rows]).experts
        for rows in (slice(0, 5), slice(5, None))
    ]
    assert torch.equal(torch.cat(halves), routing.experts)


# ---- torch.library, compile, other devices --------------------------------------------------------------------------

CALLS = [
    settings(k=2),
    settings(k=3, score="sigmoid", num_groups=4, topk_groups=2, score_sums=True, z_sum=True, capacity_factor=1.0),
    settings(k=2, normalize=False, capacity=3, drop_by_probability=True, jitter=0.1, random_steps=5, step=2),
]


@pytest.mark.parametrize("s", CALLS, ids=range(len(CALLS)))
def test_opcheck(s):
    torch.manual_seed(0)
    logits = torch.randn(12, 8, requires_grad=True)
    bias, valid, starts = torch.randn(8), torch.rand(12) < 0.8, torch.tensor([0, 5, 11])
    for tensors in ((None, None, None, None), (bias, valid, starts, torch.arange(12))):
        torch.library.opcheck(torch.ops.pyfast.route.default, (logits, *tensors, *s))
        results = cpu.route_forward(logits.detach(), *tensors, s)
        chosen = results.chosen if s.limited else results.experts
        sums = (torch.ones_like(results.score_sums), torch.ones(())) if s.score_sums else (None, None)
        arguments = (results.weights, *sums, logits.detach(), chosen, *tensors[1:], *s)
        torch.library.opcheck(torch.ops.pyfast.route_backward.default, arguments)


@pytest.mark.parametrize("per_document", [True, False])
def test_opcheck_of_the_scopes(per_document):
    cu_seqlens = torch.tensor([0, 3, 5], dtype=torch.int32)
    torch.library.opcheck(torch.ops.pyfast.route_scopes.default, (cu_seqlens, 6, per_document))


def test_second_derivatives_are_refused():
    logits = torch.randn(4, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(ops.route(logits, 2).weights.square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives of route"):
        grad.sum().backward()
    assert _backward_op.name == "route_backward"


def test_fullgraph_compile():
    torch.manual_seed(0)
    logits, bias = torch.randn(40, 8, requires_grad=True), torch.randn(8)
    starts = torch.tensor([0, 11, 37], dtype=torch.int32)

    def function(logits):
        routing = ops.route(
            logits, 2, score="sigmoid", bias=bias, num_groups=4, topk_groups=2, cu_seqlens=starts, balance="sequence",
            z_loss=True, capacity_factor=1.2, valid=30,
        )  # fmt: skip
        loss = routing.weights.square().sum() + routing.balance_loss + routing.z_loss
        return loss, routing.experts, routing.counts, routing.dropped

    expected = function(logits)
    actual = torch.compile(function, fullgraph=True, backend="aot_eager")(logits)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)
    (grad,) = torch.autograd.grad(actual[0], logits)
    torch.testing.assert_close(grad, torch.autograd.grad(expected[0], logits)[0])


@pytest.mark.parametrize("seed", range(40))
def test_plain_backend_agrees(seed):
    """Any combination of options; the plain one is also the reference, written apart from the kernel."""
    torch.manual_seed(seed)
    pick = lambda *values: values[int(torch.randint(len(values), ()))]  # noqa: E731
    groups = pick(1, 1, 4)
    tokens, experts, top_groups = pick(1, 33, 700), groups * pick(4, 8, 17), pick(1, 1, groups)
    dtype = pick(*DTYPES)
    logits = (torch.randn(tokens, experts) * 3).to(dtype)
    starts = pick(None, torch.randint(0, tokens + 1, (pick(1, 4),)).sort().values)
    tensors = (pick(None, torch.randn(experts)), pick(None, torch.rand(tokens) < 0.8), starts,
               pick(None, torch.randperm(9 * tokens)[:tokens]))  # fmt: skip
    capacity = pick((-1, 0.0), (7, 0.0), (-1, 1.1))
    s = settings(
        k=pick(1, 2, 4), score=pick("softmax", "softmax_chosen", "sigmoid"), normalize=pick(True, False), scale=2.5,
        num_groups=groups, topk_groups=top_groups, group_top2=pick(True, False), jitter=pick(0.0, 0.1),
        random_steps=pick(0, 10), seed=seed, step=4, capacity=capacity[0], capacity_factor=capacity[1],
        drop_by_probability=pick(True, False), score_sums=pick(True, False), z_sum=pick(True, False),
    )  # fmt: skip
    s = s._replace(slots=s.k)
    actual, expected = (module.route_forward(logits, *tensors, s) for module in (cpu, plain))
    tolerance = dict(rtol=1e-11, atol=1e-11) if dtype == torch.float64 else dict(rtol=3e-5, atol=3e-5)
    for field, a, b in zip(actual._fields, actual, expected, strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, f=field: f"{f}: {m}", **tolerance)
    dscores = torch.randn_like(actual.score_sums) if s.score_sums else None
    dz = torch.randn_like(actual.z_sum) if s.z_sum else None
    chosen = actual.chosen if s.limited else actual.experts
    arguments = (torch.randn_like(actual.weights), dscores, dz, logits, chosen, *tensors[1:], s)
    rtol = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(cpu.route_backward(*arguments), plain.route_backward(*arguments), rtol=rtol, atol=rtol)


# ---- transformers ---------------------------------------------------------------------------------------------------


def transformers_routing(name: str, dtype):
    """(router logits, weights, experts, number of experts, k, options of ours)."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    hidden = torch.randn(64, 32, dtype=dtype)
    if name == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter as Router

        config, options = transformers.MixtralConfig(hidden_size=32, num_local_experts=8, num_experts_per_tok=2), {}
    elif name.startswith("qwen3"):
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter as Router

        normalize = name.endswith("normalized")
        config = transformers.Qwen3MoeConfig(
            hidden_size=32, num_experts=64, num_experts_per_tok=8, norm_topk_prob=normalize
        )  # fmt: skip
        options = dict(normalize=normalize)
    else:
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter as Router

        config = transformers.DeepseekV3Config(
            hidden_size=32, n_routed_experts=64, num_experts_per_tok=6, n_group=8, topk_group=3,
            routed_scaling_factor=2.5, norm_topk_prob=True,
        )  # fmt: skip
        options = dict(score="sigmoid", scale=2.5, num_groups=8, topk_groups=3)
    router = Router(config).to(dtype)
    torch.nn.init.normal_(router.weight)
    if name == "deepseek_v3":
        if not hasattr(router, "routed_scaling_factor"):
            pytest.skip("this version of transformers chooses experts outside of the router")
        torch.nn.init.normal_(router.e_score_correction_bias, std=0.1)
        options["bias"] = router.e_score_correction_bias.float()
    return *router(hidden), config.num_experts_per_tok, options


@pytest.mark.parametrize("name", ["mixtral", "qwen3", "qwen3 normalized", "deepseek_v3"])
def test_equals_the_router_of_transformers(name):
    try:
        logits, weights, experts, k, options = transformers_routing(name, torch.float32)
    except ImportError as error:
        pytest.skip(f"this version of transformers has no such router: {error}")
    routing = ops.route(logits, k, **options)
    # theirs are in no particular order when unsorted: compare weights by expert
    dense = torch.zeros(2, *logits.shape)
    for into, (e, w) in zip(dense, ((experts, weights), (routing.experts.long(), routing.weights)), strict=True):
        into.scatter_(1, e, w.detach())
    torch.testing.assert_close(dense[1], dense[0])
    upstream = torch.randn_like(dense[0])
    gradients = [
        torch.autograd.grad((w * upstream.gather(1, e)).sum(), logits, retain_graph=True)[0]
        for e, w in ((experts, weights), (routing.experts.long(), routing.weights))
    ]
    torch.testing.assert_close(gradients[1], gradients[0])


# ---- errors ---------------------------------------------------------------------------------------------------------

X = torch.randn(6, 8)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(logits=torch.ones(6, 8, dtype=torch.int32)), TypeError, "logits has dtype"),
        (dict(logits=torch.randn(2, 6, 8)), ValueError, "logits has shape"),
        (dict(logits=torch.randn(6, 0)), ValueError, "logits has shape"),
        (dict(k=0), ValueError, "k is 0; an integer from 1 to 8, the number of experts"),
        (dict(k=9), ValueError, "k is 9"),
        (dict(k=2.0), TypeError, "k is 2.0"),
        (dict(score="linear"), ValueError, "score is 'linear'; allowed are 'softmax', 'sigmoid'"),
        (dict(softmax_over="some"), ValueError, "softmax_over is 'some'"),
        (dict(score="sigmoid", softmax_over="chosen"), ValueError, "softmax_over is 'chosen'"),
        (dict(scale=-1), ValueError, "scale is -1"),
        (dict(bias=torch.zeros(7)), ValueError, "bias has shape"),
        (dict(bias=torch.zeros(8, dtype=torch.bfloat16)), TypeError, "bias is torch.bfloat16; a float32 .*keep it"),
        (dict(bias=torch.zeros(8, requires_grad=True)), ValueError, "bias requires a gradient"),
        (dict(bias=torch.zeros(8), choice="balanced"), ValueError, "bias is given with choice 'balanced'"),
        (dict(num_groups=3), ValueError, "num_groups is 3, which does not divide"),
        (dict(num_groups=4, topk_groups=5), ValueError, "topk_groups is 5"),
        (dict(k=3, num_groups=4, topk_groups=1), ValueError, "1 groups of 2 experts are fewer than k = 3"),
        (dict(num_groups=8, topk_groups=4), ValueError, "group_score is 'top2' with 8 groups of one expert"),
        (dict(num_groups=2, topk_groups=1, choice="balanced"), ValueError, "num_groups is 2 with choice"),
        (dict(group_score="sum"), ValueError, "group_score is 'sum'"),
        (dict(valid=7), ValueError, "valid is 7"),
        (dict(valid=torch.ones(6)), ValueError, "valid has shape .* it must be bool"),
        (dict(valid="all"), TypeError, "valid is 'all'"),
        (dict(cu_seqlens=torch.tensor([0, 3])), TypeError, "cu_seqlens is torch.int64"),
        (dict(cu_seqlens=torch.tensor([0, 7], dtype=torch.int32)), ValueError, "cu_seqlens is .*0..6"),
        (dict(cu_seqlens=torch.tensor([4, 2], dtype=torch.int32)), ValueError, "cu_seqlens is"),
        (dict(cu_seqlens=torch.tensor([0, 4, 2, 6], dtype=torch.int32)), ValueError, "cu_seqlens is"),
        (dict(cu_seqlens=torch.tensor([0, 7, 6], dtype=torch.int32)), ValueError, "cu_seqlens is"),
        (dict(token_ids=torch.arange(5)), ValueError, "token_ids has shape"),
        (dict(token_ids=torch.arange(6).int()), TypeError, "token_ids is torch.int32"),
        (dict(capacity=-1), ValueError, "capacity is -1"),
        (dict(capacity=2**63), ValueError, "capacity is 9223372036854775808; an integer from 0 to"),
        (dict(capacity=True), TypeError, "capacity is True"),
        (dict(capacity=1, capacity_factor=1.0), ValueError, "both given"),
        (dict(capacity_factor=0), ValueError, "capacity_factor is 0; it must be above 0"),
        (dict(drop="random"), ValueError, "drop is 'random'"),
        (dict(choice="tokens"), ValueError, "choice is 'tokens'"),
        (dict(slots=2), ValueError, "slots is 2"),
        (dict(jitter=0.1, step=0), ValueError, "seed is missing"),
        (dict(random_steps=10, seed=0), ValueError, "step is missing"),
        (dict(jitter=1.5, seed=0, step=0), ValueError, "jitter is 1.5"),
        (dict(random_steps=10, seed=0, step=-1), ValueError, "step is -1"),
        (dict(random_steps=10, seed=0, step=2**63), ValueError, "step is 9223372036854775808"),
        (dict(random_steps=2**63, seed=0, step=0), ValueError, "random_steps is 9223372036854775808"),
        (dict(jitter=0.1, seed=2**64, step=0), ValueError, "seed is 18446744073709551616"),
        (dict(normalize="no"), TypeError, "normalize is 'no'; True or False"),
        (dict(z_loss=1e-3), TypeError, "z_loss is 0.001; True or False"),
        (dict(scale=1e39), ValueError, "scale is 1e.39; a finite number of at least 0 and at most 3.4"),
        (dict(random_steps=10, seed=0, step=0, choice="balanced"), ValueError, "random_steps is 10"),
        (dict(balance="layer"), ValueError, "balance is 'layer'; allowed are 'sequence', 'micro_batch'"),
        (dict(balance="sequence"), ValueError, "without cu_seqlens"),
        (dict(balance="global_batch"), ValueError, "give global_load and global_valid_tokens, or the group"),
        (dict(global_load=torch.zeros(8).long()), ValueError, "global_load is given without balance"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_bad_arguments_are_named(arguments, error, words):
    with pytest.raises(error, match=words):
        ops.route(**dict(logits=X, k=2) | arguments)


def test_every_combination_of_options_gives_a_valid_routing():
    """Invariants that hold whatever is asked for."""
    torch.manual_seed(0)
    logits = torch.randn(40, 8)
    for score, drop, capacity, choice in itertools.product(
        ("softmax", "sigmoid"), ("position", "probability"), (None, 0, 4), ("top_k", "balanced")
    ):
        routing = ops.route(logits, 3, score=score, drop=drop, capacity=capacity, choice=choice, valid=35)
        kept = routing.experts >= 0
        assert torch.equal(routing.counts, torch.bincount(routing.experts[kept], minlength=8))
        assert routing.load.sum() == 35 * 3 and routing.dropped == routing.load.sum() - kept.sum()
        assert (routing.weights[~kept] == 0).all() and (routing.weights[kept] > 0).all()
        if capacity is not None:
            assert routing.counts.max() <= capacity


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sigmoids_that_all_vanish_are_divided_by_their_sum_and_1e_20(dtype):
    """As DeepSeek-V3 does: far from every expert a token weighs next to nothing, not one half each."""
    logits = torch.tensor([[-60.0, -60.5, -70.0], [-45.0, -46.0, -90.0]], dtype=dtype, requires_grad=True)
    weights = ops.route(logits, 2, score="sigmoid").weights
    wide = logits.detach().double().requires_grad_()
    p = torch.sigmoid(wide[:, :2])
    expected = p / (p.sum(-1, keepdim=True) + 1e-20)
    assert expected[0].sum() < 1e-5 < expected[1].sum()
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=0)
    (grad,) = torch.autograd.grad(weights[:, 0].sum(), logits)
    (expected_grad,) = torch.autograd.grad(expected[:, 0].sum(), wide)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-4, atol=1e-12)
