"""csrc/cuda's maps and row movement against the reference: on the CPU through simt.h, and on a GPU where there is one.

Both run through pyfast/kernels/cuda_row_map.py, so its launches are checked too.
"""

from __future__ import annotations

import pytest
import torch
from kernels.row_map_cases import MAPS, MOVES, TOLERANCE, check_maps, check_moves, check_tiles, random_experts
from support.simt.build import load, no_stream

from pyfast.kernels import cpu, cuda_library, reference_row_map
from pyfast.kernels.cuda_row_map import CudaRowMap

SOURCES = ("row_map.cu", "tile_list.cu", "permute.cu", "unpermute.cu")


@pytest.fixture(scope="module")
def library():
    return load(*SOURCES)


@pytest.fixture(params=["ascending", "descending", "shuffled", "shuffled otherwise"])
def simt(request, library):
    """The kernels on the CPU, their threads in one of four orders."""
    library.simt_set_order(("ascending", "descending", "shuffled", "shuffled otherwise").index(request.param))
    yield CudaRowMap(library, no_stream)
    library.simt_set_order(0)


@pytest.fixture
def simt_once(library):
    return CudaRowMap(library, no_stream)


@pytest.fixture(scope="module")
def gpu():
    """The kernels on a GPU."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    if cuda_library.load() is None:
        pytest.skip("the package was built without nvcc")
    return CudaRowMap(cuda_library.load())


def test_maps(simt):
    for name in MAPS:
        check_maps(simt, name)


def test_tiles(simt):
    for name in MAPS:
        for block in (1, 16, 128):
            check_tiles(simt, name, block)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_moves(simt, dtype):
    for name in MOVES:
        check_moves(simt, name, dtype)


def test_more_experts_than_fit_in_shared_memory(simt_once):
    experts, num_experts = random_experts(40, 2, 13_000, dropped=0.1), 13_000
    experts[7:20] = 12_999
    for ours, expected in zip(simt_once.row_map(experts, num_experts), cpu.row_map(experts, num_experts), strict=True):
        assert torch.equal(ours, expected)


def test_more_slots_than_a_chunk_for_each_of_the_most_warps(simt_once):
    """1024 chunks are the most: beyond 131072 slots each becomes longer."""
    experts = random_experts(45_000, 3, 3, dropped=0.1)
    for ours, expected in zip(simt_once.row_map(experts, 3), cpu.row_map(experts, 3), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("offset", range(0, 5))
@pytest.mark.parametrize("width", [8, 10, 15])
def test_rows_of_every_alignment(simt_once, offset, width):
    """Rows that begin 0 to 4 elements behind a 16-byte border, a stride of 24 elements apart."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = torch.randn(6, 24).to(dtype)[:, offset : offset + width]
        gather = torch.tensor([5, -1, 0, 3], dtype=torch.int32)
        assert torch.equal(simt_once.gather_rows(x, gather), reference_row_map.gather_rows(x, gather))
        inverse = torch.tensor([[5, 0], [2, -1], [-1, -1]], dtype=torch.int32).flatten()
        expected = reference_row_map.unpermute(x, inverse, None, 2)
        torch.testing.assert_close(simt_once.unpermute_forward(x, inverse, None, 2), expected)


def test_rows_that_pass_two_billion_elements(simt_once, tmp_path):
    """Rows 1.1e9 elements apart in a sparse file, in all kernels that read rows."""
    path = tmp_path / "rows"
    path.touch()
    stride = 2**30 + 8
    flat = torch.from_file(str(path), shared=True, size=2 * stride + 8, dtype=torch.bfloat16)
    far, near = flat.as_strided((3, 8), (stride, 1)), torch.randn(3, 8).bfloat16()
    far.copy_(near)
    gather, inverse = (torch.tensor(v, dtype=torch.int32) for v in ([2, 0, 1], [1, 2, 0]))
    weights = torch.rand(3, 1)
    for function in (
        lambda x: simt_once.gather_rows(x, gather),
        lambda x: simt_once.unpermute_forward(x, inverse, weights, 1),
        lambda x: simt_once.unpermute_backward(x, x, gather, gather, weights, True, False)[0],
        lambda x: simt_once.unpermute_backward(x, x, gather, gather, weights, False, True)[1],
    ):  # fmt: skip
        assert torch.equal(function(far), function(near))


