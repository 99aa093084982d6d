"""Group.all_reduce between two ranks on one host, through shared memory, against torch.distributed's over gloo.

This process is rank 0 and times itself; rank 1 is a process that is told, over a pipe, what to run next. Times are
wall times whatever --clock says, since waiting is what a collective costs; a call does REPEATS reductions, so that the
pipe does not count.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pyfast.comm import Group, bootstrap

REPEATS = 16
SIZES = {"4KiB": 2**10, "256KiB": 2**16, "4MiB": 2**20}
pytestmark = pytest.mark.benchmark(
    group=f"{REPEATS} all-reduces of float32 over 2 ranks, against gloo", timer=time.perf_counter
)  # fmt: skip


def join(rank: int, store: str) -> Callable[[str, int], Tensor]:
    """Become `rank` of two; returns a function that runs the reductions by one of the two ways."""
    bootstrap.initialize(rank=rank, world_size=2, store=dist.FileStore(store, 2), timeout_s=120)
    group = Group.create("pair", (0, 1), rank=rank)  # Group.wrap would not have shared memory

    def reduce(way: str, size: int) -> Tensor:
        x = torch.arange(size, dtype=torch.float32).add_(rank)
        for _ in range(REPEATS):  # the first sums, the others double: exact
            group.all_reduce(x, name="bench") if way == "pyfast" else dist.all_reduce(x)
        return x

    return reduce


def second_rank(store: str, orders: Connection) -> None:
    """Rank 1: does what it is told until it is told None."""
    torch.set_num_threads(1)
    reduce = join(1, store)
    while (order := orders.recv()) is not None:
        reduce(*order)
    bootstrap.shutdown()


@pytest.fixture(scope="module")
def reduce(tmp_path_factory) -> Iterator[Callable[[str, int], Tensor]]:
    """Runs the reductions on both ranks, returns rank 0's result."""
    store = str(tmp_path_factory.mktemp("ranks") / "store")
    orders, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=second_rank, args=(store, theirs), daemon=True)
    process.start()
    local = join(0, store)

    def run(*order) -> Tensor:
        orders.send(order)
        return local(*order)

    yield run
    orders.send(None)
    bootstrap.shutdown()
    process.join(timeout=60)
    assert process.exitcode == 0, f"rank 1 ended with exit code {process.exitcode}"


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def bench_all_reduce(race, reduce, size: int) -> None:
    race({"pyfast": lambda: reduce("pyfast", size), "torch": lambda: reduce("torch", size)}, tolerance=0.0)
