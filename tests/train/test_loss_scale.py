"""Dynamic loss scaling: torch.amp.GradScaler as oracle for the scale, and float16 runs of the real Trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pyfast.train.config import RunConfig, from_dict, resolve
from pyfast.train.errors import ConfigError, NonFiniteLoss
from pyfast.train.loss_scale import LossScale
from pyfast.train.metrics import read
from pyfast.train.trainer import Trainer


def config_for(directory: Path, **sections: dict):
    text = directory / "text"
    if not text.exists():
        text.mkdir(parents=True)
        for index in range(40):
            letters = (chr(97 + (index * 7 + i * i) % 26) for i in range(9 + index))
            (text / f"{index:02d}.txt").write_text("".join(letters))
    values = {
        "model": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 4, "ffn_width": 48},
        "data": {"paths": str(text)},
        "parallel": {"tensor": 1},
        "train": {"steps": 6, "sequence_length": 32, "micro_batch": 1, "global_batch": 4, "dtype": "float16"},
        "optimizer": {"warmup_steps": 0, "schedule": "constant", "clip_norm": 1.0},
        "checkpoint": {"directory": None},
        "log": {"directory": str(directory / "run")},
    }
    for section, keys in sections.items():
        values[section] = {**values[section], **keys}
    return from_dict(values)


def lines_of(config) -> list[dict]:
    return read(Path(config.log.directory) / "metrics.jsonl")


@pytest.mark.parametrize("interval", [1, 3])
def test_the_scale_moves_like_that_of_torchs_grad_scaler(interval):
    overflows = [False, True, False, False, False, False, True, True, False, False, False, False, False]
    ours = LossScale(1024.0, interval)
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=interval)
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for overflow in overflows:
        assert ours.scale == theirs.get_scale()
        theirs.scale(parameter.sum())  # it makes its tensors when first used
        parameter.grad = torch.tensor([1.0, float("inf") if overflow else 1.0, 0.0])
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflow)


def test_the_scale_stays_within_its_limits():
    scale = LossScale(2.0, 1)
    scale.update(True)
    assert scale.exhausted
    scale.update(True)
    assert scale.scale == 1.0
    for _ in range(40):
        scale.update(False)
    assert scale.scale == 2.0**32
    with pytest.raises(ValueError, match="scale is 3.0; a power of two"):
        LossScale(3.0)
    with pytest.raises(ValueError, match="interval is 0"):
        LossScale(2.0, 0)


def test_float16_follows_the_float32_run(tmp_path):
    losses = {}
    for dtype in ("float32", "float16"):
        config = config_for(tmp_path, train={"dtype": dtype, "steps": 20}, log={"directory": str(tmp_path / dtype)})
        trainer = Trainer(config)
        trainer.fit()
        lines = lines_of(config)
        losses[dtype] = [(line["loss"], line["grad_norm"]) for line in lines]
    assert trainer.model.norm.weight.dtype == torch.float16
    assert {(line["loss_scale"], line["skipped"]) for line in lines} == {(65536.0, False)}
    assert losses["float32"][-1][0] < losses["float32"][0][0] - 1.0
    for exact, found in zip(losses["float32"], losses["float16"], strict=True):
        assert found == pytest.approx(exact, rel=2e-2)


def test_gradients_are_unscaled_with_the_scale_of_their_backward(tmp_path):
    """With an interval of 1 the scale doubles after every step; the run must not notice."""
    losses = []
    for name, scale in (("still", {}), ("moving", {"loss_scale": 16.0, "loss_scale_interval": 1})):
        config = config_for(tmp_path, train=scale, log={"directory": str(tmp_path / name)})
        Trainer(config).fit()
        lines = lines_of(config)
        losses.append([line["loss"] for line in lines])
    assert [line["loss_scale"] for line in lines] == [16.0 * 2**step for step in range(6)]
    assert losses[1] == pytest.approx(losses[0], rel=3e-3)


class Watched(Trainer):
    """Makes a gradient overflow in given steps on one rank, and keeps the weights' bits before every step."""

    bad_steps, bad_rank, parameter = (), 0, "layers.1.ffn.down.weight"

    def _train_step(self, step):
        self.before = getattr(self, "before", [])
        self.before.append({name: p.detach().clone() for name, p in self.model.named_parameters()})
        hook = None
        if step in self.bad_steps and self.rank == self.bad_rank:
            weight = dict(self.model.named_parameters())[self.parameter]
            hook = weight.register_hook(lambda grad: grad * float("inf"))
        try:
            return super()._train_step(step)
        finally:
            if hook is not None:
                hook.remove()


