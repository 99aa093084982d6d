"""Rank numbering against known layouts and torch's DeviceMesh; groups of real ranks; configs that are refused."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from pyfast.parallel import ParallelConfig, ParallelMesh, rank_groups


def test_golden_layout_of_8_ranks():
    groups = rank_groups("tp-cp-pp-dp", {"tp": 2, "pp": 2, "dp": 2})
    assert groups["tp"] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups["pp"] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert groups["dp"] == groups["dp-cp"] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert groups["cp"] == [(rank,) for rank in range(8)]
    assert groups["world"] == [tuple(range(8))]


def test_golden_layout_of_16_ranks():
    """Megatron-Core's numbering: order tp-cp-dp-pp."""
    sizes = {"tp": 2, "cp": 2, "dp": 2, "pp": 2}
    groups = rank_groups("tp-cp-dp-pp", sizes, combined=("dp-cp", "tp-cp", "tp-pp"))
    assert groups["tp"][0] == (0, 1)
    assert groups["cp"][:3] == [(0, 2), (1, 3), (4, 6)]
    assert groups["dp"][:2] == [(0, 4), (1, 5)]
    assert groups["pp"][0] == (0, 8)
    assert groups["dp-cp"][:2] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert groups["tp-cp"][0] == (0, 1, 2, 3)
    assert groups["tp-pp"][0] == (0, 1, 8, 9)


SIZES = {"tp": 2, "cp": 3, "pp": 1, "dp": 4}


@pytest.mark.parametrize("order", ["-".join(names) for names in itertools.permutations(SIZES)])
def test_any_order_equals_device_mesh(order):
    """DeviceMesh's last dimension varies fastest, so the order is reversed there."""
    names = order.split("-")[::-1]
    ranks = torch.arange(math.prod(SIZES.values())).view([SIZES[name] for name in names])
    groups = rank_groups(order, SIZES, combined=("dp-cp", "tp-pp-dp"))
    for joint in [*names, "dp-cp", "tp-pp-dp"]:
        inside = [names.index(name) for name in joint.split("-")]
        outside = [d for d in range(len(names)) if d not in inside]
        rows = ranks.permute(outside + inside).reshape(-1, math.prod(SIZES[n] for n in joint.split("-")))
        assert groups[joint] == sorted(tuple(sorted(row.tolist())) for row in rows)
        assert sorted(rank for group in groups[joint] for rank in group) == list(range(24))


@pytest.mark.parametrize(
    ("order", "sizes"), [("tp-tp", {"tp": 2}), ("tp-dp-cp", {"pp": 2}), ("tp-dp-cp", {"tp": 0}), ("tp", {"tp": 2})]
)
def test_bad_orders_are_refused(order, sizes):
    with pytest.raises(ValueError, match="order: is|sizes: is"):
        rank_groups(order, sizes)


def mesh_of(rank, world_size, order, sizes):
    mesh = ParallelMesh.from_sizes(order, sizes, rank=rank, world_size=world_size, checked=True)
    sums = {}
    for name in ("tp", "cp", "pp", "dp", "dp-cp", "world"):
        x = torch.tensor([float(rank)])
        mesh.group(name).all_reduce(x, name="ranks")
        sums[name] = (mesh.group(name).ranks, mesh.coordinate(name), mesh.size(name), x.item(), mesh.group(name).name)
    names = order.split("-")[::-1]
    device_mesh = DeviceMesh("cpu", torch.arange(world_size).view([sizes[n] for n in names]), mesh_dim_names=names)
    theirs = {name: device_mesh.get_local_rank(name) for name in names}
    return sums, theirs


@pytest.mark.parametrize(
    ("order", "sizes"),
    [("tp-cp-pp-dp", {"tp": 2, "cp": 1, "pp": 1, "dp": 2}), ("dp-pp-cp-tp", {"tp": 2, "cp": 2, "pp": 1, "dp": 1})],
)
def test_groups_of_real_ranks(ranks, order, sizes):
    wanted = rank_groups(order, sizes)
    for rank, (sums, theirs) in enumerate(ranks.run(mesh_of, 4, order, sizes)):
        for name, (group, coordinate, size, total, label) in sums.items():
            assert group == next(g for g in wanted[name] if rank in g)
            assert (coordinate, size, total, label) == (group.index(rank), len(group), sum(group), name)
            if name in theirs:
                assert coordinate == theirs[name]


def two_meshes(rank, world_size):
    one = ParallelMesh.from_sizes("tp-dp-cp", {"tp": 2, "dp": 2}, rank=rank, world_size=world_size)
    two = ParallelMesh.from_sizes("dp-tp-cp", {"tp": 2, "dp": 2}, rank=rank, world_size=world_size)
    results = []
    for _ in range(3):
        a, b = torch.tensor([float(rank)]), torch.tensor([float(rank)])
        first = one.group("tp").all_reduce(a, name="one", async_op=True)
        second = two.group("tp").all_reduce(b, name="two", async_op=True)
        second.wait()
        first.wait()
        one.group("world").barrier(name="one")
        two.group("world").barrier(name="two")
        results.append((a.item(), b.item()))
    return results


def test_two_meshes_in_one_process(ranks):
    for rank, results in enumerate(ranks.run(two_meshes, 4)):
        mine = {0: (1, 2), 1: (1, 4), 2: (5, 2), 3: (5, 4)}[rank]
        assert results == [mine] * 3


def test_single_mesh_needs_no_torch_distributed():
    mesh = ParallelMesh.single()
    assert not torch.distributed.is_initialized()
    for name in ("tp", "cp", "pp", "dp", "dp-cp", "world"):
        assert (mesh.size(name), mesh.coordinate(name)) == (1, 0)
    with pytest.raises(ValueError, match="name: is 'xp', must be one of"):
        mesh.group("xp")


def test_config_fills_data_and_refuses_a_wrong_product():
    assert ParallelConfig(tensor=2).resolve(8).data == 4
    assert ParallelConfig(tensor=2, data=4).resolve(8) == ParallelConfig(tensor=2, data=4)
    with pytest.raises(ValueError, match="tensor 3 .* do not divide the 8 ranks"):
        ParallelConfig(tensor=3).resolve(8)
    with pytest.raises(ValueError, match="tensor 2 .* data 2 = 4 ranks, but the job has 8"):
        ParallelConfig(tensor=2, data=2).resolve(8)
    with pytest.raises(ValueError, match="not resolved"):
        ParallelConfig().sizes()


@pytest.mark.parametrize(
    ("key", "value"),
    [("context", 2), ("pipeline", 2), ("virtual_pipeline", 2), ("expert", 2), ("expert_tensor", 2),
     ("sequence_parallel", True), ("schedule", "1f1b"), ("layers_per_stage", [1, 2]), ("context_method", "ring")],
)  # fmt: skip
def test_keys_of_later_releases_are_refused_by_name(key, value):
    with pytest.raises(ValueError, match=rf"parallel\.{key}: is .* not supported yet"):
        ParallelConfig(**{key: value})


@pytest.mark.parametrize(
    ("key", "value"), [("tensor", 0), ("tensor", 2.0), ("tensor", True), ("data", -1), ("order", "tp-dp"),
                       ("order", "tp-cp-pp-dp-dp"), ("zero", 4), ("zero", True)],
)  # fmt: skip
def test_impossible_values_are_refused_by_name(key, value):
    with pytest.raises(ValueError, match=rf"parallel\.{key}: is .* must"):
        ParallelConfig(**{key: value})
