"""bench/support.py: no ratio for results that disagree, candidates timed in turn."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "bench" / "support.py"


@pytest.fixture(scope="module")
def support():
    spec = importlib.util.spec_from_file_location("bench_support", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "other",
    [torch.ones(3) * 1.01, torch.full((3,), float("nan")), [torch.ones(3), torch.ones(1)], torch.ones(1)],
    ids=["different", "nan", "more results", "other shape"],
)
def test_results_that_disagree_are_not_compared(support, other, capsys):
    with pytest.raises(support.Disagreement, match="ours"):
        support.compare("sum", {"ours": lambda: torch.ones(3), "theirs": lambda: other}, tolerance=1e-3)
    assert capsys.readouterr().out == ""


def test_candidates_run_in_turn(support, capsys):
    calls = []
    candidates = {name: (lambda name=name: calls.append(name) or torch.ones(2)) for name in ("ours", "theirs")}
    timings = support.compare("ones", candidates, tolerance=0.0, flop=1e6, peak=1e9, rounds=4)
    assert calls == ["ours", "theirs"] * 6  # checked, warmed up, four rounds
    assert all(0 <= timing.best <= timing.median for timing in timings.values())
    assert "1.00 x" in capsys.readouterr().out


def test_the_peak_is_a_rate_a_processor_can_have(support):
    assert 1e9 < support.fma_peak(0.01) < 1e12
