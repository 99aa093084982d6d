"""all_gather_matmul, matmul_reduce_scatter and matmul_all_reduce on 2, 3 and 4 ranks against dense float64 products."""

from __future__ import annotations

import os
import time

import pytest
import torch

from pyfast import ops
from pyfast.comm import Group, record
from pyfast.ops.overlap import explain_transport

TRANSPORTS = ("shared_memory", "collective")


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def part(full, lengths, rank, dim):
    return full.split(list(lengths), dim)[rank].clone()


def close(got, want, dtype=torch.float64):
    scale = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
    assert got.dtype == dtype and got.shape == want.shape
    assert (got.double() - want.double()).norm() <= scale * want.double().norm() + 1e-30


def grads(out, inputs, upstream):
    return torch.autograd.grad(out, inputs, upstream)


# --- the three ops against dense products -----------------------------------------------------------------------------

LENGTHS = {2: [(4, 4), (0, 5)], 3: [(7, 1, 4)], 4: [(5, 3, 0, 9)]}


def gather_case(rank, world_size, dtype, transport, dim, lengths, depth, widths):
    """Two weights with unequal outputs on each rank, one with a bias; the gathered x is used too."""
    group = Group.create("tp", range(world_size), rank=rank, timeout_s=30)
    shape = [2, 3]
    shape.insert(dim, sum(lengths))
    x_full = normal(*shape, depth, seed=1, dtype=dtype)
    w, v = (normal(width + rank, depth, seed=10 + rank + width, dtype=dtype) for width in widths)
    b = normal(w.shape[0], seed=20 + rank, dtype=dtype)
    x = part(x_full, lengths, rank, dim).transpose(0, 1).contiguous().transpose(0, 1)  # strides of another order
    inputs = [t.requires_grad_() for t in (x, w, v, b)]
    y, z, whole = ops.all_gather_matmul(
        x, [w, v], group, bias=[b, None], dim=dim, return_gathered=True, transport=transport
    )  # fmt: skip
    up = [normal(*t.shape, seed=30 + rank + i, dtype=dtype) for i, t in enumerate((y, z, whole))]
    got = [y, z, whole, *grads((y, z, whole), inputs, up)]
    # dense: every rank's weights act on the whole x; the gradient of x is their sum
    xd, wd, vd, bd = (t.detach().double().requires_grad_() for t in (x_full, w, v, b))
    dense = (xd @ wd.t() + bd, xd @ vd.t(), xd * 1)
    dx, *rest = grads(dense, (xd, wd, vd, bd), [u.double() for u in up])
    group.all_reduce(dx, name="dense")
    for a, e in zip(got, [*dense, part(dx, lengths, rank, dim), *rest], strict=True):
        close(a, e, dtype)
    return whole.detach()


def scatter_case(rank, world_size, dtype, transport, dim, lengths, depth, width):
    group = Group.create("tp", range(world_size), rank=rank, timeout_s=30)
    shape = [2, 3]
    shape.insert(dim, sum(lengths))
    x, w = (normal(*s, depth + rank, seed=rank + i, dtype=dtype) for i, s in enumerate((shape, [width])))
    b = normal(width, seed=5, dtype=dtype)
    x = x.transpose(0, 1).contiguous().transpose(0, 1)
    inputs = [t.requires_grad_() for t in (x, w, b)]
    y = ops.matmul_reduce_scatter(x, w, group, bias=b, dim=dim, rows=lengths, transport=transport)
    up_full = normal(*shape, width, seed=40, dtype=dtype)
    dx, dw, db = grads(y, inputs, part(up_full, lengths, rank, dim))
    xd, wd = (t.detach().double().requires_grad_() for t in (x, w))
    total = xd @ wd.t()
    want_dx, want_dw = grads(total, (xd, wd), up_full.double())
    group.all_reduce(total.detach(), name="dense", out=(dense := torch.empty_like(total)))
    close(y, part(dense + b.detach().double(), lengths, rank, dim), dtype)
    close(dx, want_dx, dtype)
    close(dw, want_dw, dtype)
    db = db.double()
    group.all_reduce(db, name="bias")  # of one's own rows: summed by the parameter's Layout
    close(db.to(dtype), up_full.double().flatten(0, -2).sum(0), dtype)


