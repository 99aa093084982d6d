"""Collectives against the same sums and stacks computed in one process."""

from __future__ import annotations

import pytest
import torch

from pyfast.comm import Group, record
from pyfast.parallel import ParallelConfig, ParallelMesh

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]
SHAPES = [(), (1,), (3,), (0, 4), (7, 5), (331, 257)]


def world(rank: int, world_size: int, *, checked: bool = True, timeout_s: float | None = None) -> Group:
    config = ParallelConfig(tensor=world_size)
    mesh = ParallelMesh.create(config, rank=rank, world_size=world_size, checked=checked, timeout_s=timeout_s)
    return mesh.group("tp")


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return (torch.randn(shape, generator=generator) * 10).to(dtype)


def every_collective(rank, world_size, checked):
    group = world(rank, world_size, checked=checked)
    results = []
    for dtype in DTYPES:
        for shape in SHAPES:
            x = values(rank, shape, dtype)
            total, largest, elsewhere = x.clone(), x.clone(), torch.empty_like(x)
            group.all_reduce(total, name="total")
            group.all_reduce(largest, name="largest", op="max")
            group.all_reduce(x, name="elsewhere", out=elsewhere)
            works = [group.all_reduce(x.clone(), name=f"flight {i}", async_op=True) for i in range(3)]
            in_flight = [work.wait() for work in works]
            stacked = group.all_gather(x, name="stack")
            blocks = torch.stack([values(10 * rank + p, shape, dtype) for p in range(world_size)])
            block = group.reduce_scatter(blocks, name="blocks")
            copied = x.clone()
            group.broadcast(copied, src=world_size - 1, name="copied")
            assert torch.equal(x, values(rank, shape, dtype)), "an input changed"
            results.append((total, largest, elsewhere, *in_flight, stacked, block, copied))
    group.barrier(name="end")
    assert group.all_gather_object({"rank": rank}, name="objects") == [{"rank": p} for p in range(world_size)]
    return results


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("checked", [False, True])
def test_every_collective_equals_one_process(ranks, world_size, checked):
    answers = ranks.run(every_collective, world_size, checked)
    cases = [(dtype, shape) for dtype in DTYPES for shape in SHAPES]
    for index, (dtype, shape) in enumerate(cases):
        inputs = [values(rank, shape, dtype) for rank in range(world_size)]
        total = rank_order_sum(inputs)
        for rank in range(world_size):
            results = answers[rank][index]
            blocks = [values(10 * p + rank, shape, dtype) for p in range(world_size)]
            expected = [total, torch.stack(inputs).amax(0), *[total] * 4, torch.stack(inputs), rank_order_sum(blocks)]
            for result, wanted in zip(results, [*expected, inputs[-1]], strict=True):
                assert result.dtype == dtype and torch.equal(result, wanted), (dtype, shape, rank)


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


def test_wrap_takes_a_torch_process_group(ranks):
    assert all(torch.equal(x, torch.full((3,), 6.0)) for x in ranks.run(wrapped, 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g, x: g.all_reduce(x, name="x", op="mean"), "op: is 'mean'"),
        (lambda g, x: g.all_reduce(x, name="x", out=x.double()), "out: is torch.float64"),
        (lambda g, x: g.reduce_scatter(x, name="x"), "first dimension must be the 1 ranks"),
        (lambda g, x: g.broadcast(x, src=1, name="x"), "src: is 1"),
        (lambda g, x: g.all_gather(x, name="x", out=x), "out: is torch.float32"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(Group.single(), torch.zeros(3, 2))
