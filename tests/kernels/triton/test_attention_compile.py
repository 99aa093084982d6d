"""Every shipped configuration of the attention kernels, compiled for GPUs that are not here.

No spilled registers, shared memory within the limits, tensor-core instructions (wgmma on sm_90), TMA.
The default run takes what training runs take: bfloat16, head size 128; `-m exhaustive` takes the whole table.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from support.triton_compile import compile_launches  # noqa: E402

from pyfast.kernels.triton import attention as kernels  # noqa: E402
from pyfast.kernels.triton.attention_config import TILES  # noqa: E402

pytestmark = pytest.mark.triton_compile

T, N, NK = 512, 4, 2
KERNELS = ("forward", "keys", "queries")


def launch(kernel: str, dtype: torch.dtype, D: int, Dv: int, *, softcap=0.0, carried=False):
    """Start one kernel through the code that starts it in earnest; with 512 rows, as many tiles as there may be."""
    q, k, v = (torch.empty(T, n, d, dtype=dtype) for n, d in ((N, D), (NK, D), (NK, Dv)))
    runs = torch.tensor([[0, 0, T, 1]])
    options = kernels.Options(True, D**-0.5, -1, -1, softcap)
    dout, acc = torch.empty(T, N, Dv, dtype=dtype), torch.empty(T, N, Dv)
    lse, delta = torch.empty(N, T), torch.empty(N, T)
    if kernel == "forward":
        sinks, state = (torch.empty(N), (acc, lse)) if carried else (None, None)
        kernels.attention_state_forward(q, k, v, runs, runs, *options, sinks, state)
        return
    q, k, v, dout = map(kernels._rows, (q, k, v, dout))
    dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32 if carried else dtype) for x in (q, k, v))
    wanted = (None, dk, dv) if kernel == "keys" else (dq, None, None)

    def plan(kind, tiles):
        return kernels._plan_of_runs(kind, runs, runs, q, k, options, tiles)

    kernels._backward(dout, q, k, v, lse, delta, plan, options, None, *wanted, add=carried)


def compiled(arch, kernel, dtype, D, Dv, **options):
    results = compile_launches(arch, lambda: launch(kernel, dtype, D, Dv, **options))
    assert results and all(kernel in result.name for result in results)
    return results


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_head_size_128(arch, kernel):
    for result in compiled(arch, kernel, torch.bfloat16, 128, 128):
        result.check(tma=True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_head_size_64_on_sm_90(kernel):
    for result in compiled(90, kernel, torch.bfloat16, 64, 64):
        result.check(tma=True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_state_and_softcap_on_sm_90(kernel):
    for result in compiled(90, kernel, torch.bfloat16, 128, 128, softcap=20.0, carried=True):
        result.check(tma=True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_head_sizes_that_are_padded_on_the_host(kernel):
    for result in compiled(90, kernel, torch.bfloat16, 104, 33):
        result.check(tma=True)


def test_rows_that_tma_cannot_read_are_copied_to_where_it_can():
    """A slice that starts between 16-byte boundaries."""
    x = torch.empty(2, T, N * 128 + 1, dtype=torch.bfloat16)[..., 1:].unflatten(2, (N, 128))
    (result,) = compile_launches(
        90, lambda: kernels.attention_forward(x, x, x, None, None, None, True, 0.1, -1, -1, 0.0)
    )
    result.check(tma=True)


def test_sizes_of_one():
    """Triton makes constants of arguments that are 1: one row, one head, one tile must compile as well."""
    q, k, v = (torch.empty(1, 1, 1, 16, dtype=torch.bfloat16) for _ in range(3))
    out, lse = torch.empty_like(q), torch.empty(1, 1, 1)
    options = (None, None, None, True, 0.25, -1, 1, 0.0)

    def call():
        kernels.attention_forward(q, k, v, *options)
        kernels.attention_backward(out, lse, q, k, v, out, lse, *options)

    results = compile_launches(90, call)
    assert len(results) == 4  # forward, delta, keys, queries
    for result in results:
        result.check(tensor_cores=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("softcap, carried", [(0.0, False), (0.0, True), (20.0, True)])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_the_whole_table_in_16_bits(arch, kernel, width, softcap, carried):
    for dtype in (torch.bfloat16, torch.float16):
        for result in compiled(arch, kernel, dtype, width, width, softcap=softcap, carried=carried):
            small = (arch, kernel, width) == (100, "keys", 256)  # 32 keys: sm_100's own products take 64 rows
            result.check(tma=True, tensor_cores=not small)
            assert not small or result.instructions.get("HMMA"), result


@pytest.mark.exhaustive
@pytest.mark.parametrize("D, Dv", [(80, 80), (192, 128), (40, 24), (8, 8), (104, 33), (250, 136)])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_head_sizes_that_are_padded(arch, kernel, D, Dv):
    for carried in (False, True):
        for result in compiled(arch, kernel, torch.bfloat16, D, Dv, carried=carried):
            result.check(tma=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("softcap, carried", [(0.0, False), (20.0, True)])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_float32(arch, kernel, width, softcap, carried):
    for result in compiled(arch, kernel, torch.float32, width, width, softcap=softcap, carried=carried):
        result.check(tensor_cores=False)


def test_the_table_has_every_architecture_kernel_and_head_size():
    for table in TILES.values():
        assert set(table) == {80, 90, 100}
        for row in table.values():
            assert set(row) == set(KERNELS) and all(set(sizes) == {64, 128, 256} for sizes in row.values())