def reduce_case(rank, world_size, dtype, transport, lengths, depth, width):
    group = Group.create("tp", range(world_size), rank=rank, timeout_s=30)
    x, w = (normal(n, depth + rank, seed=rank + i, dtype=dtype) for i, n in enumerate((sum(lengths) + 1, width)))
    b = normal(width, seed=5, dtype=dtype)
    inputs = [t.requires_grad_() for t in (x, w, b)]
    y = ops.matmul_all_reduce(x, w, group, bias=b, transport=transport)
    up = normal(*y.shape, seed=40, dtype=dtype)
    dx, dw, db = grads(y, inputs, up)
    xd, wd = (t.detach().double().requires_grad_() for t in (x, w))
    total = xd @ wd.t()
    want_dx, want_dw = grads(total, (xd, wd), up.double())
    group.all_reduce(total.detach(), name="dense", out=(dense := torch.empty_like(total)))
    close(y, dense + b.detach().double(), dtype)
    for a, e in ((dx, want_dx), (dw, want_dw), (db, up.double().sum(0))):
        close(a, e, dtype)
    return y.detach()


def every_case(rank, world_size, transport):
    """Prime sizes, uneven and empty shards, every dim, every dtype, and sizes at which the packed product is used."""
    for lengths in LENGTHS[world_size]:
        for dim in (0, 1, 2):
            gather_case(rank, world_size, torch.float64, transport, dim, lengths, 7, (5, 11))
            scatter_case(rank, world_size, torch.float64, transport, dim, lengths, 5, 13)
        reduce_case(rank, world_size, torch.float64, transport, lengths, 5, 13)
    lengths = LENGTHS[world_size][-1]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        gather_case(rank, world_size, dtype, transport, 1, lengths, 17, (8, 11))
        scatter_case(rank, world_size, dtype, transport, 1, lengths, 17, 19)
        reduce_case(rank, world_size, dtype, transport, lengths, 17, 19)
    large = tuple(40 * length for length in lengths)
    gather_case(rank, world_size, torch.float32, transport, 1, large, 67, (64, 71))
    scatter_case(rank, world_size, torch.float32, transport, 1, large, 67, 71)
    return reduce_case(rank, world_size, torch.float32, transport, large, 67, 131)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_values_and_gradients_equal_dense_products(ranks, world_size, transport):
    first, *others = ranks.run(every_case, world_size, transport)
    assert all(torch.equal(first, other) for other in others), "an all-reduce gives the same bits on every rank"


@pytest.mark.parametrize("dim", [0, 1])
def test_one_rank_is_a_linear_layer(dim):
    x, w, b = normal(3, 4, 5).requires_grad_(), normal(6, 5, seed=1), normal(6, seed=2)
    want = torch.nn.functional.linear(x, w, b)
    want_dx = want.detach() @ w
    group = Group.single()
    for out in (
        ops.all_gather_matmul(x, w, group, bias=b, dim=dim),
        ops.matmul_reduce_scatter(x, w, group, bias=b, dim=dim),
        ops.matmul_all_reduce(x, w, group, bias=b),
    ):
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(grads(out, x, want.detach())[0], want_dx)


# --- what is sent, and when it is not ---------------------------------------------------------------------------------


