"""ZeRO stage 3: what is gathered when, recomputation, the meta device, and parameters read at the wrong time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pyfast.models import Transformer, TransformerConfig
from pyfast.nn.layout import get_layout
from pyfast.parallel import ParallelConfig, ParallelMesh, ZeroOptimizer, make_buckets
from pyfast.parallel.zero3 import find_units

MODEL = dict(layers=3, width=32, heads=4, kv_heads=2, ffn_width=48, vocab=61, max_positions=32)
STEPS, RATE = 3, 0.5


def test_units_are_the_layers_and_what_is_shared_belongs_to_the_root():
    model = nn.Module()
    model.embedding = nn.Embedding(5, 4)
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2))
    model.tail = nn.Sequential(nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 5))
    model.layers[1][0].weight = model.layers[0][0].weight
    modules, units = find_units(model)
    assert list(modules.values()) == ["layers.0", "layers.1", "tail.0", "tail.2"]
    names = {name: units[p] for name, p in model.named_parameters()}
    assert names == {
        "embedding.weight": "",
        "layers.0.0.weight": "",  # in both layers
        "layers.0.0.bias": "layers.0",
        "layers.1.0.bias": "layers.1",
        "tail.0.weight": "tail.0",
        "tail.0.bias": "tail.0",
        "tail.2.weight": "tail.2",
        "tail.2.bias": "tail.2",
    }


def rows() -> torch.Tensor:
    return torch.randint(0, 61, (8, 21), generator=torch.Generator().manual_seed(3))


def train(mesh, stage, tied, recompute, on_meta=False):
    """The model's values after some steps, and losses, each step in two micro-batches."""
    config = TransformerConfig(**MODEL, tied_embeddings=tied)
    arguments = dict(dtype=torch.float64, mesh=mesh, recompute=recompute)
    if on_meta:
        model = Transformer(config, device="meta", seed=None, **arguments)
        fill = model.initial_values(7)
    else:
        model, fill = Transformer(config, seed=7, **arguments), None
    optimizer = ZeroOptimizer(model, mesh, stage=stage, optimizer="sgd", lr=RATE, fill=fill, bucket_mb=0.01)
    mine = rows()[mesh.coordinate("dp") :: mesh.size("dp")]
    losses = []
    for _ in range(STEPS):
        for index, ids in enumerate(mine.chunk(2)):
            loss = model.loss(ids[:, :-1], ids[:, 1:]) / 160
            losses.append(loss.detach())
            optimizer.backward(loss, last=index == 1)
        optimizer.clip_grad_norm(0.5)
        optimizer.step()
    total = torch.stack(losses).view(STEPS, 2).sum(1)
    mesh.group("dp").all_reduce(total, name="losses")
    with torch.no_grad():  # gathered for a call without gradients too
        logits = model(rows()[:2])
    with optimizer.whole_parameters():
        whole = {name: get_layout(p).unshard(p.detach(), mesh).clone() for name, p in model.named_parameters()}
    return total, logits, whole


def layouts(rank, world_size, tensor, cases):
    mesh = ParallelMesh.create(ParallelConfig(tensor=tensor), rank=rank, world_size=world_size, checked=world_size == 2)
    return [train(mesh, 3, *case) for case in cases]


@pytest.mark.parametrize("tensor, world_size", [(1, 2), (1, 4), (2, 4)])
def test_equals_one_process_tied_recomputed_and_from_the_meta_device(ranks, tensor, world_size):
    cases = [(False, "none", False), (True, "full", True), (False, ["selective", "attention", "ffn"], True)]
    expected = [train(ParallelMesh.single(), 0, tied, "none") for tied, _, _ in cases]
    for answers in ranks.run(layouts, world_size, tensor, cases):
        for (losses, logits, whole), (their_losses, their_logits, theirs) in zip(answers, expected, strict=True):
            torch.testing.assert_close(losses, their_losses, rtol=1e-10, atol=0)
            torch.testing.assert_close(logits, their_logits, rtol=1e-9, atol=1e-9)
            assert whole.keys() == theirs.keys()
            for name, value in theirs.items():
                torch.testing.assert_close(whole[name], value, rtol=1e-10, atol=1e-10, msg=name)


