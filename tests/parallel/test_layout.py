"""Layouts cut and join tensors as numpy would; every element is counted once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyfast.nn.layout import Layout, Shard, get_layout, set_layout, split_bounds
from pyfast.parallel import ParallelMesh


@given(st.integers(0, 200), st.integers(1, 9))
def test_split_is_that_of_numpy(length, ranks):
    pieces = [list(range(*split_bounds(length, ranks, rank))) for rank in range(ranks)]
    assert pieces == [piece.tolist() for piece in np.array_split(np.arange(length), ranks)]


def test_vocabulary_of_50257_on_two_ranks():
    layout = Layout((50257, 8), (Shard("tp", 0, (50257,)),))
    assert [layout.local_shape({"tp": 2}, {"tp": rank}) for rank in range(2)] == [(25129, 8), (25128, 8)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=3), st.integers(1, 4), st.integers(1, 3), st.integers(0, 1))
def test_slices_tile_the_tensor(parts, tp, ep, dim):
    """Every element of the full tensor is in exactly one local tensor, where numpy's splitting puts it."""
    other = 5
    shape = (sum(parts), other) if dim == 0 else (other, sum(parts))
    layout = Layout(shape, (Shard("tp", dim, tuple(parts)), Shard("ep", 1 - dim, (other,))))
    full = np.arange(sum(parts) * other).reshape(shape)
    rebuilt = np.full(shape, -1)
    sizes = {"tp": tp, "ep": ep}
    for t, e in itertools.product(range(tp), range(ep)):
        coords = {"tp": t, "ep": e}
        blocks = np.split(full, np.cumsum(parts)[:-1], axis=dim)
        expected = np.concatenate([np.array_split(block, tp, axis=dim)[t] for block in blocks], axis=dim)
        expected = np.array_split(expected, ep, axis=1 - dim)[e]
        local = np.full(layout.local_shape(sizes, coords), -1)
        for here, there in layout.slices(sizes, coords):
            assert (rebuilt[there] == -1).all()
            local[here] = full[there]
            rebuilt[there] = full[there]
        assert np.array_equal(local, expected)
    assert np.array_equal(rebuilt, full)


LAYOUTS = [
    Layout((7, 5)),
    Layout((7, 5), (Shard("tp", 0, (7,)),)),
    Layout((7, 5), (Shard("tp", 1, (2, 3)),)),
    Layout((7, 5), (Shard("dp", 0, (3, 4)), Shard("tp", 1, (1, 4)))),
    Layout((1, 5), (Shard("tp", 0, (1,)),)),
    Layout((7,), partial=("tp",)),
]


def round_trip(rank, world_size, tp):
    sizes = {"tp": tp, "dp": world_size // tp}
    mesh = ParallelMesh.from_sizes("tp-cp-pp-dp", sizes, rank=rank, world_size=world_size, checked=True)
    counts = []
    for layout in LAYOUTS:
        full = torch.randn(layout.shape, generator=torch.Generator().manual_seed(3))
        local = layout.shard(full, mesh)
        assert torch.equal(layout.unshard(local, mesh), full)
        counts.append(local.numel() if layout.counted(mesh) else 0)
    return counts


@pytest.mark.parametrize(("world_size", "tp"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)])
def test_shard_and_unshard_return_the_tensor_and_count_it_once(ranks, world_size, tp):
    counts = torch.tensor(ranks.run(round_trip, world_size, tp)).sum(0)
    assert counts.tolist() == [torch.Size(layout.shape).numel() for layout in LAYOUTS]


def test_parameter_carries_its_layout():
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    assert get_layout(parameter) == Layout((3, 4))
    layout = Layout((6, 4), (Shard("tp", 0, (6,)),))
    set_layout(parameter, layout)
    assert get_layout(parameter) is layout
    with pytest.raises(ValueError, match="cannot hold this rank's parameter"):
        set_layout(parameter, Layout((2, 4)))


def test_impossible_layouts_are_refused():
    for arguments, message in [
        (dict(shape=(4, 4), shards=(Shard("tp", 0, (3,)),)), "must add up"),
        (dict(shape=(4, 4), shards=(Shard("tp", 2, (4,)),)), "must add up"),
        (dict(shape=(4, 4), shards=(Shard("tp", 0, (4,)), Shard("tp", 1, (4,)))), "cuts a dimension twice"),
        (dict(shape=(4, 4), shards=(Shard("tp", 0, (4,)), Shard("dp", 0, (4,)))), "cuts a dimension twice"),
        (dict(shape=(4,), shards=(Shard("tp", 0, (4,)),), partial=("tp",)), "partial: .* overlaps"),
        (dict(shape=(4,), partial=("dp",)), "partial: .* overlaps"),
    ]:
        with pytest.raises(ValueError, match=message):
            Layout(**arguments)
    with pytest.raises(ValueError, match="dim: is -1"):
        Shard("tp", -1, (4,))
    layout = Layout((4,), (Shard("tp", 0, (4,)),))
    with pytest.raises(ValueError, match="full: has shape"):
        layout.shard(torch.zeros(3), ParallelMesh.single())
    with pytest.raises(ValueError, match="local: has shape"):
        layout.unshard(torch.zeros(3), ParallelMesh.single())
