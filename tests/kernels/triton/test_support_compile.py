"""Compiling for absent GPUs: what comes out is seen, and what is wrong is named."""

from __future__ import annotations

import dataclasses

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl  # noqa: E402
from support import triton_examples as example  # noqa: E402
from support.triton_compile import TENSOR_CORE, compile_launches  # noqa: E402

pytestmark = pytest.mark.triton_compile


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_a_matmul_uses_the_tensor_cores(arch):
    a = torch.empty(128, 128, dtype=torch.bfloat16)
    kernels = compile_launches(
        arch, lambda: example.matmul[(1,)](a, a, a, 128, 128, 128, "ieee", tl.bfloat16, enable_fp_fusion=True)
    )  # fmt: skip
    assert [kernel.name for kernel in kernels] == ["matmul"]
    kernels[0].check()
    assert kernels[0].instructions[TENSOR_CORE[arch]] and kernels[0].shared >= 2 * 128 * 128 * 2


def test_exact_float32_products_are_told_from_tensor_cores():
    a = torch.empty(32, 32)
    (kernel,) = compile_launches(
        90, lambda: example.matmul[(1,)](a, a, a, 32, 32, 32, "ieee", tl.float32, enable_fp_fusion=True)
    )  # fmt: skip
    kernel.check(tensor_cores=False)
    with pytest.raises(AssertionError, match="no HGMMA"):
        kernel.check()


def test_what_is_wrong_is_named():
    a = torch.empty(128)
    (kernel,) = compile_launches(
        90, lambda: example.add_one[(1,)](a, a, 128, 128, True, num_warps=2, enable_fp_fusion=True)
    )
    kernel.check(tensor_cores=False)
    for change, words in [({"spilled": 8}, "8 bytes of registers"), ({"shared": 1 << 20}, "shared memory cannot be")]:
        with pytest.raises(AssertionError, match=words):
            dataclasses.replace(kernel, **change).check(tensor_cores=False)
    with pytest.raises(AssertionError, match="specialization is off"):
        kernel.check(tensor_cores=False, warp_specialized=True)
    with pytest.raises(AssertionError, match="no TMA load"):
        kernel.check(tensor_cores=False, tma=True)
