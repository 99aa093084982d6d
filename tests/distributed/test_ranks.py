"""The test helper itself: failing, dying and hanging ranks become one readable failure, quickly."""

from __future__ import annotations

import os
import time

import pytest
import torch
from support.ranks import RanksFailed, run_ranks

from pyfast.comm import Group


def echo(rank, world_size, *args):
    return rank, world_size, torch.get_num_threads(), torch.empty(2), *args


def test_values_travel_both_ways(ranks):
    answers = ranks.run(echo, 3, torch.arange(3), {"a": [1, 2.5]})
    for rank, (ours, world_size, threads, empty, tensor, plain) in enumerate(answers):
        assert (ours, world_size, threads, plain) == (rank, 3, 1, {"a": [1, 2.5]})
        assert torch.equal(tensor, torch.arange(3)) and empty.isnan().all()


def raises_on_one(rank, world_size):
    if rank == 1:
        raise KeyError("the reason")
    Group.create("pair", range(world_size), rank=rank).barrier(name="never reached by rank 1")


def test_a_rank_that_raises_is_shown_with_its_traceback(ranks):
    with pytest.raises(RanksFailed) as caught:
        ranks.run(raises_on_one, 2)
    message = str(caught.value)
    assert message.index("rank 1 raised") < message.index("KeyError: 'the reason'")
    assert "in raises_on_one" in message and "rank 0" in message
    assert len(ranks.run(echo, 2)) == 2, "the pool did not recover"


def dies_on_one(rank, world_size):
    group = Group.create("pair", range(world_size), rank=rank)
    group.barrier(name="start")
    if rank == 1:
        os._exit(3)
    group.barrier(name="after the death")


def test_a_rank_that_dies_is_shown_with_its_exit_code():
    with pytest.raises(RanksFailed, match=r"rank 1 died: exit code 3[\s\S]*barrier 'after the death' of group 'pair'"):
        run_ranks(dies_on_one, 2)


def hangs_on_one(rank, world_size):
    if rank == 1:
        time.sleep(1000)


def test_a_rank_that_hangs_is_shown_with_where_it_waits():
    with pytest.raises(RanksFailed, match=r"rank 1 hung, waiting in[\s\S]*in hangs_on_one"):
        run_ranks(hangs_on_one, 2, timeout=6)


def returns_a_function(rank, world_size):
    return lambda: None


def test_a_value_that_cannot_travel_is_the_ranks_failure():
    with pytest.raises(RanksFailed, match="rank 0 raised[\\s\\S]*pickle"):
        run_ranks(returns_a_function, 1)
