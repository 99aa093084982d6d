"""A slice of the fuzzing of the CPU kernels, other cases than by hand; the long run, and the one under sanitizers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        capture_output=True,
        text=True,
        cwd=HERE.parents[1],
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def test_random_cases_equal_plain_torch():
    out = run("cpu_kernels.py", "--rounds", "40", "--seed", "1")
    assert out.count(": 40 cases") == 6


def test_a_wrong_kernel_is_found():
    """The comparison itself: a factor, a NaN, a missing value."""
    sys.path.insert(0, str(HERE))
    try:
        from cpu_kernels import close
    finally:
        sys.path.remove(str(HERE))
    expected = torch.randn(1000, dtype=torch.float64)
    close("same", expected.float(), expected, 2e-5)
    for wrong in (expected * 1.0001, expected.clone().index_fill_(0, torch.tensor([3]), torch.nan), expected[:-1]):
        with pytest.raises(AssertionError, match="wrong"):
            close("wrong", wrong, expected, 2e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("more", [[], ["--widen"]])
def test_many_random_cases_equal_plain_torch(more):
    run("cpu_kernels.py", "--rounds", "2000", "--seed", "2", *more)


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="needs GCC on Linux")
@pytest.mark.parametrize("more", [[], ["--widen"]])
def test_random_cases_under_sanitizers(more):
    out = run("sanitized.py", "--rounds", "300", "--seed", "3", *more)
    assert out.count(": 300 cases") == 6
