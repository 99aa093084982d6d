"""The auxiliary losses of ops.route, ops.balance_loss, ops.update_bias: formulas, and equality in every layout."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pyfast import ops
from pyfast.comm import Group

T, E, K = 60, 8, 3
DOCUMENTS = [0, 7, 7, 40, 55]  # one is empty; 55..59 are padding


def logits_of(seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    torch.manual_seed(seed)
    return (torch.randn(T, E, dtype=torch.float64) * 2).to(dtype)


def switch_loss(x: torch.Tensor, score: str) -> torch.Tensor:
    """n E sum_e f_e P_e over the n rows of x by torch's own ops: f_e the share of slots, P_e the mean probability."""
    p = torch.sigmoid(x) if score == "sigmoid" else torch.softmax(x, -1)
    p = p / p.sum(-1, keepdim=True)
    slots = torch.bincount(p.topk(K, -1).indices.flatten(), minlength=E)
    return x.shape[0] * E * (slots / (K * x.shape[0]) * p.mean(0)).sum()


def cu_seqlens() -> torch.Tensor:
    return torch.tensor(DOCUMENTS, dtype=torch.int32)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("balance", ["sequence", "micro_batch"])
def test_balance_loss_is_that_of_switch_transformers_times_the_number_of_tokens(balance, score):
    leaf, leaf64 = (logits_of().requires_grad_() for _ in range(2))
    routing = ops.route(leaf, K, score=score, balance=balance, cu_seqlens=cu_seqlens())
    if balance == "sequence":
        pieces = zip(DOCUMENTS[:-1], DOCUMENTS[1:], strict=True)
        expected = sum(switch_loss(leaf64[a:b], score) for a, b in pieces if b > a)
    else:
        expected = switch_loss(leaf64[:55], score)
    torch.testing.assert_close(routing.balance_loss, expected)
    routing.balance_loss.backward()
    expected.backward()
    torch.testing.assert_close(leaf.grad, leaf64.grad)
    assert routing.balance_loss.dtype == torch.float64


def test_even_routing_costs_1_a_token():
    logits = torch.zeros(40, E)
    assert ops.route(logits, K, choice="balanced", balance="micro_batch").balance_loss == pytest.approx(40)


def test_equals_transformers_loss_times_tokens_over_k():
    """transformers counts each of the K slots as a whole token."""
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    leaf, theirs = (logits_of(dtype=torch.float32).requires_grad_() for _ in range(2))
    loss = ops.route(leaf, K, balance="micro_batch").balance_loss
    expected = mixtral.load_balancing_loss_func((theirs,), E, K) * T / K
    torch.testing.assert_close(loss, expected)
    loss.backward(), expected.backward()
    torch.testing.assert_close(leaf.grad, theirs.grad)
    mask = torch.ones(1, T, dtype=torch.int64)
    mask[:, 50:] = 0
    expected = mixtral.load_balancing_loss_func((theirs,), E, K, mask) * 50 / K
    torch.testing.assert_close(ops.route(leaf, K, balance="micro_batch", valid=50).balance_loss, expected)


def test_z_loss_is_the_sum_of_squared_log_sum_exps():
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
        leaf = logits_of(dtype=dtype).requires_grad_()
        for score in ("softmax", "sigmoid"):
            leaf64, leaf.grad = leaf.detach().double().requires_grad_(), None
            loss = ops.route(leaf, K, score=score, z_loss=True, valid=50).z_loss
            expected = torch.logsumexp(leaf64[:50], -1).square().sum()
            (3 * loss).backward(), (3 * expected).backward()
            assert abs(loss.item() / expected.item() - 1) < 1e-6
            error = (leaf.grad.double() - leaf64.grad).norm() / leaf64.grad.norm()
            assert error < tolerance


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_global_loss_is_the_same_however_tokens_are_cut(score):
    """Data and context parallelism, accumulation: the shares of the calls add up, gradients too, in any cut."""
    whole = logits_of().requires_grad_()
    first = ops.route(whole, K, score=score, balance="micro_batch", z_loss=True)
    (first.balance_loss + first.z_loss).backward()
    for cuts in ([0, 60], [0, 1, 60], [0, 13, 13, 29, 50, 60], list(range(61))):
        leaf, losses = logits_of().requires_grad_(), []
        for a, b in zip(cuts[:-1], cuts[1:], strict=True):
            routing = ops.route(
                leaf[a:b], K, score=score, balance="global_batch", global_load=first.load,
                global_valid_tokens=torch.tensor(T), z_loss=True,
            )  # fmt: skip
            losses += [routing.balance_loss, routing.z_loss]
        sum(losses).backward()
        torch.testing.assert_close(sum(losses), (first.balance_loss + first.z_loss).detach())
        torch.testing.assert_close(leaf.grad, whole.grad)