def counted(rank, world_size, transport):
    group = Group.create("tp", range(world_size), rank=rank, timeout_s=30)
    seen = {}

    def run(label, op, x, w, **options):
        for t in (x, w):
            t.grad = None
        out = op(x, w, group, transport=transport, **options)
        with record() as events:
            out.sum().backward()
        seen[label] = [event.operation for event in events if event.name != "agree on shapes"]
        return x.grad, w.grad

    for op in (ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce):
        x, w = normal(6, 5), normal(4, 5, seed=1)
        both = run(f"{op.__name__} both", op, x.requires_grad_(), w.requires_grad_())
        dx, none = run(f"{op.__name__} frozen weight", op, x, w.requires_grad_(False))
        assert none is None and torch.equal(dx, both[0])
        none, dw = run(f"{op.__name__} input without gradient", op, x.requires_grad_(False), w.requires_grad_())
        assert none is None and torch.equal(dw, both[1])
    return seen


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_frozen_weights_and_inputs_skip_their_collectives(ranks, transport):
    shared = transport == "shared_memory"
    scatter = ["matmul_reduce_scatter" if shared else "reduce_scatter"]
    for seen in ranks.run(counted, 2, transport):
        assert seen == {
            "all_gather_matmul both": ["all_gather", *scatter],
            "all_gather_matmul frozen weight": scatter,
            "all_gather_matmul input without gradient": ["all_gather"],
            "matmul_reduce_scatter both": ["all_gather_matmul" if shared else "all_gather"],
            "matmul_reduce_scatter frozen weight": ["all_gather_matmul" if shared else "all_gather"],
            "matmul_reduce_scatter input without gradient": ["all_gather"],
            "matmul_all_reduce both": [],
            "matmul_all_reduce frozen weight": [],
            "matmul_all_reduce input without gradient": [],
        }


