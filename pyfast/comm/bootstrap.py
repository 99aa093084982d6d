"""Joining and leaving the job: the default process group of this process, and the store its ranks meet in."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch.distributed as dist


def initialize(
    *,
    rank: int,
    world_size: int,
    store: dist.Store | None = None,
    backend: str = "gloo",
    timeout_s: float = 600.0,
    loopback: bool = True,
) -> None:
    """Make this process rank `rank` of `world_size`. With one rank it does nothing: one process needs no network.

    Args:
        store: where the ranks meet, such as a `torch.distributed.FileStore` (no listening server). None: the address in
            MASTER_ADDR and MASTER_PORT, as torchrun sets them.
        backend: "gloo" for CPU tensors, "nccl" for GPU tensors, "cpu:gloo,cuda:nccl" for both.
        timeout_s: seconds after which a collective that some rank has not reached fails on the others.
        loopback: all ranks are on this host, so gloo listens on the loopback interface only.

    Raises:
        ValueError: `rank` outside 0..world_size-1, or no store and no MASTER_ADDR.
        RuntimeError: the default process group exists already.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank: is {rank} with world_size {world_size}, must be 0 <= rank < world_size")
    if timeout_s <= 0:
        raise ValueError(f"timeout_s: is {timeout_s}, must be > 0 seconds")
    if world_size == 1:
        return
    if dist.is_initialized():
        raise RuntimeError("torch.distributed is initialized already; call pyfast.comm.bootstrap.shutdown() first")
    if store is None and "MASTER_ADDR" not in os.environ:
        raise ValueError("store: is None and MASTER_ADDR is not set; give a store, or start the ranks with torchrun")
    if loopback and "gloo" in backend:
        # torch reads the interface from its own variable only; a user's choice stays
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group(
        backend, rank=rank, world_size=world_size, store=store, timeout=timedelta(seconds=timeout_s)
    )


def initialize_from_environment(*, backend: str = "gloo", timeout_s: float = 600.0) -> tuple[int, int]:
    """Join the job that torchrun or Slurm describes in the environment; returns (rank, world size), (0, 1) if none.

    Reads RANK and WORLD_SIZE (torchrun), else SLURM_PROCID and SLURM_NTASKS; the latter needs MASTER_ADDR and
    MASTER_PORT exported by the job script.
    """
    environment = os.environ
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        on_this_host = int(environment.get("LOCAL_WORLD_SIZE", "0"))
    elif "SLURM_PROCID" in environment and "SLURM_NTASKS" in environment and "MASTER_ADDR" in environment:
        rank, world_size = int(environment["SLURM_PROCID"]), int(environment["SLURM_NTASKS"])
        on_this_host = world_size if environment.get("SLURM_NNODES", "") == "1" else 0
    else:
        rank, world_size, on_this_host = 0, 1, 1
    loopback = on_this_host == world_size
    initialize(rank=rank, world_size=world_size, backend=backend, timeout_s=timeout_s, loopback=loopback)
    return rank, world_size


def shutdown() -> None:
    """Leave the job: destroy every process group of this process. Does nothing when none was made."""
    if dist.is_initialized():
        dist.destroy_process_group()


def world_store() -> dist.Store | None:
    """The store the ranks of the default process group met in; None when there is none."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
