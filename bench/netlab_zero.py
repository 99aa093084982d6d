"""How much of data-parallel communication hides behind compute, on hosts with links of a set rate.

    sudo python bench/netlab.py --hosts 2 --rate 250mbit -- python bench/netlab_zero.py
    sudo python bench/netlab.py --hosts 2 --rate 250mbit -- python bench/netlab_zero.py --stages 0 2 --rounds 9

Three things are timed in turn, the slowest rank counting: the step without any collective (compute), the collectives of
a step without anything else (communication), and the step as it is. What the last takes beyond the first is exposed.
The model is that of bench/train_step.py; choose the rate so that both take about as long.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from support import tune_allocator
from train_step import BATCH, LEARNING_RATE, MODEL, SEQUENCE, tokens

from pyfast.comm import Group, bootstrap
from pyfast.models import Transformer
from pyfast.parallel import FlatBuckets, ParallelConfig, ParallelMesh, make_buckets
from pyfast.train.config import OptimizerConfig
from pyfast.train.optimizer import make_optimizer, parameter_group


def trained(mesh: ParallelMesh, stage: int) -> tuple[FlatBuckets, Callable[[], None]]:
    """The buckets and a step of this rank's share of the batch; on a mesh of one rank nothing is sent."""
    rows = BATCH // 2
    ids, labels = (t.flatten() for t in tokens(0, rows))
    cu_seqlens = torch.arange(0, rows * SEQUENCE + 1, SEQUENCE, dtype=torch.int32)
    positions = torch.arange(SEQUENCE).repeat(rows)
    model = Transformer(MODEL, mesh=mesh, seed=0)
    buckets = make_buckets(model, mesh, stage=stage, group_of=parameter_group, bucket_bytes=4 << 20)
    optimizer = make_optimizer(buckets, OptimizerConfig(name="adamw", learning_rate=LEARNING_RATE))
    scale = torch.tensor(1.0 / (BATCH * SEQUENCE))

    def step() -> None:
        buckets.start_micro_batch(last=True)
        model.loss(ids, labels, cu_seqlens=cu_seqlens, positions=positions).backward(scale)
        buckets.end_micro_batch()
        buckets.finish()
        optimizer.step(LEARNING_RATE)

    return buckets, step


def collectives(buckets: FlatBuckets, stage: int, group: Group) -> Callable[[], None]:
    """The collectives of a step of that stage, one after the other."""
    flats = [torch.zeros(bucket.numel) for bucket in buckets.buckets]
    mine = [flat.chunk(group.size)[group.rank].clone() for flat in flats]

    def run() -> None:
        if stage == 3:
            for flat, part in zip(flats, mine, strict=True):  # forward; most of them again in backward
                group.all_gather(part, name="parameters", out=flat.view(group.size, -1))
        for flat, part in zip(flats, mine, strict=True):
            if stage == 0:
                group.all_reduce(flat, name="gradients")
            else:
                group.reduce_scatter(flat.view(group.size, -1), name="gradients", out=part)
        if stage:
            for flat, part in zip(flats, mine, strict=True):
                group.all_gather(part, name="parameters", out=flat.view(group.size, -1))

    return run


def timed(function: Callable[[], None], world: Group) -> float:
    """Seconds of the slowest rank."""
    world.barrier(name="start")
    start = time.perf_counter()
    function()
    seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    world.all_reduce(seconds, name="seconds", op="max")
    return seconds.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3], choices=range(4), help="default: all")
    parser.add_argument("--rounds", type=int, default=7, help="after two to warm up (default: 7)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tune_allocator()
    rank, world_size = bootstrap.initialize_from_environment()
    mesh = ParallelMesh.create(ParallelConfig(), rank=rank, world_size=world_size)
    world, group = mesh.group("world"), mesh.group("dp-cp")
    if rank == 0:
        print(f"{'stage':>5s} {'compute ms':>11s} {'communication ms':>17s} {'step ms':>8s} {'exposed':>21s}")
    for stage in arguments.stages:
        _, alone = trained(ParallelMesh.single(), 0)
        buckets, together = trained(mesh, stage)
        parts = (alone, collectives(buckets, stage, group), together)
        rounds = [[timed(part, world) for part in parts] for _ in range(arguments.rounds + 2)][2:]
        compute, communication, step = (statistics.median(column) for column in zip(*rounds, strict=True))
        exposed = statistics.median(row[2] - row[0] for row in rounds)
        share = exposed / min(compute, communication)
        if rank == 0:
            print(
                f"{stage:5d} {compute * 1e3:11.1f} {communication * 1e3:17.1f} {step * 1e3:8.1f} "
                f"{exposed * 1e3:8.1f} ms = {share:5.0%} of the smaller",
                flush=True,
            )
    bootstrap.shutdown()


if __name__ == "__main__":
    main()
