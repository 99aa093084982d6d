"""bench/: results that disagree have no times, candidates are timed in turn, and the tables say what was measured."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
import torch

import pyfast

BENCH = Path(__file__).parents[2] / "bench"

SAMPLE = """
import pytest
import torch

calls = []


def candidate(name, value):
    return lambda: calls.append(name) or torch.full((3,), value)


@pytest.mark.benchmark(group="sums")
def bench_equal(race):
    row = race(
        {"pyfast": candidate("ours", 1.0), "torch": candidate("theirs", 1.0)},
        tolerance=0.0, flop=1e6, notes=lambda: {"colour": "green"},
    )
    if row is None:  # --benchmark-disable
        assert calls == ["ours", "theirs", "ours"]
    else:
        assert calls[:4] == ["ours", "theirs"] * 2, calls  # checked, warmed up
        assert len(calls) >= 10 and calls[4:] == ["theirs", "ours"] * (len(calls) // 2 - 2), calls
        assert row.ratio == row.times["torch"] / row.times["pyfast"]


@pytest.mark.benchmark(group="copies")
@pytest.mark.parametrize("n", [7, pytest.param(8, marks=pytest.mark.full)])
def bench_copied(race, n):
    race({"pyfast": candidate("ours", 1.0), "torch": candidate("theirs", 1.0)}, tolerance=0.0, moved_bytes=64.0)


@pytest.mark.benchmark(group="sums")
def bench_different(race):
    race({"pyfast": candidate("ours", 1.0), "torch": candidate("theirs", 1.01)}, tolerance=1e-3)
"""


@pytest.fixture(scope="module")
def support():
    spec = util.spec_from_file_location("bench_support", BENCH / "support.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "other",
    [torch.ones(3) * 1.01, torch.full((3,), float("nan")), [torch.ones(3), torch.ones(1)], torch.ones(1)],
    ids=["different", "nan", "more results", "other shape"],
)
def test_results_that_disagree_are_refused(support, other):
    with pytest.raises(support.Disagreement, match="ours"):
        support.check_agreement({"ours": lambda: torch.ones(3), "theirs": lambda: other}, tolerance=1e-3)


@pytest.mark.parametrize("value", [0.0, float("inf")])
def test_nothing_is_close_to_zero_or_infinity(support, value):
    with pytest.raises(support.Disagreement):
        support.check_agreement({"a": lambda: torch.ones(3), "b": lambda: torch.full((3,), value)}, tolerance=1e-3)


def test_the_difference_is_relative_and_in_norm(support):
    off = torch.tensor([3.0, 4.0 + 1e-3], dtype=torch.float64)
    candidates = {"ours": lambda: off, "theirs": lambda: torch.tensor([3.0, 4.0], dtype=torch.float64)}
    assert support.check_agreement(candidates, 1e-3) == pytest.approx(1e-3 / 5)
    with pytest.raises(support.Disagreement):
        support.check_agreement(candidates, 1e-4)
    zeros = {"ours": lambda: torch.zeros(2), "theirs": lambda: torch.zeros(2)}
    assert support.check_agreement(zeros, 0.0) == 0.0


def test_the_peak_is_a_rate_a_processor_can_have(support):
    assert 1e9 < support.fma_peak(0.01) < 1e12


def run_sample(directory: Path, *arguments: str) -> str:
    """The output of pytest over SAMPLE beside bench's own files."""
    for file in [*BENCH.glob("*.py"), BENCH / "pytest.ini"]:
        if not file.name.startswith("bench_"):
            shutil.copy(file, directory)
    (directory / "bench_sample.py").write_text(SAMPLE)
    command = [sys.executable, "-m", "pytest", str(directory), *arguments]
    # The package that is tested, installed or not, and no directory of the source tree besides.
    paths = [str(Path(pyfast.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, capture_output=True, text=True, cwd=directory, env=environment, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr  # bench_different fails
    return done.stdout


def test_a_session_prints_what_agrees_and_fails_what_does_not(tmp_path):
    results = tmp_path / "results.json"
    arguments = ("--clock", "cpu", "--benchmark-max-time", "0.001", "--benchmark-json", str(results))
    output = run_sample(tmp_path, *arguments)
    assert "2 passed" in output and "1 failed" in output and "1 deselected" in output
    assert "relative difference 9.90e-03, allowed 1e-03; no ratio is printed" in output
    tables = output[output.index("sums\n") :]
    rows = {line.split("|")[1].strip(): line for line in tables.splitlines() if line.startswith("|")}
    assert set(rows) - {"case"} - {text for text in rows if text.startswith("--")} == {"equal", "copied 7"}
    assert "GFLOP/s" in rows["equal"] and "green" in rows["equal"] and "GB/s" in rows["copied 7"]
    assert "cpu time" in output
    saved = {entry["name"]: entry for entry in json.loads(results.read_text())["benchmarks"]}
    assert set(saved) == {"bench_equal", "bench_copied[7]"}
    equal = saved["bench_equal"]
    assert equal["options"]["timer"] == "process_time"
    assert equal["extra_info"]["seconds"]["pyfast"] == equal["stats"]["median"]
    assert set(equal["extra_info"]["seconds"]) == {"pyfast", "torch"}


def test_without_timing_a_session_checks_agreement_alone(tmp_path):
    output = run_sample(tmp_path, "--benchmark-disable", "--sizes", "full")
    assert "3 passed" in output and "1 failed" in output
    assert "GFLOP/s" not in output and "ratio:" not in output


def test_ordinary_pytest_collects_no_benchmark(pytestconfig):
    assert pytestconfig.getini("testpaths") == ["tests"]
    assert "bench_*.py" not in pytestconfig.getini("python_files")
