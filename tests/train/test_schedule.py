"""Learning rates against torch.optim.lr_scheduler where it has the same schedule, and against their definition."""

from __future__ import annotations

import pytest
import torch

from pyfast.train.config import OptimizerConfig
from pyfast.train.schedule import learning_rate, peak_learning_rate

STEPS, WARMUP, PEAK, END = 40, 8, 0.3, 0.1


def ours(schedule: str, steps: int = STEPS, **keys) -> list[float]:
    config = OptimizerConfig(learning_rate=PEAK, schedule=schedule, warmup_steps=WARMUP, final_fraction=END, **keys)
    return [learning_rate(step, steps, config) for step in range(1, steps + 1)]


def torchs(make) -> list[float]:
    """Rates that torch's scheduler gives for steps 1, 2, ..."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = make(optimizer)
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def warmup_then(scheduler):
    def make(optimizer):
        rise = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP, 1.0, total_iters=WARMUP - 1)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, scheduler(optimizer)], [WARMUP - 1])

    return make


@pytest.mark.parametrize(
    "name, scheduler",
    [
        ("cosine", lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS - WARMUP, eta_min=PEAK * END)),
        ("linear", lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, END, total_iters=STEPS - WARMUP)),
        ("constant", lambda o: torch.optim.lr_scheduler.ConstantLR(o, 1.0)),
    ],
)
def test_matches_torch(name, scheduler):
    assert ours(name) == pytest.approx(torchs(warmup_then(scheduler)), rel=1e-12)


def test_wsd_is_flat_and_then_falls_linearly():
    rates = ours("wsd", decay_steps=10)
    assert rates[WARMUP - 1 : 30] == [PEAK] * (30 - WARMUP + 1)
    falls = [a - b for a, b in zip(rates[29:-1], rates[30:], strict=True)]
    assert falls == pytest.approx([PEAK * (1 - END) / 10] * 10)
    assert rates[-1] == pytest.approx(PEAK * END)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_starts_small_peaks_after_the_warmup_ends_at_the_fraction(schedule):
    rates = ours(schedule)
    assert rates[0] == pytest.approx(PEAK / WARMUP)
    assert max(rates) == rates[WARMUP - 1] == PEAK
    assert rates[-1] == pytest.approx(PEAK * END)


def test_a_run_shorter_than_its_warmup_only_rises():
    assert ours("cosine", steps=4) == pytest.approx([PEAK * step / WARMUP for step in (1, 2, 3, 4)])


@pytest.mark.parametrize("scaling, factor", [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_scaling_by_the_batch(scaling, factor):
    reference = None if scaling == "none" else 8
    config = OptimizerConfig(learning_rate=PEAK, lr_scaling=scaling, reference_batch=reference)
    assert peak_learning_rate(config, global_batch=32) == pytest.approx(PEAK * factor)
