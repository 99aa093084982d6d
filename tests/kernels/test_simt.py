"""The stand-in for a GPU (support/simt/simt.h) finds what it must find: mistakes planted in kernels."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.simt.build import CUDA_SOURCES, HERE, compiled

ASAN = ("-fsanitize=address",)
PLANTED = HERE / "planted.cu"
KERNELS = [CUDA_SOURCES / f"{name}.cu" for name in ("row_map", "tile_list", "permute", "unpermute")]


def address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@pytest.fixture(scope="module")
def planted() -> ctypes.CDLL:
    library = ctypes.CDLL(str(compiled([PLANTED])))
    library.planted_error.restype = ctypes.c_char_p
    return library


def sums(planted: ctypes.CDLL, barrier: bool) -> list[float]:
    """What the kernel adds up in each thread order; 64 is right."""
    results = []
    for order in range(4):
        planted.simt_set_order(order)
        out = torch.zeros(1)
        assert planted.planted_sum(address(torch.ones(64)), address(out), 64, barrier) == 0
        results.append(out.item())
    planted.simt_set_order(0)
    return results


def test_a_missing_barrier_gives_wrong_sums_in_some_order(planted):
    assert sums(planted, barrier=True) == [64.0] * 4
    wrong = [total for total in sums(planted, barrier=False) if total != 64]
    assert len(wrong) >= 3, "only thread 0 running last hides it"


def test_lanes_and_threads_that_never_come_are_reported(planted):
    out = torch.zeros(32, dtype=torch.int32)
    assert planted.planted_lanes_that_left(address(out)) != 0
    assert b"wait for ever: one in __shfl_sync" in planted.planted_error()
    assert planted.planted_wait_apart(address(out)) != 0
    assert b"wait for ever" in planted.planted_error()
    assert sums(planted, barrier=True) == [64.0] * 4, "after an error launches work again"


def run_under_asan(*arguments: str) -> subprocess.CompletedProcess:
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(runtime):
        pytest.skip("g++ has no AddressSanitizer runtime here")
    environment = dict(os.environ, LD_PRELOAD=runtime, ASAN_OPTIONS="detect_leaks=0", OMP_NUM_THREADS="1")
    script = Path(__file__).parent / "simt_under_asan.py"
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True, text=True, env=environment, cwd=script.parent, timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize(("shared", "beyond"), [(1, 0), (0, 1)], ids=["shared", "global"])
def test_a_write_out_of_bounds_is_found_by_the_address_sanitizer(shared, beyond):
    library = str(compiled([PLANTED], *ASAN))
    done = run_under_asan("planted", library, str(shared), str(beyond))
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr and "write_beyond" in done.stderr, done.stderr[-2000:]


def test_the_kernels_are_clean_under_the_address_sanitizer():
    clean = run_under_asan("planted", str(compiled([PLANTED], *ASAN)), "0", "0")
    assert clean.returncode == 0, clean.stderr[-2000:]
    done = run_under_asan("kernels", str(compiled(KERNELS, *ASAN)))
    assert done.returncode == 0 and "clean" in done.stdout, done.stderr[-4000:]
