"""The kernels of maps and row movement on the CPU backends, each against kernels/reference_row_map.py."""

from __future__ import annotations

import pytest
import torch
from kernels.row_map_cases import MAPS, MOVES, TOLERANCE, check_maps, check_moves, check_tiles

from pyfast.kernels import cpu, plain
from pyfast.kernels.tiles import tile_bound

backends = pytest.mark.parametrize("backend", [cpu, plain], ids=lambda module: module.__name__.split(".")[-1])


@backends
@pytest.mark.parametrize("name", MAPS)
def test_maps(backend, name):
    check_maps(backend, name)


@backends
@pytest.mark.parametrize("block", [1, 16, 128])
@pytest.mark.parametrize("name", MAPS)
def test_tiles(backend, name, block):
    check_tiles(backend, name, block)


@backends
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MOVES)
def test_moves(backend, name, dtype):
    check_moves(backend, name, dtype)


def test_the_tile_bound_is_reached_and_never_passed():
    """Every way to spread 12 slots over 3 experts."""
    for block in (1, 4, 5):
        most = 0
        for first in range(13):
            for second in range(13 - first):
                offsets = torch.tensor([0, first, first + second, 12], dtype=torch.int32)
                most = max(most, cpu.tile_list(offsets, block, 100)[1].item())
        assert most <= tile_bound(12, 3, block)
        # Three experts of which two have one row more than full tiles: the bound is tight where the rows allow it.
        assert most == {1: 12, 4: 5, 5: 4}[block]
    assert tile_bound(2, 100, 128) == 2 and tile_bound(0, 8, 16) == 0


@backends
def test_offsets_that_need_more_tiles_than_there_is_room_for_are_refused(backend):
    with pytest.raises(ValueError, match="offsets need more than 3 tiles"):
        backend.tile_list(torch.tensor([0, 5, 9], dtype=torch.int32), 2, 3)


@pytest.mark.parametrize("what", ["gather", "slot", "inverse"])
@pytest.mark.parametrize("entry", [6, -2, 2**31 - 1])
def test_a_map_with_a_wrong_entry_is_refused_before_memory_is_touched(what, entry):
    maps = dict(zip(("offsets", "gather", "slot", "inverse"), cpu.row_map(torch.zeros(3, 2).int(), 1), strict=True))
    maps[what][4] = entry
    dy, rows, weights = torch.randn(3, 8), torch.randn(6, 8), torch.rand(3, 2)
    with pytest.raises(ValueError, match=rf"row_map.{what}\[4\] is {entry}"):
        if what == "inverse":
            cpu.unpermute_forward(rows, maps["inverse"], weights, 2)
        else:
            cpu.unpermute_backward(dy, rows, maps["gather"], maps["slot"], weights, True, True)
    if what == "gather":
        with pytest.raises(ValueError, match=rf"row_map.gather\[4\] is {entry}"):
            cpu.gather_rows(dy, maps["gather"])
