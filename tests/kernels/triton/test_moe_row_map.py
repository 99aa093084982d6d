"""Maps and row movement in Triton, run in the interpreter, on the cases that every backend must get right."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from kernels.row_map_cases import MAPS, MOVES, TOLERANCE, check_maps, check_moves, check_tiles, random_experts  # noqa: E402
from support.triton_interpreter import shuffled_programs  # noqa: E402

from pyfast.kernels import cpu  # noqa: E402
from pyfast.kernels.triton import backend_row_map  # noqa: E402

pytestmark = pytest.mark.triton_interpreter

# Sorting these in the interpreter takes seconds.
SLOW = {"many slots", "many experts", "all to the last"}
maps = [pytest.param(name, marks=pytest.mark.exhaustive if name in SLOW else ()) for name in MAPS]


@pytest.mark.parametrize("name", maps)
def test_maps(name):
    with shuffled_programs(seed=1):
        check_maps(backend_row_map, name)


@pytest.mark.parametrize("block", [1, 16, 128])
@pytest.mark.parametrize("name", maps)
def test_tiles(name, block):
    with shuffled_programs(seed=2):
        check_tiles(backend_row_map, name, block)


# All dtypes at one size, and all sizes in bfloat16; float64 is plain torch.
moves = [(name, dtype) for name in MOVES for dtype in TOLERANCE if dtype == torch.bfloat16 or name == "aligned width"]


@pytest.mark.parametrize(("name", "dtype"), moves, ids=str)
def test_moves(name, dtype):
    with shuffled_programs(seed=3):
        check_moves(backend_row_map, name, dtype)


def test_a_chunk_is_sorted_behind_the_chunks_before_it_whatever_order_they_run_in():
    """Three chunks of slots, the last not full: ranks within a chunk, sums over chunks and dropped slots all matter."""
    experts = random_experts(300, 2, 5, dropped=0.2)
    expected = cpu.row_map(experts, 5)
    for seed in (1, 2):
        with shuffled_programs(seed):
            assert all(torch.equal(a, b) for a, b in zip(backend_row_map.row_map(experts, 5), expected, strict=True))


@pytest.mark.parametrize("wrong", [5, -2, 2**32 + 1])
def test_an_id_that_does_not_exist_fails_a_device_assertion(wrong):
    experts = random_experts(40, 2, 5).long()
    experts[17, 1] = wrong
    with pytest.raises(Exception, match="expert id"):
        backend_row_map.row_map(experts, 5)


def test_a_dropped_slot_adds_nothing_whatever_its_weight():
    experts = torch.tensor([[0, -1], [-1, 1]], dtype=torch.int32)
    _, _, _, inverse = cpu.row_map(experts, 2)
    weights = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]])
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [float("nan")] * 2, [float("nan")] * 2])
    assert backend_row_map.unpermute_forward(rows, inverse, weights, 2).tolist() == [[1, 2], [6, 8]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_rows_and_an_expanded_gradient(dtype):
    experts = random_experts(9, 2, 3, dropped=0.2)
    _, gather, slot, inverse = cpu.row_map(experts, 3)
    x, weights = torch.randn(20, 18).to(dtype).t(), torch.rand(2, 9).t()
    x = x[::2]
    assert torch.equal(backend_row_map.gather_rows(x, gather), cpu.gather_rows(x, gather))
    rows = torch.randn(40, 18).to(dtype)[:36:2]
    y = backend_row_map.unpermute_forward(rows, inverse, weights, 2)
    torch.testing.assert_close(y, cpu.unpermute_forward(rows, inverse, weights, 2))
    dy = torch.ones(1, 1, dtype=dtype).expand(9, 18)
    for ours, expected in zip(
        backend_row_map.unpermute_backward(dy, rows, gather, slot, weights, True, True),
        cpu.unpermute_backward(dy, rows, gather, slot, weights, True, True),
        strict=True,
    ):
        torch.testing.assert_close(ours, expected)
