"""What torchrun and Slurm say in the environment about the ranks they started."""

from __future__ import annotations

import os

from pyfast.train.errors import ConfigError, TrainingError


def joined_world() -> tuple[int, int] | None:
    """(rank, ranks) that torchrun or Slurm gave this process, None when it was started alone.

    Raises `TrainingError` for an environment that no launcher makes.
    """
    environment = os.environ
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, world_size = _number("RANK"), _number("WORLD_SIZE")
        if world_size > 1 and "MASTER_ADDR" not in environment:
            raise TrainingError("RANK and WORLD_SIZE are set but MASTER_ADDR is not: use torchrun, or unset them.")
        names = ("RANK", "WORLD_SIZE")
    elif "SLURM_PROCID" in environment and int(environment.get("SLURM_NTASKS", "1")) > 1:
        rank, world_size, names = _number("SLURM_PROCID"), _number("SLURM_NTASKS"), ("SLURM_PROCID", "SLURM_NTASKS")
    else:
        return None
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"environment variable {names[0]}", rank, f"must be from 0 to {names[1]} - 1 = {world_size - 1}"
        )
    return rank, world_size


def first_on_host() -> bool:
    """Whether this rank is the one to say what every rank of its machine finds alike, such as a wrong key."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ConfigError(
            f"environment variable {name}", os.environ[name], "must be a number, as torchrun sets it"
        ) from None
