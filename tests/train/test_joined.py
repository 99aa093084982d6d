"""Errors about what a launcher started: named, and said once a machine."""

from __future__ import annotations

import pytest

from pyfast.cli import main
from pyfast.train.errors import TrainingError
from pyfast.train.joined import joined_world


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)


def started(monkeypatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_process_started_alone_has_joined_nothing(monkeypatch):
    assert joined_world() is None
    started(monkeypatch, SLURM_PROCID="0", SLURM_NTASKS="1")
    assert joined_world() is None


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "variable RANK = 'x': must be a number"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "variable RANK = 2: must be from 0 .*= 1"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not"),
        ({"SLURM_PROCID": "9", "SLURM_NTASKS": "2"}, "variable SLURM_PROCID = 9"),
    ],
)
def test_an_environment_no_launcher_makes_is_one_clear_error(monkeypatch, variables, message):
    started(monkeypatch, **variables)
    with pytest.raises(TrainingError, match=message):
        joined_world()


@pytest.mark.parametrize("arguments", [["--model.layerz", "3"], ["--parallel.tensor", "2"]])
def test_what_all_ranks_find_alike_is_said_by_the_first_of_a_machine(monkeypatch, capsys, arguments):
    """A wrong key, and a layout for another number of ranks."""
    for rank in range(3):
        started(monkeypatch, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="localhost")
        assert main(["train", *arguments]) == 2
        assert capsys.readouterr().err.count("pyfast: ") == (rank == 0)