def test_ids_that_pass_two_billion_elements(simt_once, tmp_path):
    path = tmp_path / "experts"
    path.touch()
    flat = torch.from_file(str(path), shared=True, size=2**31 + 8, dtype=torch.int32)
    flat[2**31 - 4], flat[2**31 + 5] = 2, 1
    experts = flat.as_strided((2, 2), (2**31 - 4, 9))
    assert simt_once.row_map(experts, 3)[2].tolist() == [0, 1, 3, 2]


@pytest.mark.parametrize("wrong", [3, -2, 2**32])
def test_what_only_the_device_sees_fails_an_assertion_there(simt_once, wrong):
    with pytest.raises(RuntimeError, match="row_map could not be launched: .*DEVICE_CHECK failed: expert >= -1"):
        simt_once.row_map(torch.tensor([[0], [wrong]]), 3)
    bad, x = torch.tensor([0, 7], dtype=torch.int32), torch.randn(2, 4)
    with pytest.raises(RuntimeError, match="DEVICE_CHECK failed: token"):
        simt_once.gather_rows(x, bad)
    with pytest.raises(RuntimeError, match="DEVICE_CHECK failed: row"):
        simt_once.unpermute_forward(x, bad, None, 1)
    with pytest.raises(RuntimeError, match="DEVICE_CHECK failed: token < tokens && slot"):
        simt_once.unpermute_backward(x, x, bad, bad, torch.rand(2, 1), True, True)
    with pytest.raises(RuntimeError, match="DEVICE_CHECK failed: first_tile"):
        simt_once.tile_list(torch.tensor([0, 5, 9], dtype=torch.int32), 2, 4)
    with pytest.raises(RuntimeError, match="DEVICE_CHECK failed: rows >= 0"):
        simt_once.tile_list(torch.tensor([0, 5, 4], dtype=torch.int32), 2, 4)


def test_the_same_bits_in_every_order(library):
    """Sums too, not only maps."""
    backend, results = CudaRowMap(library, no_stream), []
    torch.manual_seed(0)
    _, gather, slot, inverse = cpu.row_map(random_experts(20, 3, 4, dropped=0.1), 4)
    rows, dy, weights = torch.randn(60, 200), torch.randn(20, 200), torch.rand(20, 3)
    for order in range(4):
        library.simt_set_order(order)
        y = backend.unpermute_forward(rows, inverse, weights, 3)
        results.append((y, *backend.unpermute_backward(dy, rows, gather, slot, weights, True, True)))
    library.simt_set_order(0)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


def test_the_compiled_library_says_when_there_is_no_gpu():
    """It loads without a driver, has every launcher, and an error of CUDA becomes one of Python."""
    if cuda_library.path() is None:
        pytest.skip("the package was built without nvcc")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    compiled, x = CudaRowMap(cuda_library.load(), no_stream), torch.randn(3, 4)
    index, weights = torch.zeros(3, dtype=torch.int32), torch.rand(3, 1)
    for name, call in {
        "row_map": lambda: compiled.row_map(index[:, None], 2),
        "tile_list": lambda: compiled.tile_list(index, 2, 3),
        "gather_rows": lambda: compiled.gather_rows(x, index),
        "gather_sum": lambda: compiled.unpermute_forward(x, index, weights, 1),
        "gather_sum_backward": lambda: compiled.unpermute_backward(x, x, index, index, weights, True, True),
    }.items():
        with pytest.raises(RuntimeError, match=f"the CUDA kernel {name} could not be launched: error [0-9]+, [A-Za-z]"):
            call()


@pytest.mark.parametrize("name", MAPS)
def test_maps_on_a_gpu(gpu, name):
    check_maps(gpu, name, "cuda")
    check_tiles(gpu, name, 16, "cuda")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MOVES)
def test_moves_on_a_gpu(gpu, name, dtype):
    check_moves(gpu, name, dtype, "cuda")
