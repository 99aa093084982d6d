"""What `ZeroOptimizer` refuses: ranks that disagree, and models whose parameters leave their buckets."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pyfast.parallel import ParallelConfig, ParallelMesh, ZeroOptimizer


def disagreeing(rank, world_size, what):
    mesh = ParallelMesh.create(ParallelConfig(), rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model, stage, rate = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), 1, 0.1
    if rank == 1:
        if what == "stage":
            stage = 2
        elif what == "rate":
            rate = 0.2
        elif what == "frozen":
            model[1].bias.requires_grad_(False)
        elif what == "model":
            model.append(nn.Linear(3, 3))
    try:
        ZeroOptimizer(model, mesh, stage=stage, lr=rate)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    "what, message",
    [
        ("stage", "stage: is 2 on rank 1, 1 on rank 0"),
        ("rate", "learning_rate: is 0.2 on rank 1, 0.1 on rank 0"),
        ("frozen", "rank 1 differ from those of rank 0 in (name, dtype, requires_grad): [('1.bias'"),
        ("model", "rank 1 differ from those of rank 0 in (name, dtype, requires_grad): [('2.bias'"),
    ],
)
def test_ranks_that_disagree_are_named_on_all(ranks, what, message):
    first, second = ranks.run(disagreeing, 2, what)
    assert first == second and message in first


def test_memory_shared_by_two_parameters_and_complex_ones_are_refused():
    model = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
    model[1].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(ValueError, match=r"'0\.weight' and '1\.weight' share memory"):
        ZeroOptimizer(model, ParallelMesh.single(), stage=0)
    halves = torch.zeros(6)  # neighbours in one storage are allowed
    model = nn.ParameterList([nn.Parameter(halves[:3]), nn.Parameter(halves[3:])])
    ZeroOptimizer(model, ParallelMesh.single(), stage=0)
    with pytest.raises(ValueError, match="'weight' is torch.complex64"):
        ZeroOptimizer(nn.Linear(2, 2, dtype=torch.complex64), ParallelMesh.single(), stage=0)


@pytest.mark.parametrize("stage", (0, 1, 2))
def test_parameters_that_leave_their_buckets_are_named(stage):
    model = nn.Linear(2, 2)
    optimizer = ZeroOptimizer(model, ParallelMesh.single(), stage=stage)
    model.to("cpu")  # moves nothing
    optimizer.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    model.double()
    with pytest.raises(RuntimeError, match="parameter 'bias': its data was replaced"):
        optimizer.backward(model(torch.ones(1, 2, dtype=torch.float64)).sum())


def test_a_parameter_replaced_or_unfrozen_later_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = ZeroOptimizer(model, ParallelMesh.single(), stage=1)
    model[0].bias.requires_grad_(True)
    optimizer.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(RuntimeError, match=r"parameter '0\.bias': has a gradient but is not trained"):
        optimizer.step()