def test_the_sequence_loss_is_the_same_for_any_accumulation_of_whole_documents():
    whole = logits_of().requires_grad_()
    ops.route(whole, K, balance="sequence", cu_seqlens=cu_seqlens()).balance_loss.backward()
    leaf = logits_of().requires_grad_()
    for documents in ([0, 7, 7], [7, 40], [40, 55]):
        start = documents[0]
        starts = torch.tensor(documents, dtype=torch.int32) - start
        ops.route(leaf[start : documents[-1]], K, balance="sequence", cu_seqlens=starts).balance_loss.backward()
    torch.testing.assert_close(leaf.grad, whole.grad)


def test_layers_are_apart_and_nothing_is_remembered():
    """Recomputation and other layers change nothing: every call stands for itself."""
    first = ops.route(logits_of(0), K, balance="micro_batch", z_loss=True)
    ops.route(logits_of(1), K, balance="micro_batch", z_loss=True)
    again = ops.route(logits_of(0), K, balance="micro_batch", z_loss=True)
    for field in ("balance_loss", "z_loss", "counts", "load"):
        assert torch.equal(getattr(first, field), getattr(again, field))
    leaf = logits_of().requires_grad_()

    def layer(x):
        routing = ops.route(x, K, balance="micro_batch")
        loads.append(routing.load)
        return routing.balance_loss.square()  # needs its factor again: recomputation gets this far

    loads: list[torch.Tensor] = []
    torch.utils.checkpoint.checkpoint(layer, leaf, use_reentrant=False).backward()
    assert len(loads) == 2 and torch.equal(loads[0], loads[1])  # computed twice, and not added up
    other = logits_of().requires_grad_()
    ops.route(other, K, balance="micro_batch").balance_loss.square().backward()
    assert torch.equal(leaf.grad, other.grad)


# ---- over ranks -----------------------------------------------------------------------------------------------------

CUTS = {2: [0, 23, 60], 3: [0, 11, 11, 60]}  # a rank without tokens


def share_of_a_rank(rank, world_size, balance):
    group, cuts = Group.wrap(dist.group.WORLD, "dp"), CUTS[world_size]
    leaf, rows = logits_of().requires_grad_(), slice(cuts[rank], cuts[rank + 1])
    options = {}
    if balance == "sequence":  # the pieces of each document on this rank
        starts = [min(max(s - rows.start, 0), rows.stop - rows.start) for s in DOCUMENTS]
        options["cu_seqlens"] = torch.tensor(starts, dtype=torch.int32)
    routing = ops.route(leaf[rows], K, balance=balance, group=group, **options)
    routing.balance_loss.backward()
    return routing.balance_loss.detach(), leaf.grad, routing.load


