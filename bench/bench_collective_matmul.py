"""The collective matmuls between two ranks on one host against a collective of gloo, then a product.

`product` is the same product without any communication: what the op's time cannot be below. `plain` is this package's
own collective through shared memory, then a product. This process is rank 0 and times itself; rank 1 is a process that
is told, over a pipe, what to run next. Times are wall times, since waiting is what a collective costs.
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

from pyfast import ops
from pyfast.comm import Group, bootstrap

WIDTH, OUT = 1024, 1024  # of the whole input, and of each rank's output (gathering) or of the whole output
ROWS = (2, 16, 64, 2048)  # of the whole
CANDIDATES = ("pyfast", "gloo", "product", "plain")
pytestmark = pytest.mark.benchmark(
    group="collective matmuls of float32 over 2 ranks, against gloo, then a product", timer=time.perf_counter
)  # fmt: skip


class Rank:
    """One of two ranks: runs an op on its own numbers, in any of the ways."""

    def __init__(self, rank: int, store: str) -> None:
        bootstrap.initialize(rank=rank, world_size=2, store=dist.FileStore(store, 2), timeout_s=120)
        self.rank, self.group = rank, Group.create("pair", (0, 1), rank=rank)
        self.inputs: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def run(self, op: str, way: str, rows: int) -> Tensor:
        """The result on this rank. One call for `product` of the ops that sum gives the partial sum."""
        if rows not in self.inputs:
            torch.manual_seed(rows)
            x, w = torch.randn(rows, WIDTH), torch.randn(2, OUT, WIDTH) / 32
            self.inputs[rows] = x, w[self.rank].clone(), w[0].chunk(2, 1)[self.rank].clone()
        x, column, row = self.inputs[rows]
        if op == "all_gather_matmul":
            return self.gather(way, x, x.chunk(2)[self.rank], column)
        return self.sum(op, way, x.chunk(2, 1)[self.rank].contiguous(), row)

    def gather(self, way: str, whole: Tensor, x: Tensor, w: Tensor) -> Tensor:
        if way == "pyfast":
            return ops.all_gather_matmul(x, w, self.group)
        if way == "gloo":
            gathered = torch.empty_like(whole)
            dist.all_gather_into_tensor(gathered, x)
            return ops.linear(gathered, w)
        if way == "plain":
            return ops.linear(self.group.all_gather(x, name="x").view_as(whole), w)
        return ops.linear(whole, w)

    def sum(self, op: str, way: str, x: Tensor, w: Tensor) -> Tensor:
        if way == "pyfast":
            return getattr(ops, op)(x, w, self.group)
        y = ops.linear(x, w)
        if way == "product":
            return y
        if op == "matmul_all_reduce":
            dist.all_reduce(y) if way == "gloo" else self.group.all_reduce(y, name="y")
            return y
        if way == "plain":
            return self.group.reduce_scatter(y.view(2, -1, OUT), name="y")
        out = torch.empty(len(x) // 2, OUT)
        dist.reduce_scatter_tensor(out, y)
        return out


def second_rank(store: str, orders: Connection) -> None:
    """Rank 1: does what it is told until it is told None."""
    torch.set_num_threads(1)
    rank = Rank(1, store)
    while (order := orders.recv()) is not None:
        rank.run(*order)
    bootstrap.shutdown()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[Callable[[str, str, int], Tensor]]:
    """Runs an op on both ranks, returns rank 0's result."""
    store = str(tmp_path_factory.mktemp("ranks") / "store")
    orders, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=second_rank, args=(store, theirs), daemon=True)
    process.start()
    local = Rank(0, store)

    def both(*order) -> Tensor:
        orders.send(order)
        return local.run(*order)

    yield both
    orders.send(None)
    bootstrap.shutdown()
    process.join(timeout=60)
    assert process.exitcode == 0, f"rank 1 ended with exit code {process.exitcode}"


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def bench_collective_matmul(race, run, op: str, rows: int) -> None:
    result = run(op, "gloo", rows)

    def product() -> Tensor:
        run(op, "product", rows)
        return result  # a partial sum is not what the others give

    candidates = {way: (lambda way=way: run(op, way, rows)) for way in CANDIDATES}
    race(candidates | {"product": product}, tolerance=1e-5)