class Shared(nn.Module):
    """A layer called twice, one called in the reverse of its place, and one that only some ranks give a gradient."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.gate = nn.ModuleList([nn.Linear(6, 6)])

    def forward(self, x, use_gate: bool):
        x = self.layers[2](x).tanh()
        x = self.layers[0](x).tanh()
        x = x + self.layers[1](self.layers[0](x)).tanh()
        gated = self.gate[0](x)
        return x + gated if use_gate else x + 0 * gated.detach()


def shared(rank, world_size):
    mesh = ParallelMesh.create(ParallelConfig(), rank=rank, world_size=world_size, checked=True)
    torch.manual_seed(0)
    model = Shared().double()
    optimizer = ZeroOptimizer(model, mesh, stage=3, optimizer="sgd", lr=0.1)
    for step in range(3):
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.backward((model(x, use_gate=rank == 1) ** 2).sum())
        optimizer.step()
    optimizer.close()
    return [p.detach() for p in model.parameters()]


def test_layers_called_twice_out_of_order_and_without_gradient_on_some_ranks(ranks):
    torch.manual_seed(0)
    model = Shared().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
            (model(x, use_gate=rank == 1) ** 2).sum().backward()
        optimizer.step()
    for parameters in ranks.run(shared, 2):
        for ours, theirs in zip(parameters, model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-12)


def freed(rank, world_size):
    """What reading and writing a parameter at the wrong time gives; what `write` keeps; after an exception."""
    mesh = ParallelMesh.create(ParallelConfig(), rank=rank, world_size=world_size, checked=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).bfloat16()
    optimizer = ZeroOptimizer(model, mesh, stage=3, lr=0.1)
    weight = model[0].weight
    reads_nan = bool(weight.isnan().all())
    try:
        with torch.no_grad():
            weight.copy_(torch.ones(4, 3))
        wrote = True
    except RuntimeError:
        wrote = False
    weight.data.fill_(1.0)
    try:
        model(torch.ones(1, 3, dtype=torch.bfloat16))
        wrote = True
    except RuntimeError as error:
        wrote = wrote or "parameter '0.weight' was written while freed" not in str(error)
    weight.data.fill_(torch.nan)
    with optimizer.whole_parameters(write=True):
        model.load_state_dict({name: torch.full_like(p, 2.0) for name, p in model.state_dict().items()})
    try:
        model(torch.ones(1, 5, dtype=torch.bfloat16))
        raised = False
    except RuntimeError:
        raised = True
    optimizer.zero_grad()
    y = model(torch.ones(1, 3, dtype=torch.bfloat16)).detach()
    master = optimizer.state_dict()["state"]["master"]["0.weight"]
    return reads_nan, wrote, raised, y.tolist(), master.unique().tolist(), tuple(weight.shape)


def test_a_freed_parameter_reads_as_nan_cannot_be_written_and_keeps_what_is_written_when_whole(ranks):
    assert ranks.run(freed, 2) == [(True, False, True, [[66.0, 66.0]], [2.0], (4, 3))] * 2


def test_the_meta_device_needs_values_and_stage_3():
    mesh = ParallelMesh.single()
    model = nn.Linear(3, 2, device="meta")
    with pytest.raises(ValueError, match="parameter 'weight' is on the meta device, which stage 3 alone takes"):
        make_buckets(model, mesh, stage=2)
    with pytest.raises(ValueError, match=r"fill: is None, but \['weight', 'bias'\]"):
        make_buckets(model, mesh, stage=3)
    model.register_buffer("table", torch.empty(2, device="meta"))
    with pytest.raises(ValueError, match=r"buffers \['table'\] are on the meta device"):
        make_buckets(model, mesh, stage=3, fill=lambda name, values: values.fill_(1))


def test_frozen_parameters_come_off_the_meta_device_too():
    model = nn.Sequential(nn.Linear(3, 2, device="meta"), nn.Linear(2, 2, device="meta"))
    model[0].requires_grad_(False)
    seen = []
    make_buckets(model, ParallelMesh.single(), stage=3, fill=lambda name, v: (seen.append(name), v.fill_(len(seen))))
    assert sorted(seen) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert not model[0].weight.requires_grad and model[1].weight.requires_grad
    assert torch.isfinite(model(torch.ones(1, 3))).all()
