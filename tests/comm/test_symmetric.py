"""Symmetric memory: values, late ranks, overlapping epochs, disagreement, death, and what is left afterwards."""

from __future__ import annotations

import gc
import os
import time

import pytest
import torch

from pyfast.comm import Group


def memory_of(rank, world_size, timeout_s=20.0):
    group = Group.create("tp", range(world_size), rank=rank, timeout_s=timeout_s)
    return group, group.symmetric()


def exchanged(memory, step, numel):
    """One epoch: every rank's numbers, read in place by all."""
    epoch = memory.open(f"numbers of step {step}", numel, 8 * numel)
    mine = torch.arange(numel, dtype=torch.float64) + 1000 * memory.rank + step
    epoch.buffer(memory.rank, mine.dtype, mine.shape).copy_(mine)
    epoch.signal(0)
    rows = []
    for rank, length in enumerate(epoch.lengths):
        epoch.wait(rank, 0)
        rows.append(epoch.buffer(rank, mine.dtype, (length,)).clone())
    epoch.close()
    return rows


def late_and_growing(rank, world_size):
    _, memory = memory_of(rank, world_size)
    for step in range(24):
        if step % 8 == 3 * rank:
            time.sleep(0.05)  # late, in the middle of its peers' waiting
        numel = (step * 37 + 11 * rank) % 53 * (10_000 if step == 12 else 1)
        for peer, row in enumerate(exchanged(memory, step, numel)):
            length = (step * 37 + 11 * peer) % 53 * (10_000 if step == 12 else 1)
            assert torch.equal(row, torch.arange(length, dtype=torch.float64) + 1000 * peer + step)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_values_with_late_ranks_and_growing_slots(ranks, world_size):
    ranks.run(late_and_growing, world_size)


def two_open_at_once(rank, world_size):
    _, memory = memory_of(rank, world_size)
    for step in range(30):
        first, second = memory.open("first", 1, 8), memory.open("second", 1, 8)
        for epoch, sign in ((first, 1), (second, -1)):
            epoch.buffer(rank, torch.int64, (1,)).fill_(sign * (100 * rank + step))
            epoch.signal(1)
        if step % 7 == rank:
            time.sleep(0.01)
        for epoch, sign in ((second, -1), (first, 1)):  # closed in the other order
            for peer in range(world_size):
                epoch.wait(peer, 1)
                assert epoch.buffer(peer, torch.int64, (1,)).item() == sign * (100 * peer + step)
            epoch.close()


def test_two_epochs_are_open_at_once(ranks):
    ranks.run(two_open_at_once, 3)


def disagreeing(rank, world_size):
    _, memory = memory_of(rank, world_size)
    with pytest.raises(ValueError) as error:
        memory.open(f"matmul of float{32 if rank else 64}" + " wide" * 100 * (rank == 2), 3, 24)
    exchanged(memory, 5, 7)  # the group goes on
    return str(error.value)


def test_disagreement_is_the_same_error_everywhere_and_harms_nothing(ranks):
    first, *others = ranks.run(disagreeing, 3)
    assert "rank 0: matmul of float64; rank 1: matmul of float32; rank 2: matmul of float32 wide wide" in first
    assert all(other == first for other in others)


def dying(rank, world_size, where):
    group, memory = memory_of(rank, world_size)
    exchanged(memory, 0, 100)
    place = group.announce("some_operation", "layer 3", torch.zeros(3))
    if rank == 1 and where == "before":
        os.kill(os.getpid(), 9)

    def step():
        epoch = memory.open("numbers", 3, 24)
        if rank == 1:
            time.sleep(0.1)
            os.kill(os.getpid(), 9)
        epoch.wait(1, 2)

    start = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        group.guard(place, step)
    return str(error.value), time.monotonic() - start


@pytest.mark.parametrize("where", ["before", "during"])
def test_death_of_a_rank_is_named_at_once(ranks, where):
    answers = ranks.run(dying, 3, where, dying=[1])
    for text, seconds in (answers[0], answers[2]):
        assert "some_operation 'layer 3' of group 'tp'" in text and seconds < 5
        assert "rank 1" in text and ("has ended" in text or "given up" in text)
        assert where == "before" or "chunk 2" in text


def late(rank, world_size):
    group, memory = memory_of(rank, world_size, timeout_s=0.5)
    exchanged(memory, 0, 10)
    if rank == 0:
        time.sleep(2)
        return ""
    with pytest.raises(RuntimeError) as error:
        group.guard(group.announce("op", "x", torch.zeros(1)), lambda: memory.open("numbers", 1, 8))
    return str(error.value)


def test_a_late_rank_is_named_after_the_timeout(ranks):
    text = ranks.run(late, 2)[1]
    assert "op 'x'" in text and "rank 0" in text and "within 0.5 s" in text


def segments() -> tuple[int, int]:
    """Mapped segments of this process, and its descriptors of segments and processes."""
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd:pyfast" in line for line in maps)
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    links = [os.readlink(path) for path in paths if os.path.lexists(path)]  # the listing's own is gone
    return mapped, sum("pidfd" in link or "memfd:pyfast" in link for link in links)


def level(rank, world_size):
    gc.collect()  # groups that tracebacks of other tests still hold
    counts = []
    for _ in range(3):
        _, memory = memory_of(rank, world_size)
        for step in range(40):
            exchanged(memory, step, (7, 64, 1, 300_000, 200)[step % 5])
        counts.append(segments())
        del memory, _
    return counts, segments()


def test_steps_and_groups_leave_nothing_behind(ranks):
    for counts, after in ranks.run(level, 2):
        # flags and two slots of two ranks, for each of which Python keeps a descriptor; and two processes
        assert counts == [(6, 8)] * 3 and after == (0, 0)
    assert not [name for name in os.listdir("/dev/shm") if "pyfast" in name]