@pytest.mark.parametrize("balance", ["global_batch", "micro_batch", "sequence"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_shares_of_the_ranks_add_up_to_one_process(world_size, balance, ranks):
    whole = logits_of().requires_grad_()
    kind, options = ("sequence", dict(cu_seqlens=cu_seqlens())) if balance == "sequence" else ("micro_batch", {})
    routing = ops.route(whole, K, balance=kind, **options)
    routing.balance_loss.backward()
    losses, grads, loads = zip(*ranks.run(share_of_a_rank, world_size, balance), strict=True)
    torch.testing.assert_close(sum(losses), routing.balance_loss.detach())
    torch.testing.assert_close(sum(grads), whole.grad)
    assert torch.equal(sum(loads), routing.load)  # what update_bias wants is such a sum


# ---- balance_loss and update_bias by themselves ---------------------------------------------------------------------


def test_balance_loss_of_the_terms_is_what_route_returns():
    leaf = logits_of().requires_grad_()
    routing = ops.route(leaf, K, balance="sequence", cu_seqlens=cu_seqlens())
    assert torch.equal(ops.balance_loss(routing.balance_terms, K), routing.balance_loss)
    doubled = ops.balance_loss(
        routing.balance_terms, K, load=2 * routing.balance_terms.load,
        valid_tokens=2 * routing.balance_terms.valid_tokens,
    )  # fmt: skip
    torch.testing.assert_close(doubled, routing.balance_loss)  # only shares of the load matter


def test_balance_loss_compiles():
    leaf = logits_of().requires_grad_()
    terms = ops.route(leaf, K, balance="micro_batch").balance_terms
    compiled = torch.compile(lambda t: ops.balance_loss(t, K), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(terms), ops.balance_loss(terms, K))
    bias = torch.zeros(E)
    torch.compile(ops.update_bias, fullgraph=True, backend="aot_eager")(bias, torch.arange(E), 0.5)
    assert torch.equal(bias, ops.update_bias(torch.zeros(E), torch.arange(E), 0.5))


def sum_on_a_rank(rank, world_size):
    counts = torch.arange(4).view(1, 4)
    torch.library.opcheck(
        torch.ops.pyfast.sum_counts_over_group.default, (counts, dist.group.WORLD.group_name, "counts")
    )
    return True


def test_opcheck_of_the_sum_over_ranks(ranks):
    assert all(ranks.run(sum_on_a_rank, 2))


def test_update_bias_has_the_sign_of_deepseek_v3_and_counts_exactly():
    bias = torch.full((4,), 0.5)
    counts = torch.tensor([3, 1, 2, 2])
    assert ops.update_bias(bias, counts, 0.25) is bias
    assert bias.tolist() == [0.25, 0.75, 0.5, 0.5]  # overloaded: down, underloaded: up, at the mean: stays
    big = torch.tensor([2**53 + 1, 2**53 - 1, 2**53, 2**53])  # float64 could not tell them from the mean
    assert ops.update_bias(torch.zeros(4), big, 1.0).tolist() == [-1.0, 1.0, 0.0, 0.0]
    assert ops.update_bias(torch.zeros(3), torch.tensor([1, 0, 0], dtype=torch.int32), 1.0).tolist() == [-1, 1, 1]
    assert ops.update_bias(torch.ones(3), torch.zeros(3).long(), 1.0).tolist() == [1, 1, 1]


def test_update_bias_evens_out_the_load():
    torch.manual_seed(0)
    logits, bias = torch.randn(2000, 8) + torch.linspace(0, 2, 8), torch.zeros(8)
    spread = []
    for _ in range(200):
        load = ops.route(logits, 2, score="sigmoid", bias=bias).load
        spread.append((load.max() - load.min()).item())
        ops.update_bias(bias, load, 0.005)
    assert spread[-1] < spread[0] / 10


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda t: ops.balance_loss(t, 0), ValueError, "k is 0"),
        (lambda t: ops.balance_loss(t, 2.0), TypeError, "k is 2.0"),
        (lambda t: ops.balance_loss(None, K), TypeError, "terms is a NoneType; Routing.balance_terms"),
        (lambda t: ops.balance_loss(tuple(t), K), TypeError, "terms is a tuple"),
        (lambda t: ops.balance_loss(t._replace(score_sums=t.score_sums[0]), K), ValueError, "terms.score_sums has sh"),
        (lambda t: ops.balance_loss(t._replace(load=t.load[:, :3]), K), ValueError, "terms.load has shape"),
        (lambda t: ops.balance_loss(t._replace(load=t.load.float()), K), TypeError, "terms.load is torch.float32"),
        (lambda t: ops.balance_loss(t._replace(valid_tokens=t.load[0]), K), ValueError, "terms.valid_tokens has shape"),
        (lambda t: ops.balance_loss(t, K, load=t.load), ValueError, "valid_tokens is missing"),
        (lambda t: ops.balance_loss(t, K, valid_tokens=t.valid_tokens), ValueError, "load is missing"),
        (lambda t: ops.balance_loss(t, K, load=t.load.float(), valid_tokens=t.valid_tokens), TypeError,
         "load is torch.float32; an integer tensor"),
        (lambda t: ops.balance_loss(t, K, load=t.load[:, :3], valid_tokens=t.valid_tokens), ValueError,
         "load has shape"),
        (lambda t: ops.balance_loss(t, K, load=t.load, valid_tokens=t.valid_tokens, group=Group.single()), ValueError,
         "group and load are both given"),
        (lambda t: ops.update_bias(torch.zeros(E).bfloat16(), t.load[0], 0.1), TypeError, "bias is torch.bfloat16"),
        (lambda t: ops.update_bias(torch.zeros(E), t.load[0].float(), 0.1), TypeError, "counts is torch.float32"),
        (lambda t: ops.update_bias(torch.zeros(E), t.load[0, :4], 0.1), ValueError, "bias has shape"),
        (lambda t: ops.update_bias(torch.zeros(E), t.load, 0.1), ValueError, r"counts has shape \(1, 8\)"),
        (lambda t: ops.update_bias(torch.zeros(E), None, 0.1), TypeError, "counts is NoneType"),
        (lambda t: ops.update_bias(torch.zeros(E), t.load[0].to("meta"), 0.1), ValueError,
         "bias is on cpu, counts on meta"),
        (lambda t: ops.update_bias(torch.zeros(E), t.load[0], -0.1), ValueError, "rate is -0.1"),
        (lambda t: ops.update_bias(torch.zeros(E), t.load[0], 1e39), ValueError, "rate is 1e.39"),
        (lambda t: ops.update_bias(torch.zeros(E, requires_grad=True), t.load[0], 0.1), ValueError, "Make it a buffer"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(call, error, words):
    terms = ops.route(logits_of(), K, balance="micro_batch").balance_terms
    with pytest.raises(error, match=words):
        call(terms)
