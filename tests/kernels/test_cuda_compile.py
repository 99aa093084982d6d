"""The CUDA sources compile for every GPU they are meant for, and no kernel spills registers; needs nvcc, no GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPILLING = """
__global__ void __launch_bounds__(1024, 2) sort_in_registers(float* x) {
  float values[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) values[i] = x[i * 1024 + threadIdx.x];
#pragma unroll
  for (int step = 0; step < 8; ++step)
#pragma unroll
    for (int i = 0; i < 128; ++i) values[i] = values[i] * values[(i + 37) % 128] + values[(i * 5 + step) % 128];
#pragma unroll
  for (int i = 0; i < 128; ++i) x[i * 1024 + threadIdx.x] = values[i];
}
"""


def compile_cuda(*sources: Path) -> subprocess.CompletedProcess:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is needed to compile CUDA")
    return subprocess.run(
        [sys.executable, str(ROOT / ".ci" / "compile_cuda"), *map(str, sources)], capture_output=True, text=True
    )


def test_the_kernels_compile_and_none_spills():
    done = compile_cuda()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].endswith(", 0 spill")
    for gpu in ("sm_80", "sm_90a", "sm_100"):
        named = " ".join(line for line in lines if line.startswith(gpu))
        for kernel in ("count_experts", "place_slots", "list_tiles", "gather_rows", "sum_rows", "sum_rows_backward"):
            assert kernel in named, f"{kernel} for {gpu}"


def test_a_kernel_that_spills_is_found(tmp_path):
    (tmp_path / "spilling.cu").write_text(SPILLING)
    done = compile_cuda(tmp_path / "spilling.cu")
    assert done.returncode == 1 and "3 spill" in done.stdout and "sort_in_registers" in done.stdout, done.stdout


def test_a_source_that_does_not_compile_is_an_error(tmp_path):
    (tmp_path / "broken.cu").write_text("__global__ void broken() { no_such_function(); }\n")
    done = compile_cuda(tmp_path / "broken.cu")
    assert done.returncode == 1 and "no_such_function" in done.stderr
