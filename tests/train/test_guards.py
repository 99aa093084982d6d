"""Copies of weights that part on one rank end the run on all, named with their group and rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pyfast.train.config import from_dict
from pyfast.train.errors import TrainingError
from pyfast.train.trainer import Trainer


class Drifting(Trainer):
    """One weight of rank 1 moves by one bit in `bad_step` (0: before the first)."""

    bad_step = 0

    def _drift(self) -> None:
        if self.rank == 1:
            weight = self.model.layers[0].ffn_norm.weight.data
            weight[0] = torch.nextafter(weight[0], torch.tensor(2.0))

    def _check_replicas(self, when: str) -> None:
        if self.bad_step == 0:
            self._drift()
        super()._check_replicas(when)

    def _train_step(self, step):
        metrics = super()._train_step(step)
        if step == self.bad_step:
            self._drift()
        return metrics


def error_of(rank: int, world_size: int, directory: str, tensor: int, bad_step: int, every: int | None):
    config = from_dict(
        {
            "model": {"layers": 1, "width": 16, "heads": 2, "kv_heads": 2, "ffn_width": 16},
            "data": {"paths": directory + "/text.txt"},
            "parallel": {"tensor": tensor},
            "train": {"steps": 4, "sequence_length": 16, "global_batch": 2, "check_replicas": every},
            "checkpoint": {"directory": None},
            "log": {"directory": directory + "/run"},
        }
    )
    trainer = Drifting(config, rank=rank, world_size=world_size)
    trainer.bad_step = bad_step
    try:
        trainer.fit()
    except TrainingError as error:
        return str(error)
    return None


@pytest.mark.parametrize("tensor, where", [(1, "dp group (0, 1)"), (2, "tp group (0, 1)")])
@pytest.mark.parametrize(
    "bad_step, every, when",
    [(0, None, "at the start"), (1, 2, "after step 2"), (1, None, None), (3, 4, "after step 4")],
)
def test_copies_that_differ_are_found(ranks, tmp_path, tensor, where, bad_step, every, when):
    (Path(tmp_path) / "text.txt").write_text("some words to learn, again and again. " * 20)
    errors = ranks.run(error_of, 2, str(tmp_path), tensor, bad_step, every)
    assert errors[0] == errors[1]
    if when is None:
        assert errors[0] is None
    else:
        assert errors[0].startswith(f"{when}, replicas differ. 'layers.0.ffn_norm.weight' over {where}")
        assert "rank(s) [1] differ from rank 0" in errors[0]
