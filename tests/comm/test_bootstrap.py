"""Joining a job: what one process needs, what the environment says, what is refused."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist
from support.ranks import run_ranks

from pyfast.comm import bootstrap


@pytest.fixture
def clean_environment(monkeypatch):
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "SLURM_PROCID",
        "SLURM_NTASKS",
    ):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_one_process_joins_nothing(clean_environment):
    assert bootstrap.initialize_from_environment() == (0, 1)
    bootstrap.initialize(rank=0, world_size=1)
    assert not dist.is_initialized() and bootstrap.world_store() is None
    bootstrap.shutdown()


def test_impossible_places_are_refused(clean_environment):
    with pytest.raises(ValueError, match="rank: is 2 with world_size 2"):
        bootstrap.initialize(rank=2, world_size=2)
    with pytest.raises(ValueError, match="timeout_s: is 0"):
        bootstrap.initialize(rank=0, world_size=2, timeout_s=0)
    with pytest.raises(ValueError, match="start the ranks with torchrun"):
        bootstrap.initialize(rank=0, world_size=2)


def test_torchrun_and_slurm_variables_are_read(clean_environment):
    seen = []
    clean_environment.setattr(bootstrap, "initialize", lambda **arguments: seen.append(arguments))
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        clean_environment.setenv(name, value)
    assert bootstrap.initialize_from_environment(timeout_s=5) == (3, 8)
    clean_environment.setenv("LOCAL_WORLD_SIZE", "8")
    bootstrap.initialize_from_environment()
    clean_environment.delenv("RANK")
    for name, value in {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "MASTER_ADDR": "10.0.0.1"}.items():
        clean_environment.setenv(name, value)
    assert bootstrap.initialize_from_environment() == (1, 2)
    assert [(a["rank"], a["world_size"], a["loopback"]) for a in seen] == [(3, 8, False), (3, 8, True), (1, 2, False)]


def listening(rank, world_size):
    """Addresses this process listens on, from the kernel's tables."""
    import os

    inodes = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/self/net/{table}").readlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                addresses.append(fields[1].split(":")[0])
    return addresses


def test_gloo_listens_on_loopback_only():
    loopback = {f"{int.from_bytes(socket.inet_aton('127.0.0.1'), 'little'):08X}", "00000000000000000000000001000000"}
    for addresses in run_ranks(listening, 2):
        assert set(addresses) <= loopback
