"""ZeRO stage 3 with modules of odd build, against one process of plain torch; what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pyfast.parallel import ParallelConfig, ParallelMesh, ZeroOptimizer

WIDTH, STEPS, RATE = 6, 2, 0.1


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class ListsOfLists(nn.Module):
    """Layers that are containers without a forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([linear(), nn.ModuleDict({"out": linear()})]) for _ in range(2))

    def forward(self, x):
        for into, out in self.layers:
            x = x + out["out"](into(x).tanh())
        return x


class Skipped(nn.Module):
    def __init__(self, skip: bool):
        super().__init__()
        self.inner, self.skip = linear(), skip

    def forward(self, pair):
        x, memory = pair
        return (x if self.skip else self.inner(x + memory).tanh()), memory


class HandedThrough(nn.Module):
    """Layers that return their input, and one tensor that all of them hand on, computed by the layer before them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([linear(), *(Skipped(skip) for skip in (False, True, False, True))])

    def forward(self, x):
        memory = self.layers[0](x)
        pair = (x, memory)
        for layer in self.layers[1:]:
            pair = layer(pair)
        return pair[0] + pair[1]


class Segments(nn.Module):
    """Recomputation of several layers at a time."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.into, self.reentrant = linear(), reentrant
        self.layers = nn.ModuleList(nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(4))

    def some(self, x, begin, end):
        for layer in self.layers[begin:end]:
            x = x + layer(x)
        return x

    def forward(self, x):
        x = self.into(x)
        for begin in (0, 2):
            x = checkpoint(self.some, x, begin, begin + 2, use_reentrant=self.reentrant)
        return self.into(x)


class OddParameters(nn.Module):
    """Sparse gradients, one element, none, one in the place of many, transposed."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, WIDTH, sparse=True)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.expanded = nn.Parameter(torch.ones(1).expand(WIDTH))
        self.transposed = nn.Parameter(torch.randn(WIDTH, WIDTH).t())

    def forward(self, x):
        x = x + self.embedding((x[:, 0] > 0).long()) * self.scalar + self.none.sum()
        return x * self.expanded @ self.transposed


KINDS = {
    "lists of lists": ListsOfLists,
    "handed through": HandedThrough,
    "segments": lambda: Segments(False),
    "segments, reentrant": lambda: Segments(True),
    "odd parameters": lambda: nn.Sequential(OddParameters(), OddParameters()),
}


def new(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[kind]().double()


def loss_of(model, rank, step, index):
    generator = torch.Generator().manual_seed(100 * step + 10 * index + rank)
    return (model(torch.randn(4, WIDTH, dtype=torch.float64, generator=generator)) ** 2).sum() / 50


def trained(rank, world_size, stage):
    mesh = ParallelMesh.create(ParallelConfig(), rank=rank, world_size=world_size, checked=True)
    result = {}
    for kind in KINDS:
        model = new(kind)
        optimizer = ZeroOptimizer(model, mesh, stage=stage, optimizer="sgd", lr=RATE, bucket_mb=1e-4)
        for step in range(STEPS):
            for index in range(step + 1):
                optimizer.backward(loss_of(model, rank, step, index), last=index == step)
            optimizer.step()
        with optimizer.whole_parameters():
            result[kind] = [p.detach().clone() for p in model.parameters()]
    return result


def expected(kind: str, world_size: int) -> list[torch.Tensor]:
    model = new(kind)
    for step in range(STEPS):
        model.zero_grad()
        for index in range(step + 1):
            for rank in range(world_size):
                loss_of(model, rank, step, index).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:  # not in place: one of them is expanded
                    parameter.data = parameter - RATE * parameter.grad.to_dense()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_modules_of_odd_build_train_like_one_process(ranks, stage):
    for answer in ranks.run(trained, 2, stage):
        for kind in KINDS:
            for ours, theirs in zip(answer[kind], expected(kind, 2), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, msg=kind)


class Part(nn.Module):
    """Calls a part of its layer, not the layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Skipped(False)])

    def forward(self, x):
        return self.layers[0].inner(x)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, WIDTH))

    def forward(self, x):
        return self.weight[:1]


class Penalty(nn.Module):
    """A gradient that is differentiated in turn."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(linear(), nn.Tanh(), linear())

    def forward(self, x):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)
        return gradient


REFUSED = {"part": Part, "own": lambda: nn.Sequential(Own()), "penalty": Penalty}


def refused(rank, world_size, kind):
    mesh = ParallelMesh.create(ParallelConfig(), rank=rank, world_size=world_size, checked=True)
    model = REFUSED[kind]()
    ZeroOptimizer(model, mesh, stage=3)
    try:
        model(torch.ones(2, WIDTH))
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    "kind, message",
    [
        ("part", "module 'layers.0.inner' was called outside a call of 'layers.0'"),
        ("own", "output of '0': is one of its parameters or a view of one, shape (1, 6)"),
        ("penalty", "create_graph=True: not supported at stage 3"),
    ],
)
def test_what_stage_3_cannot_do_is_refused(ranks, kind, message):
    for answer in ranks.run(refused, 2, kind):
        assert answer is not None and message in answer
