"""Collectives against the same sums and stacks computed in one process."""

from __future__ import annotations

import itertools
import platform

import pytest
import torch

from pyfast.comm import Group, record
from pyfast.parallel import ParallelConfig, ParallelMesh

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]
SHAPES = [(), (1,), (3,), (0, 4), (7, 5), (331, 257), (613, 701)]


def world(rank: int, world_size: int, *, checked: bool = True, shared_memory: bool = True) -> Group:
    config = ParallelConfig(tensor=world_size)
    mesh = ParallelMesh.create(config, rank=rank, world_size=world_size, checked=checked, shared_memory=shared_memory)
    return mesh.group("tp")


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return (torch.randn(shape, generator=generator) * 10).to(dtype)


def every_collective(rank, world_size, checked, shared_memory):
    """Compared here: the ranks can make each other's inputs, and sending results to the parent takes longer."""
    group = world(rank, world_size, checked=checked, shared_memory=shared_memory)
    # gloo's sends take a scheduler's turn each when ranks outnumber cores: fewer shapes there
    for dtype, shape in itertools.product(DTYPES, SHAPES if shared_memory else SHAPES[::2]):
        inputs = [values(p, shape, dtype) for p in range(world_size)]
        blocks = [torch.stack([values(10 * p + q, shape, dtype) for q in range(world_size)]) for p in range(world_size)]
        x, total = inputs[rank].clone(), rank_order_sum(inputs)
        summed, largest, elsewhere = x.clone(), x.clone(), torch.empty_like(x)
        group.all_reduce(summed, name="total")
        group.all_reduce(largest, name="largest", op="max")
        group.all_reduce(x, name="elsewhere", out=elsewhere)
        works = [group.all_reduce(x * i, name=f"flight {i}", async_op=True) for i in (1, 0, 1)]
        flights = [work.wait() for work in works]
        copied = x.clone()
        group.broadcast(copied, src=world_size - 1, name="copied")
        pairs = {
            "total": (summed, total),
            "largest": (largest, torch.stack(inputs).amax(0)),
            "elsewhere": (elsewhere, total),
            "in flight": (torch.stack(flights), torch.stack([total, total * 0, total])),
            "all_gather": (group.all_gather(x, name="stack"), torch.stack(inputs)),
            "reduce_scatter": (
                group.reduce_scatter(blocks[rank], name="blocks"),
                rank_order_sum([block[rank] for block in blocks]),
            ),
            "all_to_all": (
                group.all_to_all(blocks[rank], name="exchange"),
                torch.stack([block[rank] for block in blocks]),
            ),
            "broadcast": (copied, inputs[-1]),
            "the input": (x, inputs[rank]),
        }
        for what, (ours, wanted) in pairs.items():
            assert ours.dtype == dtype and torch.equal(ours, wanted), (what, dtype, shape, rank)
    group.barrier(name="end")
    assert group.all_gather_object({"rank": rank}, name="objects") == [{"rank": p} for p in range(world_size)]
    return type(group._lane.transport(torch.empty(0))).__name__


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("checked", "shared_memory"), [(False, False), (False, True), (True, True)])
def test_every_collective_equals_one_process(ranks, world_size, checked, shared_memory):
    ways = ranks.run(every_collective, world_size, checked, shared_memory)
    expected = "SharedMemory" if shared_memory and platform.machine() == "x86_64" else "Exchange"
    assert ways == [expected] * world_size


