"""Every configuration of the MoE kernels that ships, compiled for its GPU: no spills, tensor cores are used.

`-rP` shows the registers and shared memory that docs/kernels.md lists.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from support.triton_compile import Compiled, compile_launches  # noqa: E402
from support.triton_moe import pretend  # noqa: E402

from pyfast.kernels.triton import backend_moe, backend_row_map  # noqa: E402
from pyfast.kernels.triton.gemm_config import FEW_ROWS  # noqa: E402

pytestmark = pytest.mark.triton_compile

EXPERTS, K = 16, 4
PRODUCTS = {"grouped_gemm_kernel", "grouped_wgrad_kernel", "moe_up_kernel", "moe_down_dgrad_kernel"}
CAPABILITY = {80: (8, 0), 90: (9, 0), 100: (10, 0)}


def compiled(
    monkeypatch, arch: int, *, many: bool, width: int, expert_width: int, dtype: torch.dtype
) -> list[Compiled]:
    """All kernels of a layer's forward and backward, of gradients that are added, and of a product with a bias."""
    pretend(monkeypatch, processors=132, capability=CAPABILITY[arch])
    rows = EXPERTS * (FEW_ROWS if many else FEW_ROWS // 4)

    def ids(size):
        return torch.empty(size, dtype=torch.int32)

    maps = ids(EXPERTS + 1), ids(rows), ids(rows), ids(rows)
    x, weights = torch.empty(rows // K, width, dtype=dtype), torch.empty(rows // K, K)
    w_gate_up = torch.empty(EXPERTS, 2 * expert_width, width, dtype=dtype)
    w_down = torch.empty(EXPERTS, width, expert_width, dtype=dtype)
    sums = torch.empty(w_gate_up.shape), torch.empty(w_down.shape)

    def launch():
        y, pre = backend_moe.moe_mlp_forward(x, maps, weights, w_gate_up, w_down, True)
        _, _, kept = backend_moe.moe_mlp_backward(
            y, x, pre, maps, weights, w_gate_up, w_down, None, None, False, True, True, True
        )  # fmt: skip
        backend_moe.moe_mlp_weight_gradients(y, x, kept, maps, *sums, True)
        if many:
            backend_moe.moe_mlp_weight_gradients(y, x, kept, maps, w_gate_up, w_down, False)
        backend_moe.grouped_gemm_forward(pre, w_gate_up, maps[0], w_down[:, :, 0].contiguous(), True)

    return compile_launches(arch, launch)


@pytest.mark.parametrize("rows", ["many rows", "few rows"])
@pytest.mark.parametrize("arch", CAPABILITY)
def test_aligned_sizes(monkeypatch, arch, rows):
    kernels = compiled(
        monkeypatch, arch, many=rows == "many rows", width=2048, expert_width=768, dtype=torch.bfloat16
    )  # fmt: skip
    assert {kernel.name for kernel in kernels} >= PRODUCTS
    for kernel in kernels:
        print(
            f"{kernel.name}, {rows}, sm_{arch}: {kernel.registers} registers, {kernel.shared >> 10} KiB"
        )  # pytest -rP
        product = kernel.name in PRODUCTS
        # Gradients by weights gather one operand and cut the other at experts' borders: pointers on every GPU.
        kernel.check(tensor_cores=product, tma=product and kernel.name != "grouped_wgrad_kernel")


# Sizes that are no multiple of a tile, of 16 bytes, and float32.
OTHERS = {
    "edges": (1040, 208, torch.float16),
    "unaligned": (15, 31, torch.bfloat16),
    "float32": (256, 256, torch.float32),
    "float32, unaligned": (15, 31, torch.float32),
    "ones": (1, 1, torch.bfloat16),  # Triton turns arguments that are 1 into constants
}


QUICK = {(90, "edges"), (90, "unaligned")}
others = [
    pytest.param(arch, case, marks=() if (arch, case) in QUICK else pytest.mark.exhaustive)
    for arch in CAPABILITY
    for case in OTHERS
]


@pytest.mark.parametrize(("arch", "case"), others)
def test_other_sizes(monkeypatch, arch, case):
    width, expert_width, dtype = OTHERS[case]
    for kernel in compiled(monkeypatch, arch, many=True, width=width, expert_width=expert_width, dtype=dtype):
        kernel.check(tensor_cores=kernel.name in PRODUCTS and dtype != torch.float32)


@pytest.mark.parametrize("arch", CAPABILITY)
def test_maps_and_row_movement(arch):
    experts = torch.empty(4096, 8, dtype=torch.int32)
    x, weights = torch.empty(4096, 2048, dtype=torch.bfloat16), torch.empty(4096, 8)
    rows = torch.empty(4096 * 8, 2048, dtype=torch.bfloat16)

    def launch():
        offsets, gather, slot, inverse = backend_row_map.row_map(experts, 128)
        backend_row_map.tile_list(offsets, 128, 500)
        backend_row_map.gather_rows(x, gather)
        for used in (weights, None):
            backend_row_map.unpermute_forward(rows, inverse, used, 8)
        backend_row_map.unpermute_backward(x, rows, gather, slot, weights, True, True)

    kernels = compile_launches(arch, launch)
    assert len(kernels) == 9
    for kernel in kernels:
        kernel.check(tensor_cores=False)
