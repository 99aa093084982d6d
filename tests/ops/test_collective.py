"""Autograd collectives: values and gradients against one process."""

from __future__ import annotations

import pytest
import torch

from pyfast.comm import Group, record
from pyfast.nn.linear import column_parallel_linear
from pyfast.ops.collective import copy_to_group, gather_from_group, reduce_from_group
from pyfast.parallel import ParallelConfig, ParallelMesh


def tp_group(rank, world_size):
    config = ParallelConfig(tensor=world_size)
    return ParallelMesh.create(config, rank=rank, world_size=world_size, checked=True).group("tp")


def column_then_row(rank, world_size, x, w_in, w_out, in_place):
    """Two linears, the first cut by columns, the second by rows: the plain tensor-parallel block."""
    group = tp_group(rank, world_size)
    x = x.clone().requires_grad_()
    w_in = w_in.tensor_split(world_size)[rank].clone().requires_grad_()
    w_out = w_out.tensor_split(world_size, 1)[rank].clone().requires_grad_()
    with record() as events:
        hidden = torch.tanh(copy_to_group(x, group, "block") @ w_in.T)
        out = reduce_from_group(hidden @ w_out.T, group, "block out", in_place=in_place)
        (out * out).sum().backward()
    return out.detach(), x.grad, w_in.grad, w_out.grad, [event.name for event in events]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_copy_and_reduce_equal_one_process(ranks, world_size, in_place):
    torch.manual_seed(0)
    x, w_in, w_out = (torch.randn(s, dtype=torch.float64) for s in [(5, 4), (7, 4), (3, 7)])
    answers = ranks.run(column_then_row, world_size, x, w_in, w_out, in_place)
    full = [t.clone().requires_grad_() for t in (x, w_in, w_out)]
    out = torch.tanh(full[0] @ full[1].T) @ full[2].T
    (out * out).sum().backward()
    for rank, (ours, dx, dw_in, dw_out, names) in enumerate(answers):
        close = dict(rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ours, out.detach(), **close)
        torch.testing.assert_close(dx, full[0].grad, **close)
        torch.testing.assert_close(dw_in, full[1].grad.tensor_split(world_size)[rank], **close)
        torch.testing.assert_close(dw_out, full[2].grad.tensor_split(world_size, 1)[rank], **close)
        assert torch.equal(ours, answers[0][0]) and torch.equal(dx, answers[0][1]), "ranks differ"
        assert names == ([] if world_size == 1 else ["block out", "block backward"])


def frozen_input(rank, world_size):
    group = tp_group(rank, world_size)
    weight = torch.ones(3, requires_grad=True)
    with record() as events:
        (copy_to_group(torch.ones(3), group, "input") * weight).sum().backward()
    return len(events), weight.grad


def test_input_without_gradient_sends_nothing(ranks):
    assert all(count == 0 and torch.equal(grad, torch.ones(3)) for count, grad in ranks.run(frozen_input, 2))


def shared_gradient(rank, world_size):
    """x + y hands one gradient tensor to both branches: reducing it in place would corrupt the other."""
    group = tp_group(rank, world_size)
    x, y = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    (copy_to_group(x, group, "x") + y).backward(torch.full((3,), float(rank + 1)))
    return x.grad, y.grad


def test_gradient_of_another_branch_is_left_alone(ranks):
    for rank, (dx, dy) in enumerate(ranks.run(shared_gradient, 2)):
        assert torch.equal(dx, torch.full((3,), 3.0)) and torch.equal(dy, torch.full((3,), rank + 1.0))


def gathered(rank, world_size, full, dim):
    group = tp_group(rank, world_size)
    pieces = full.tensor_split(world_size, dim)
    x = pieces[rank].clone().requires_grad_()
    joined = gather_from_group(x, group, dim, "logits", sizes=[piece.shape[dim] for piece in pieces])
    (joined * full).sum().backward()
    return joined.detach(), x.grad


@pytest.mark.parametrize(("world_size", "dim"), [(2, 0), (2, -1), (3, 1), (4, 1)])
def test_gather_of_uneven_slices(ranks, world_size, dim):
    full = torch.arange(35.0).view(5, 7)
    for rank, (joined, grad) in enumerate(ranks.run(gathered, world_size, full, dim)):
        assert torch.equal(joined, full)
        assert torch.equal(grad, full.tensor_split(world_size, dim)[rank])


def test_gather_refuses_wrong_sizes():
    with pytest.raises(ValueError, match=r"sizes: is \[4\], must have 1 entries"):
        gather_from_group(torch.zeros(3), Group.single(), 0, "x", sizes=[4])
    with pytest.raises(ValueError, match="dim: is 1"):
        gather_from_group(torch.zeros(3), Group.single(), 1, "x")


def second_derivative(rank, world_size, which):
    group = tp_group(rank, world_size)
    x = torch.randn(4, requires_grad=True)
    call = {
        "copy": lambda: copy_to_group(x, group, "x"),
        "reduce": lambda: reduce_from_group(x, group, "x"),
        "gather": lambda: gather_from_group(x, group, 0, "x"),
        "column": lambda: column_parallel_linear(x, torch.randn(3, 4), None, group, "x"),
    }[which]
    try:
        torch.autograd.grad(call().square().sum(), x, create_graph=True)
    except NotImplementedError as error:
        return str(error)


@pytest.mark.parametrize("which", ["copy", "reduce", "gather", "column"])
def test_second_derivatives_across_ranks_are_refused_not_lost(ranks, which):
    for message in ranks.run(second_derivative, 2, which):
        assert message and "second derivatives of" in message and "not supported yet" in message
