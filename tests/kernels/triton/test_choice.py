"""Which functions GPUs get: Triton's where triton is installed, with the arguments of the CPU's; else plain torch."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

NAMES = (
    "attention_forward", "attention_backward", "attention_state_forward", "attention_delta", "attention_state_backward",
)  # fmt: skip


@pytest.mark.triton_compile
@pytest.mark.parametrize("name", NAMES)
def test_gpus_get_tritons_attention_with_the_arguments_of_the_cpus(name):
    from pyfast import kernels

    gpu, cpu = (getattr(kernels.for_device(torch.device(device)), name) for device in ("cuda", "cpu"))
    assert gpu.__module__ == "pyfast.kernels.triton.attention"
    known = list(inspect.signature(cpu).parameters)
    assert list(inspect.signature(gpu).parameters)[: len(known)] == known


def test_without_triton_gpus_get_plain_torch(tmp_path):
    code = f"""
import sys
sys.modules["triton"] = None  # importing it raises ImportError
import torch
from pyfast import kernels
chosen = kernels.for_device(torch.device("cuda"))
assert all(getattr(chosen, name).__module__ == "pyfast.kernels.plain_attention" for name in {NAMES!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