def overflow_on_one_rank(rank: int, world_size: int, directory: str, tensor: int, bad_rank: int, parameter: str):
    config = config_for(Path(directory), parallel={"tensor": tensor})
    trainer = Watched(config, rank=rank, world_size=world_size)
    trainer.bad_steps, trainer.bad_rank, trainer.parameter = (2, 4), bad_rank, parameter
    trainer.fit()
    weights = [*trainer.before, {name: p.detach() for name, p in trainer.model.named_parameters()}]
    moved = [any(not torch.equal(a[name], b[name]) for name in a) for a, b in zip(weights, weights[1:], strict=False)]
    return moved, trainer.loss_scale.scale, trainer.optimizer.steps


@pytest.mark.parametrize(
    "tensor, bad_rank, parameter", [(2, 1, "layers.1.ffn.down.weight"), (2, 2, "norm.weight"), (1, 3, "norm.weight")]
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks, tmp_path, tensor, bad_rank, parameter):
    config_for(tmp_path)  # writes the text once
    results = ranks.run(overflow_on_one_rank, 4, str(tmp_path), tensor, bad_rank, parameter)
    for result in results:
        assert result == ([True, False, True, False, True, True], 65536.0 / 4, 4)
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert [line["skipped"] for line in lines] == [False, True, False, True, False, False]
    assert [line["loss_scale"] for line in lines] == [65536, 65536, 32768, 32768, 16384, 16384]
    assert lines[1]["grad_norm"] is None  # JSON has no infinity


def test_the_scale_is_in_the_checkpoint_and_the_resumed_run_has_the_same_bits(tmp_path):
    scale = {"loss_scale": 2.0**40, "loss_scale_interval": 3}  # overflows at first
    sections = {"checkpoint": {"directory": "auto", "every": 5}}
    whole = config_for(tmp_path, train={**scale, "steps": 25}, **sections, log={"directory": str(tmp_path / "whole")})
    Trainer(whole).fit()
    assert {line["skipped"] for line in lines_of(whole)} == {False, True}
    for steps in (14, 25):
        Trainer(config_for(tmp_path, train={**scale, "steps": steps}, **sections)).fit()
    keys = ("step", "loss", "grad_norm", "loss_scale", "skipped")
    parts = lines_of(config_for(tmp_path))
    assert [[line[key] for key in keys] for line in parts] == [[line[key] for key in keys] for line in lines_of(whole)]


def test_an_overflow_at_the_smallest_scale_ends_the_run_and_names_the_parameter(tmp_path):
    trainer = Watched(config_for(tmp_path, train={"loss_scale": 2.0}))
    trainer.bad_steps = (1, 2)
    with pytest.raises(NonFiniteLoss, match="Step 2: .*layers.1.ffn.down.weight.*not applied"):
        trainer.fit()


def test_metrics_stay_valid_json(tmp_path):
    trainer = Watched(config_for(tmp_path, train={"steps": 2}))
    trainer.bad_steps = (1,)
    trainer.fit()

    def refuse(word):
        raise AssertionError(word)

    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


@pytest.mark.parametrize(
    "train, match",
    [
        ({"dtype": "float32", "loss_scale": 2.0}, "train.loss_scale = 2.*not used with train.dtype = float32"),
        ({"dtype": "bfloat16", "loss_scale_interval": 2}, "train.loss_scale_interval = 2.*bfloat16"),
        ({"dtype": "float16", "loss_scale": 3.0}, "train.loss_scale = 3.*power of two"),
    ],
)
def test_keys_of_the_scale_are_checked(tmp_path, train, match):
    with pytest.raises(ConfigError, match=match):
        resolve(config_for(tmp_path, train=train), 1)
    assert RunConfig(dtype="float16").dtype == "float16"
