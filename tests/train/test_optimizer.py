"""AdamW and SGD over flat buckets against torch.optim, in the same steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pyfast.parallel import FlatBuckets, ParallelMesh, clip_coefficient
from pyfast.train.config import OptimizerConfig
from pyfast.train.optimizer import describe_groups, make_optimizer, parameter_group

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


class Model(nn.Module):
    """Matrices, a norm weight and a bias, so that both parameter groups are there."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def new(*shape):
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype))

        self.first, self.norm, self.second, self.bias = new(5, 7), new(5), new(3, 5), new(3)

    def forward(self, x):
        return torch.tanh(x @ self.first.T) * self.norm @ self.second.T + self.bias


def data(step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


def ours(config: OptimizerConfig, dtype: torch.dtype, steps: int, rates, clip: float | None = None):
    model = Model(dtype)
    buckets = FlatBuckets(
        model.named_parameters(),
        ParallelMesh.single(),
        group_of=lambda name, p: parameter_group(name, p, config),
    )
    optimizer = make_optimizer(buckets, config)
    for step in range(steps):
        buckets.start_micro_batch(last=True)
        model(data(step, dtype)).square().sum().backward()
        buckets.finish()
        scale = 1.0 if clip is None else clip_coefficient(buckets.grad_norm(), clip)
        optimizer.step(rates[step], scale)
    return model, optimizer


def torchs(make, dtype: torch.dtype, steps: int, rates, decay: float, decay_all: bool, clip: float | None = None):
    model = Model(dtype)
    vectors = [] if decay_all else [p for p in model.parameters() if p.dim() < 2]
    others = [p for p in model.parameters() if all(p is not v for v in vectors)]
    groups = [{"params": others, "weight_decay": decay}]
    optimizer = make(groups + ([{"params": vectors, "weight_decay": 0.0}] if vectors else []))
    for step in range(steps):
        optimizer.zero_grad()
        model(data(step, dtype)).square().sum().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for group in optimizer.param_groups:
            group["lr"] = rates[step]
        optimizer.step()
    return model


def assert_same(a: nn.Module, b: nn.Module, tolerance: float):
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("decay_all", [False, True])
def test_adamw_is_torchs(dtype, decay_all):
    config = OptimizerConfig(weight_decay=0.3, decay_all=decay_all, beta1=0.8, beta2=0.9, eps=1e-6)
    rates = [0.01, 0.02, 0.03, 0.02, 0.01]
    model, _ = ours(config, dtype, 5, rates)
    expected = torchs(
        lambda groups: torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-6), dtype, 5, rates, 0.3, decay_all
    )
    assert_same(model, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs(dtype, momentum):
    config = OptimizerConfig(name="sgd", weight_decay=0.1, momentum=momentum)
    rates = [0.01, 0.02, 0.03, 0.02]
    model, _ = ours(config, dtype, 4, rates)
    expected = torchs(lambda groups: torch.optim.SGD(groups, momentum=momentum), dtype, 4, rates, 0.1, False)
    assert_same(model, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("name, make", [("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)])
def test_clipping_is_torchs_clip_grad_norm(name, make):
    config = OptimizerConfig(name=name, weight_decay=0.0, beta2=0.999 if name == "adamw" else 0.95)
    model, _ = ours(config, torch.float64, 3, [0.05] * 3, clip=0.5)
    expected = torchs(make, torch.float64, 3, [0.05] * 3, 0.0, False, clip=0.5)
    # clip_grad_norm_ divides by norm + 1e-6
    assert_same(model, expected, 1e-5)
    unclipped, _ = ours(config, torch.float64, 3, [0.05] * 3)
    if name == "sgd":
        assert (unclipped.first - model.first).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_bfloat16_moves_through_a_float32_master(name):
    """Steps far below bfloat16's resolution add up in the master, and the parameter is always the master rounded."""
    config = OptimizerConfig(name=name, weight_decay=0.0)
    model, optimizer = ours(config, torch.bfloat16, 8, [1e-4] * 8)
    masters = optimizer.state_by_name()["master"]
    for parameter, (key, start) in zip(model.parameters(), Model(torch.bfloat16).named_parameters(), strict=True):
        assert masters[key].dtype == torch.float32
        assert torch.equal(parameter.detach(), masters[key].bfloat16())
        assert (masters[key] != start.float()).all()


def test_state_is_seen_by_name_and_shape_and_is_the_real_one():
    config = OptimizerConfig()
    model, optimizer = ours(config, torch.float32, 2, [0.01] * 2)
    state = optimizer.state_by_name()
    assert set(state) == {"exp_avg", "exp_avg_sq"}
    for name, parameter in model.named_parameters():
        assert state["exp_avg"][name].shape == parameter.shape
        assert state["exp_avg"][name].abs().sum() > 0
    state["exp_avg"]["first"].fill_(7.0)
    assert torch.equal(optimizer.state_by_name()["exp_avg"]["first"], torch.full((5, 7), 7.0))


def test_groups_are_described_for_the_start_panel():
    named = list(Model(torch.float32).named_parameters())
    assert describe_groups(named, OptimizerConfig(weight_decay=0.1)) == [
        "adamw, weight decay 0.1: 2 matrices",
        "adamw, weight decay 0: 2 norms and biases",
    ]
    assert describe_groups(named, OptimizerConfig(weight_decay=0.1, decay_all=True)) == [
        "adamw, weight decay 0.1: 4 parameters, all of them"
    ]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_bfloat16_moments_follow_float32_ones(name):
    rates = [0.01] * 6
    exact, _ = ours(OptimizerConfig(name=name, weight_decay=0.1), torch.float32, 6, rates)
    config = OptimizerConfig(name=name, weight_decay=0.1, moments_dtype="bfloat16")
    model, optimizer = ours(config, torch.float32, 6, rates)
    state = optimizer.state_by_name()
    assert {tensor.dtype for kind in ("exp_avg", "exp_avg_sq") for tensor in state[kind].values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in state.get("momentum", {}).values()} <= {torch.float32}
    assert_same(model, exact, 3e-3)  # each step may differ by a bfloat16 rounding, 2^-8 of a learning rate of 0.01
    start = Model(torch.float32)
    assert all((p - q).abs().max() > 0.005 for p, q in zip(model.parameters(), start.parameters(), strict=True))