def rank_order_sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The sum in rank order, half precision in float32 and rounded once."""
    wide = torch.float32 if tensors[0].dtype in (torch.bfloat16, torch.float16) else tensors[0].dtype
    total = tensors[0].to(wide)
    for tensor in tensors[1:]:
        total = total + tensor.to(wide)
    return total.to(tensors[0].dtype)


def strided(rank, world_size):
    group = world(rank, world_size)
    x = values(rank, (6, 4), torch.float32)
    view = x.t()
    group.all_reduce(view, name="strided")
    return x, group.all_gather(values(rank, (6, 4), torch.float32)[:, 1], name="column")


def test_strided_tensors_are_reduced_in_place(ranks):
    inputs = [values(rank, (6, 4), torch.float32) for rank in range(2)]
    for x, column in ranks.run(strided, 2):
        assert torch.equal(x, inputs[0] + inputs[1])
        assert torch.equal(column, torch.stack([x[:, 1] for x in inputs]))


def test_group_of_one_needs_no_torch_distributed(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("torch.distributed was used")

    for name in ("all_reduce", "isend", "irecv", "new_group", "all_gather_object", "broadcast"):
        monkeypatch.setattr(torch.distributed, name, refuse)
    group = Group.single()
    x = torch.arange(6.0).view(2, 3)
    with record() as events:
        assert group.all_reduce(x, name="x") is None
        assert torch.equal(group.all_reduce(x, name="x", async_op=True).wait(), torch.arange(6.0).view(2, 3))
        assert torch.equal(group.all_gather(x, name="x"), x[None])
        assert torch.equal(group.reduce_scatter(x[None], name="x"), x)
        assert torch.equal(group.all_to_all(x[None], name="x"), x[None])
        out = torch.empty_like(x)
        group.all_reduce(x, name="x", out=out)
        assert torch.equal(out, x)
        group.broadcast(x, src=0, name="x")
        group.barrier(name="x")
        assert group.all_gather_object(3, name="x") == [3]
    assert events == []
    assert Group.wrap(group) is group and Group.wrap(None).size == 1
    with pytest.raises(TypeError, match="group: is a int"):
        Group.wrap(3)


def counted(rank, world_size):
    group = world(rank, world_size)
    with record() as outer, record() as events:
        group.all_reduce(torch.zeros(4, 2), name="layer 3 attention.output")
        group.all_gather(torch.zeros(3, dtype=torch.bfloat16), name="gather")
    group.barrier(name="not recorded")
    assert outer == events
    return [(e.operation, e.name, e.group, e.bytes, e.dtype, e.shape) for e in events]


def test_record_lists_collectives(ranks):
    expected = [
        ("all_reduce", "layer 3 attention.output", "tp", 32, "float32", (4, 2)),
        ("all_gather", "gather", "tp", 6, "bfloat16", (3,)),
    ]
    assert ranks.run(counted, 2) == [expected, expected]


def wrapped(rank, world_size):
    group = Group.wrap(torch.distributed.group.WORLD)
    x = torch.full((3,), float(rank + 1))
    group.all_reduce(x, name="wrapped")
    assert group.ranks == tuple(range(world_size)) and group.rank == rank
    return x


def found_again(rank, world_size):
    group = world(rank, world_size)
    process_group = group.process_group
    assert Group.wrap(process_group) is group and Group.named(process_group.group_name) is group
    assert Group.wrap(torch.distributed.group.WORLD) is not group
    del group
    other = Group.named(process_group.group_name)
    other.barrier(name="wrapped anew")
    return other.ranks


def test_the_group_of_a_process_group_is_found(ranks):
    assert ranks.run(found_again, 2) == [(0, 1)] * 2


def test_wrap_takes_a_torch_process_group(ranks):
    assert all(torch.equal(x, torch.full((3,), 6.0)) for x in ranks.run(wrapped, 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g, x: g.all_reduce(x, name="x", op="mean"), "op: is 'mean'"),
        (lambda g, x: g.all_reduce(x, name="x", out=x.double()), "out: is torch.float64"),
        (lambda g, x: g.reduce_scatter(x, name="x"), "first dimension must be the 1 ranks"),
        (lambda g, x: g.all_to_all(x, name="x"), "first dimension must be the 1 ranks"),
        (lambda g, x: g.broadcast(x, src=1, name="x"), "src: is 1"),
        (lambda g, x: g.all_gather(x, name="x", out=x), "out: is torch.float32"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(Group.single(), torch.zeros(3, 2))
