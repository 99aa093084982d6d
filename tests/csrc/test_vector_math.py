"""csrc/cpu/vector_math.h over dense sweeps, compiled by itself for every instruction set this machine runs."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

CPU_SOURCES = Path(__file__).parents[2] / "csrc" / "cpu"
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
FLAGS = "-std=c++17 -O2 -ffp-contract=fast -fno-math-errno -fno-trapping-math -shared -fPIC".split()
ISA_FLAGS = {"baseline": [], "avx2": "-mavx2 -mfma -mf16c".split()}
ISA_FLAGS["avx512"] = [*ISA_FLAGS["avx2"], *"-mavx512f -mavx512bw -mavx512dq -mavx512vl".split()]
if platform.machine() not in ("x86_64", "AMD64"):
    ISA_FLAGS = {"baseline": []}

SOURCE = """
#include "vector_math.h"
using namespace pyfast;
#define APPLY(name, C, f)                                                            \\
  extern "C" void name(const C* x, C* y, long n) {                                   \\
    for (long i = 0; i < n; i += Vec<C>::size) store(y + i, f<C>(load(x + i)));      \\
  }
APPLY(exp2_softmax_f32, float, exp2_softmax) APPLY(exp2_softmax_f64, double, exp2_softmax)
APPLY(exp2_f32, float, pyfast::exp2) APPLY(exp2_f64, double, pyfast::exp2)
APPLY(exp_f32, float, pyfast::exp) APPLY(exp_f64, double, pyfast::exp)
APPLY(tanh_f32, float, pyfast::tanh) APPLY(tanh_f64, double, pyfast::tanh)
"""


@pytest.fixture(scope="module", params=ISA_FLAGS)
def library(request, tmp_path_factory):
    from pyfast import _C

    if request.param not in _C.supported_isas():
        pytest.skip(f"this processor has no {request.param}")
    if COMPILER is None or not CPU_SOURCES.exists():
        pytest.skip("needs a C++ compiler and the sources")
    directory = tmp_path_factory.mktemp(request.param)
    (directory / "functions.cpp").write_text(SOURCE)
    target = directory / "functions.so"
    command = [COMPILER, *FLAGS, *ISA_FLAGS[request.param], f"-I{CPU_SOURCES}", str(directory / "functions.cpp")]
    subprocess.run([*command, "-o", str(target)], check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(target))


def call(library, name: str, x: np.ndarray) -> np.ndarray:
    x = np.concatenate([x, np.zeros(-len(x) % 64, x.dtype)])
    y = np.empty_like(x)
    function = getattr(library, f"{name}_{'f32' if x.dtype == np.float32 else 'f64'}")
    function(x.ctypes.data_as(ctypes.c_void_p), y.ctypes.data_as(ctypes.c_void_p), ctypes.c_long(len(x)))
    return y


def sweep(dtype, low: float, high: float) -> np.ndarray:
    """Evenly spread numbers, and numbers of every size around 0."""
    count = 1_000_000 if dtype == np.float32 else 150_000  # long double is slow
    small = np.logspace(-40 if dtype == np.float32 else -300, np.log10(min(-low, high)), count // 8)
    x = np.concatenate([np.linspace(low, high, count), small, -small]).astype(dtype)
    return np.concatenate([x, np.zeros(-len(x) % 64, dtype)])


# The reference must be better than what it judges (long double is longer than double on x86).
WIDER = {np.float32: np.float64, np.float64: np.longdouble}
# Relative error: float 2e-7 as the attention kernels ask; double 2.5 roundings.
BOUNDS = {np.float32: 2e-7, np.float64: 5e-16}


@pytest.mark.parametrize("dtype", BOUNDS, ids=["float32", "float64"])
@pytest.mark.parametrize(
    ("name", "reference", "ranges"),
    [
        ("exp2_softmax", np.exp2, {np.float32: (-126, 126), np.float64: (-1022, 1022)}),
        ("exp2", np.exp2, {np.float32: (-126, 127.99), np.float64: (-1022, 1023.99)}),
        ("exp", np.exp, {np.float32: (-87.3, 88.7), np.float64: (-708.3, 709.7)}),
        ("tanh", np.tanh, {np.float32: (-12, 12), np.float64: (-25, 25)}),
    ],
)
def test_relative_error(library, name, reference, ranges, dtype):
    x = sweep(dtype, *ranges[dtype])
    wide = WIDER[dtype]
    expected = reference(x.astype(wide))
    normal = np.abs(expected) >= np.finfo(dtype).tiny
    error = np.abs(call(library, name, x).astype(wide) - expected)[normal] / np.abs(expected[normal])
    assert error.max() <= BOUNDS[dtype] * (2 if name == "tanh" else 1)


@pytest.mark.parametrize("dtype", BOUNDS, ids=["float32", "float64"])
def test_special_values(library, dtype):
    x = np.array([-np.inf, np.inf, np.nan, 0.0, -1e30], dtype)
    for name in ("exp", "exp2"):
        y = call(library, name, x)[:5]
        assert y[0] == 0 and y[1] == np.inf and np.isnan(y[2]) and y[3] == 1 and y[4] == 0
    y = call(library, "exp2_softmax", np.array([-np.inf, -2000, np.nan, 0.0], dtype))[:4]
    assert y[0] == 0 and y[1] == 0 and np.isnan(y[2]) and y[3] == 1
    y = call(library, "tanh", x)[:5]
    assert y[0] == -1 and y[1] == 1 and np.isnan(y[2]) and y[3] == 0 and y[4] == -1


def test_nan_with_any_payload_stays_nan(library):
    payloads = np.array([0x7FC00000, 0xFFFFFFFF, 0x7FC001FF, 0xFFC00001], np.uint32).view(np.float32)
    for name in ("exp", "exp2", "exp2_softmax", "tanh"):
        assert np.isnan(call(library, name, payloads)[:4]).all()


@pytest.mark.parametrize("dtype", BOUNDS, ids=["float32", "float64"])
def test_subnormal_results_of_exp(library, dtype):
    x = np.linspace(-103, -88, 10_000) if dtype == np.float32 else np.linspace(-744, -709, 10_000)
    x = x.astype(dtype)
    wide = WIDER[dtype]
    expected, step = np.exp(x.astype(wide)), wide(np.finfo(dtype).smallest_subnormal)
    assert (np.abs(call(library, "exp", x)[: len(x)].astype(wide) - expected) <= 1.5 * step).all()
