"""The same-host transport: long tensors, agreement on the way, nothing left behind. Values: test_group.py."""

from __future__ import annotations

import os
import platform
import random
import time
from unittest import mock

import pytest
import torch
from support.ranks import run_ranks

from pyfast.comm import Group, segments, shared_memory

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the transport is used on x86_64 only")


def way_of(group: Group) -> str:
    return type(group._lane.transport(torch.empty(0))).__name__


def longer_than_a_slot(rank, world_size):
    group = Group.create("tp", range(world_size), rank=rank)
    numel = 2 * shared_memory._SLOT_BYTES // 4 + 5
    inputs = [torch.arange(numel, dtype=torch.float32) * (p + 1) for p in range(world_size)]
    total = sum(inputs[1:], inputs[0])
    x = inputs[rank].clone()
    group.all_reduce(x, name="sum")
    assert torch.equal(x, total)
    assert torch.equal(group.all_gather(inputs[rank], name="stack"), torch.stack(inputs))
    block = group.reduce_scatter(torch.stack([inputs[rank] + p for p in range(world_size)]), name="blocks")
    assert torch.equal(block, sum([i + rank for i in inputs[1:]], inputs[0] + rank))
    copied = inputs[rank].clone()
    group.broadcast(copied, src=1, name="copy")
    assert torch.equal(copied, inputs[1])
    return way_of(group)


@pytest.mark.parametrize("world_size", [2, 3])
def test_tensors_longer_than_a_slot(ranks, world_size):
    assert ranks.run(longer_than_a_slot, world_size) == ["SharedMemory"] * world_size


def any_sequence(rank, world_size, seed):
    """The same random sequence of collectives on all ranks, each rank pausing where it likes, no barrier between."""
    group = Group.create("tp", range(world_size), rank=rank)
    sequence, pauses = random.Random(seed), random.Random(seed * 100 + rank)
    for index in range(150):
        operation = sequence.choice(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
        numel, src = sequence.choice([1, 17, 5000]), sequence.randrange(world_size)
        inputs = [torch.full((numel,), float(1000 * p + index), dtype=torch.float64) for p in range(world_size)]
        if pauses.random() < 0.1:
            time.sleep(pauses.random() * 0.02)
        x = inputs[rank].clone()
        if operation == "all_reduce":
            group.all_reduce(x, name="x")
            wanted = sum(inputs)
        elif operation == "all_gather":
            x, wanted = group.all_gather(x, name="x"), torch.stack(inputs)
        elif operation == "reduce_scatter":
            x, wanted = group.reduce_scatter(x.expand(world_size, -1) * 1.0, name="x"), sum(inputs)
        elif operation == "all_to_all":
            blocks = torch.stack([inputs[rank] + q for q in range(world_size)])
            x, wanted = group.all_to_all(blocks, name="x"), torch.stack(inputs) + rank
        else:
            group.broadcast(x, src=src, name="x")
            wanted = inputs[src]
        assert torch.equal(x, wanted), (operation, index, numel)


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_sequence_without_barriers(ranks, world_size):
    ranks.run(any_sequence, world_size, 7)


def different_lengths(rank, world_size, operation):
    group = Group.create("tp", range(world_size), rank=rank)
    x = torch.ones(3, 5 if rank == 1 else 4)
    calls = {
        "all_reduce": lambda: group.all_reduce(x, name="x"),
        "all_gather": lambda: group.all_gather(x, name="x"),
        "reduce_scatter": lambda: group.reduce_scatter(x, name="x"),
        "all_to_all": lambda: group.all_to_all(x, name="x"),
        "broadcast": lambda: group.broadcast(x, src=0, name="x"),
    }
    with pytest.raises(ValueError, match="disagree on a collective's shape or dtype"):
        calls[operation]()
    total = torch.ones(2)
    group.all_reduce(total, name="afterwards")
    assert total.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
def test_different_lengths_are_seen_without_the_checked_mode(ranks, operation):
    ranks.run(different_lengths, 3, operation)


def one_rank_out_of_reach(rank, world_size):
    create = segments._create
    with mock.patch.object(segments, "_create", (lambda *_: None) if rank == 1 else create):
        group = Group.create("tp", range(world_size), rank=rank)
        x = torch.full((3,), rank + 1.0)
        group.all_reduce(x, name="x")
    return way_of(group), x.tolist()


def test_ranks_agree_on_exchanges_when_one_is_out_of_reach(ranks):
    assert ranks.run(one_rank_out_of_reach, 3) == [("Exchange", [6.0] * 3)] * 3


def foreign_segment(rank, world_size):
    """A descriptor that is not the peer's segment, as another host's process id would lead to."""
    create = segments._create

    def elsewhere(*arguments):
        os.close(create(*arguments))
        return os.open("/dev/null", os.O_RDWR)

    with mock.patch.object(segments, "_create", elsewhere if rank == 0 else create):
        return way_of(Group.create("tp", range(world_size), rank=rank))


def test_only_the_peers_own_segment_is_mapped(ranks):
    assert ranks.run(foreign_segment, 2) == ["Exchange"] * 2


def handles() -> tuple[int, int]:
    """Mapped segments and process handles of this process."""
    with open("/proc/self/maps") as maps:
        segments = sum("memfd:pyfast" in line for line in maps)
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue  # the listing's own
    return segments, sum("pidfd" in link or "memfd:pyfast" in link for link in links)


def many_groups(rank, world_size):
    counts = []
    for _ in range(6):
        group = Group.create("tp", range(world_size), rank=rank)
        for _ in range(20):
            group.all_reduce(torch.ones(1000), name="x")
        counts.append(handles())
        del group
    return counts, handles()


def test_groups_that_are_gone_hold_nothing(ranks):
    for counts, after in ranks.run(many_groups, 2):
        # Python keeps a descriptor for each mapping
        assert counts == [(2, 4)] * 6 and after == (0, 0)


def segment_names(process: str) -> set[str]:
    """Segments that a process maps, as the kernel names them."""
    try:
        with open(f"/proc/{process}/maps") as maps:
            return {line.split()[5] for line in maps if "memfd:pyfast" in line}
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()  # it has ended, or is another user's


def killed_in_an_exchange(rank, world_size, directory):
    group = Group.create("tp", range(world_size), rank=rank)
    group.barrier(name="start")
    with open(f"{directory}/{rank}", "w") as file:
        file.write("\n".join(segment_names("self")))
    group.barrier(name="written")
    os.kill(os.getpid(), 9)


def test_nothing_is_left_after_a_kill(tmp_path):
    assert run_ranks(killed_in_an_exchange, 2, str(tmp_path), dying=[0, 1]) == [None, None]
    names = set((tmp_path / "0").read_text().split()) | set((tmp_path / "1").read_text().split())
    assert len(names) == 2, "each rank's segment"
    alive = set().union(*(segment_names(process) for process in os.listdir("/proc") if process.isdigit()))
    assert not names & alive
    assert not [name for name in os.listdir("/dev/shm") if "pyfast" in name]