def accumulated(rank, world_size, op_name, dtype):
    """main_grad, at once and deferred, against the gradient that autograd gets."""
    op = getattr(ops, op_name)
    group = Group.create("tp", range(world_size), rank=rank, timeout_s=30)
    x, w = normal(6, 5, seed=rank, dtype=dtype), normal(4, 5, seed=9 + rank, dtype=dtype).requires_grad_()
    y = op(x, w, group)
    up = normal(*y.shape, seed=rank, dtype=dtype)
    y.backward(up)
    main = torch.full((4, 5), 7.0, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    later, work, want = main.clone(), [], w.grad + 7.0
    w.grad = None
    op(x, w, group, main_grad=main).backward(up)
    op(x, w, group, main_grad=later, defer=work.append).backward(up)
    assert w.grad is None and (later == 7.0).all() and len(work) == 1
    work[0]()
    assert torch.equal(main, later)
    torch.testing.assert_close(main, want.to(main.dtype), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_weight_gradients_go_into_main_grad_now_or_later(ranks, op):
    for dtype in (torch.float64, torch.bfloat16):
        ranks.run(accumulated, 2, op, dtype)


# --- calls in a row, late ranks, inputs that change -------------------------------------------------------------------


def many_calls(rank, world_size):
    """Changing rows, no barrier, ranks late in turn, inputs overwritten as soon as a call has returned."""
    group = Group.create("tp", range(world_size), rank=rank, timeout_s=30)
    w, v = normal(9, 6, seed=rank + 1), normal(6, 9, seed=rank + 7)
    full_w = torch.cat(group.all_gather_object(w, name="w"))
    full_v = torch.cat(group.all_gather_object(v, name="v"), 1)
    for step, rows in enumerate((7, 64, 1, 64, 200, 0, 3)):
        if step % world_size == rank:
            time.sleep(0.15)
        x_full = normal(rows * world_size, 6, seed=step)
        x = part(x_full, [rows] * world_size, rank, 0)
        hidden = ops.all_gather_matmul(x, w, group)
        x.fill_(float("nan"))
        close(hidden, x_full @ w.t())
        out = ops.matmul_reduce_scatter(hidden, v, group)
        hidden.fill_(float("nan"))
        close(out, part((x_full @ full_w.t()) @ full_v.t(), [rows] * world_size, rank, 0))


@pytest.mark.parametrize("world_size", [2, 4])
def test_calls_in_a_row_with_late_ranks_and_inputs_that_change(ranks, world_size):
    ranks.run(many_calls, world_size)


def one_shard_grows(rank, world_size):
    """The shards that fit are in place before the slots grow for another's: nobody may read them from the new slots
    before they are there too."""
    group = Group.create("tp", range(world_size), rank=rank, timeout_s=30)
    memory = group.symmetric()
    grow = memory._grow

    def slowly(slot, nbytes):
        grow(slot, nbytes)
        if rank == 1:
            time.sleep(0.2)

    memory._grow = slowly
    w = normal(3, 6, seed=1)
    for step, large in enumerate((4, 4, 200_000, 4, 300_000)):
        lengths = [large if peer == step % world_size else 4 for peer in range(world_size)]
        x_full = normal(sum(lengths), 6, seed=step)
        close(ops.all_gather_matmul(part(x_full, lengths, rank, 0), w, group), x_full @ w.t())


def test_slots_that_grow_for_one_rank_hold_the_shards_of_all(ranks):
    ranks.run(one_shard_grows, 2)


def bits(rank, world_size):
    """One thread, two, three; twice."""
    group = Group.create("tp", range(world_size), rank=rank, timeout_s=30)
    x, w = normal(301, 130, seed=rank, dtype=torch.float32), normal(70, 130, seed=rank + 5, dtype=torch.float32)
    results = []
    for threads in (1, 2, 3, 1):
        torch.set_num_threads(threads)
        results.append(
            [op(x, w, group) for op in (ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce)]
        )
    torch.set_num_threads(1)
    return all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


def test_the_same_bits_for_any_number_of_threads(ranks):
    assert all(ranks.run(bits, 3))


def explained(rank, world_size):
    return [
        explain_transport(Group.create("tp", range(world_size), rank=rank, shared_memory=shared)).split(":")[0]
        for shared in (True, False)
    ]


def test_the_transport_is_chosen_by_what_the_ranks_have(ranks):
    assert ranks.run(explained, 2) == [["shared_memory", "collective"]] * 2
    assert explain_transport(Group.single()).startswith("collective")


def sub_groups(rank, world_size):
    """Groups (0, 2) and (1, 3), used alternately with the group of all."""
    pairs = [Group.create("pair", pair, rank=rank) for pair in ((0, 2), (1, 3))]
    mine, everyone = pairs[rank % 2], Group.create("all", range(4), rank=rank)
    x, w = normal(3, 5, seed=rank), normal(2, 5)
    for _ in range(3):
        for group in (mine, everyone):
            close(
                ops.all_gather_matmul(x, w, group), torch.cat([normal(3, 5, seed=peer) for peer in group.ranks]) @ w.t()
            )


def test_sub_groups_used_in_turn(ranks):
    ranks.run(sub_groups, 4)


def autocast(rank, world_size):
    group = Group.create("tp", range(world_size), rank=rank)
    x, w = torch.randn(3, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    with record() as events, torch.autocast("cpu", dtype=torch.bfloat16):
        out = ops.all_gather_matmul(x, w, group)
    out.float().sum().backward()
    assert [(event.dtype, event.bytes) for event in events] == [("bfloat16", 3 * 6 * 2)]
    assert out.dtype == torch.bfloat16 and x.grad.dtype == w.grad.dtype == torch.float32


def test_autocast_gathers_bfloat16(ranks):
    ranks.run(autocast, 2)


# --- what goes wrong --------------------------------------------------------------------------------------------------


def disagreeing(rank, world_size, op_name, what, transport):
    group = Group.create("tp", range(world_size), rank=rank, timeout_s=20)
    odd = rank == 1
    dtype = torch.float64 if odd and what == "dtype" else torch.float32
    gathers = op_name == "all_gather_matmul"
    width = 6 if odd and what == "shape" and gathers else 5
    rows = 6 if odd and what == "shape" and not gathers else 4
    with pytest.raises(ValueError) as error:
        getattr(ops, op_name)(
            torch.ones(rows, width, dtype=dtype), torch.ones(3, width, dtype=dtype), group, transport=transport
        )
    x = torch.ones(4, 5)
    close(ops.all_gather_matmul(x, x, group, transport=transport), torch.full((4 * world_size, 4), 5.0), torch.float32)
    return str(error.value)


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_disagreement_is_the_same_error_on_every_rank(ranks, op):
    for what, transport in (("dtype", "shared_memory"), ("shape", "shared_memory"), ("shape", "collective")):
        first, *others = ranks.run(disagreeing, 3, op, what, transport)
        assert all(other == first for other in others) and "rank 1" in first and op in first


def killed_in_training(rank, world_size):
    group = Group.create("tp", range(world_size), rank=rank, timeout_s=20)
    w = torch.randn(64, 64, requires_grad=True)
    start = time.monotonic()
    try:
        for step in range(200):
            x = torch.randn(5 + step % 3, 64, requires_grad=True)
            y = ops.matmul_reduce_scatter(ops.all_gather_matmul(x, w, group, name="layer 3 up"), w, group, name="down")
            if step == 50 and rank == 2:
                os.kill(os.getpid(), 9)
            y.sum().backward()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "nothing raised", 0.0


def test_a_killed_rank_is_named_by_every_survivor_and_leaves_nothing(ranks):
    answers = ranks.run(killed_in_training, 4, dying=[2])
    for rank in (0, 1, 3):
        text, seconds = answers[rank]
        assert "of group 'tp'" in text and "rank 2" in text or "given up" in text, text
        assert any(name in text for name in ("'down", "'layer 3 up")) and seconds < 10
    assert any("rank 2" in answers[rank][0] and "has ended" in answers[rank][0] for rank in (0, 1, 3))
    assert not [name for name in os.listdir("/dev/shm") if "pyfast" in name]


def second_derivatives(rank, world_size):
    group = Group.create("tp", range(world_size), rank=rank)
    x, w = normal(4, 5).requires_grad_(), normal(3, 5)
    for op in (ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce):
        with pytest.raises(NotImplementedError, match=f"second derivatives of {op.__name__}"):
            torch.autograd.grad(op(x, w, group).square().sum(), x, create_graph=True)


def test_second_derivatives_are_refused(ranks):
    ranks.run(second_derivatives, 2)


def test_arguments_that_do_not_fit_are_refused():
    group, x, w = Group.single(), torch.ones(4, 5), torch.ones(3, 5)
    for call, match in (
        (lambda: ops.all_gather_matmul(x, torch.ones(3, 4), group), r"w has shape \(3, 4\)"),
        (lambda: ops.all_gather_matmul(x, [], group), "at least one weight"),
        (lambda: ops.all_gather_matmul(x, [w, w], group, bias=torch.ones(3)), "bias must be a sequence of 2"),
        (lambda: ops.all_gather_matmul(x, w, group, dim=1), "dim is 1"),
        (lambda: ops.all_gather_matmul(x, w, group, bias=torch.ones(4)), r"bias has shape \(4,\)"),
        (lambda: ops.all_gather_matmul(x[0], w, group), "at least 2 dimensions"),
        (lambda: ops.matmul_reduce_scatter(x, w, group, rows=[3]), r"rows is \[3\]"),
        (lambda: ops.matmul_reduce_scatter(x, w, group, rows=[2, 2]), "1 entries"),
        (lambda: ops.matmul_all_reduce(x, w, group, transport="tcp"), "transport is 'tcp'"),
        (lambda: ops.matmul_all_reduce(x, w, group, transport="shared_memory"), "do not share memory"),
        (lambda: ops.matmul_all_reduce(x, w, group, defer=print), "main_grad"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(TypeError, match="w has dtype torch.float64"):
        ops.matmul_all_reduce(x, w.double(), group)
    with pytest.raises(TypeError, match="group: is a str"):
        ops.matmul_all_reduce(x, w, "tp")
