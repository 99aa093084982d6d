"""Muon against torch.optim.Muon, in every layout; which parameters are whose."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pyfast.models import Transformer, TransformerConfig
from pyfast.parallel import FlatBuckets, ParallelConfig, ParallelMesh, check_replicas, make_buckets
from pyfast.train.config import OptimizerConfig
from pyfast.train.muon import orthogonal
from pyfast.train.optimizer import make_optimizer
from pyfast.train.parameter_groups import check_matches, describe_groups, parameter_group

MODEL = dict(layers=2, width=32, heads=4, kv_heads=4, ffn_width=48, vocab=61, max_positions=32, qk_norm=True)
STEPS, RATE, DECAY = 3, 0.02, 0.1


def train(dtype=torch.float64, mesh=None, config=None, stage=0):
    """A model after some steps on one batch, and its optimizer."""
    config = config or OptimizerConfig(name="muon", weight_decay=DECAY, beta2=0.9)
    mesh = mesh or ParallelMesh.single()
    model = Transformer(TransformerConfig(**MODEL), dtype=dtype, mesh=mesh)
    group_of = lambda name, p: parameter_group(name, p, config)  # noqa: E731
    buckets = make_buckets(model, mesh, stage=stage, group_of=group_of, bucket_bytes=20_000)
    optimizer = make_optimizer(buckets, config)
    ids = torch.randint(0, 61, (4, 21), generator=torch.Generator().manual_seed(3))
    ids = ids[mesh.coordinate("dp") :: mesh.size("dp")]
    for _ in range(STEPS):
        buckets.start_micro_batch(last=True)
        (model.loss(ids[:, :-1], ids[:, 1:]) / 80).backward()
        buckets.end_micro_batch()
        buckets.finish()
        optimizer.step(RATE)
    buckets.wait_for_parameters()
    if stage == 3:
        buckets.close()  # the parameters whole
    return model, optimizer


def torchs(scale: str):
    """The same with torch.optim.Muon for the layers' matrices and torch.optim.AdamW for the rest."""
    model = Transformer(TransformerConfig(**MODEL), dtype=torch.float64)
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if name.startswith("layers.") and p.dim() == 2]
    wide = [named["embedding.weight"], named["head.weight"]]
    vectors = [p for p in named.values() if p.dim() == 1]
    muon = torch.optim.Muon(matrices, lr=RATE, weight_decay=DECAY, momentum=0.95, adjust_lr_fn=scale)
    groups = [{"params": wide, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.9))
    ids = torch.randint(0, 61, (4, 21), generator=torch.Generator().manual_seed(3))
    for _ in range(STEPS):
        for optimizer in (muon, adamw):
            optimizer.zero_grad()
        (model.loss(ids[:, :-1], ids[:, 1:]) / 80).backward()
        muon.step()
        adamw.step()
    return model


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_it_is_torchs_muon_in_float64(monkeypatch, scale):
    """torch's rounds the gradient to bfloat16 before it iterates; without that both compute the same numbers."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    expected = torchs(scale)
    model, _ = train(config=OptimizerConfig(name="muon", weight_decay=DECAY, beta2=0.9, muon_scale=scale))
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("shape", [(7, 20), (20, 7), (3, 8, 5)])
def test_singular_vectors_stay_and_values_come_near_one(shape):
    matrices = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    rotated = u.mT @ orthogonal(matrices, 5) @ v.mT
    values = rotated.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(rotated, torch.diag_embed(values), atol=1e-12, rtol=0)
    assert 0.6 < values.min() and values.max() < 1.3
    assert torch.equal(orthogonal(torch.zeros(3, 4), 5), torch.zeros(3, 4))


def test_bfloat16_moves_through_a_float32_master():
    model, optimizer = train(torch.bfloat16)
    masters = optimizer.state_by_name()["master"]
    for name, p in model.named_parameters():
        assert torch.equal(p.detach(), masters[name].bfloat16())


def whole_weights(rank: int, world_size: int, tensor: int, stage: int):
    from pyfast.nn.layout import get_layout

    mesh = ParallelMesh.create(ParallelConfig(tensor=tensor), rank=rank, world_size=world_size)
    model, _ = train(mesh=mesh, stage=stage)
    check_replicas(model.named_parameters(), mesh)
    return {name: get_layout(p).unshard(p.detach(), mesh) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "tensor, world_size, stage",
    [(2, 2, 0), (4, 4, 0), (2, 4, 0), (1, 2, 1), (2, 4, 1), (1, 4, 2), (2, 4, 2), (1, 4, 3), (2, 4, 3)],
)
def test_every_layout_takes_the_same_steps(ranks, tensor, world_size, stage):
    expected = {name: p.detach() for name, p in train()[0].named_parameters()}
    for weights in ranks.run(whole_weights, world_size, tensor, stage):
        for name, p in expected.items():
            torch.testing.assert_close(weights[name], p, rtol=1e-10, atol=1e-10, msg=name)


def test_matrices_are_muons_and_the_rest_adamws():
    _, optimizer = train()
    state = optimizer.state_by_name()
    assert all(
        name.endswith(("qkv.weight", "output.weight", "gate_up.weight", "down.weight")) for name in state["momentum"]
    )
    assert len(state["momentum"]) == 8
    assert {"embedding.weight", "head.weight", "norm.weight"} < set(state["exp_avg"])
    assert not set(state["momentum"]) & set(state["exp_avg"])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 2, bias=False)


def test_groups_set_decay_and_rate_by_the_first_pattern_that_fits():
    groups = {"first": {"rate": 0.5}, "norm|first": {"weight_decay": 0.3}}
    config = OptimizerConfig(name="sgd", weight_decay=0.1, groups=groups)
    model = Model()
    buckets = FlatBuckets(
        model.named_parameters(), ParallelMesh.single(), group_of=lambda name, p: parameter_group(name, p, config)
    )
    optimizer = make_optimizer(buckets, config)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for bucket in buckets.buckets:
        bucket.main_grad.zero_()
    optimizer.step(0.1)
    rates = {"first": 0.05 * 0.1, "norm": 0.1 * 0.3, "head.weight": 0.1 * 0.1}
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), start[name] * (1 - rates[name]))
    assert describe_groups(model.named_parameters(), config) == [
        "sgd, weight decay 0.1, learning rate x 0.5: 1 that match first",
        "sgd, weight decay 0.3: 1 that match norm|first",
        "sgd, weight decay 0.1: 1 matrices",
    ]


def test_a_rule_by_pattern():
    config = OptimizerConfig(name="muon", groups={"layers.0.ffn": {"rule": "adamw"}})
    names = set(train(config=config)[1].state_by_name()["exp_avg"])
    assert {"layers.0.ffn.down.weight", "layers.0.ffn.gate_up.weight"} < names
    assert "layers.1.ffn.down.weight" not in names


@pytest.mark.parametrize(
    "groups, match",
    [
        ({"nothing": {"rate": 1.0}}, "'nothing' decides for no parameter"),
        ({"first": {"rate": 1.0}, "^first$": {"rate": 2.0}}, "earlier group takes all"),
        ({"norm": {"rule": "muon"}}, "gives norm to muon"),
    ],
)
def test_groups_that_decide_nothing_are_refused(groups, match):
    with pytest.raises(ValueError, match=match):
        check_matches(Model().named_parameters(), OptimizerConfig(name="muon", groups=groups))
