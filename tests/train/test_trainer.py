"""The training loop in one process: against transformers, through a resume, and when things go wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from pyfast.models import to_hugging_face
from pyfast.models.hugging_face_config import config_to_hugging_face
from pyfast.train.config import TrainConfig, from_dict
from pyfast.train.errors import ConfigError, NonFiniteLoss, TrainingError
from pyfast.train.lock import RunLock
from pyfast.train.metrics import MetricsWriter, StepMetrics, read
from pyfast.train.stop import Stop
from pyfast.train.trainer import FINISHED, NOTHING_TO_DO, STOPPED, Trainer

KEYS = {"step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "seconds", "memory_bytes"}


@pytest.fixture
def text(tmp_path) -> Path:
    """Documents of 5 to 60 bytes, so that rows hold several and labels are missing at different places."""
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(40):
        (folder / f"{index:02d}.txt").write_text("".join(chr(97 + (index * 7 + i * i) % 26) for i in range(5 + index)))
    return folder


def config_for(tmp_path: Path, text: Path, **sections: dict) -> TrainConfig:
    values = {
        "model": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 48},
        "data": {"paths": str(text)},
        "parallel": {"tensor": 1},
        "train": {"steps": 6, "sequence_length": 32, "micro_batch": 2, "global_batch": 4},
        "optimizer": {"warmup_steps": 2},
        "log": {"directory": str(tmp_path / "run")},
    }
    for section, keys in sections.items():
        values[section] = {**values.get(section, {}), **keys}
    return from_dict(values)


def metrics_of(config: TrainConfig) -> list[dict]:
    return read(Path(config.log.directory) / "metrics.jsonl")


def test_losses_and_gradient_norms_are_those_of_transformers_in_float64(tmp_path, text):
    """Each document piece alone through transformers' Llama, plain SGD: an oracle without packing or buckets."""
    transformers = pytest.importorskip("transformers")
    config = config_for(
        tmp_path,
        text,
        train={"steps": 4, "dtype": "float64"},
        checkpoint={"directory": None},
        optimizer={"name": "sgd", "schedule": "constant", "learning_rate": 0.5, "weight_decay": 0.0},
    )
    trainer = Trainer(config)
    trainer._set_up()
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**config_to_hugging_face(trainer.model_config), attn_implementation="eager")
    ).double()
    theirs.load_state_dict(to_hugging_face(trainer.model))
    trainer = Trainer(config)
    trainer.fit()
    for line in metrics_of(config):
        losses, count = [], 0
        for index in range(2):
            batch = trainer.dataset.batch(line["step"] - 1, index)
            for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
                logits = theirs(batch.ids[start:end].unsqueeze(0)).logits[0]
                losses.append(torch.nn.functional.cross_entropy(logits, batch.labels[start:end], reduction="sum"))
                count += int((batch.labels[start:end] != -100).sum())
        theirs.zero_grad()
        loss = sum(losses) / count
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in theirs.parameters()))
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-6)  # transformers' rotary tables are float32, as ours
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-6)
        with torch.no_grad():
            for p in theirs.parameters():
                p -= line["learning_rate"] * p.grad


def test_metrics_have_exactly_the_keys_of_the_design_and_the_loss_falls(tmp_path, text):
    config = config_for(tmp_path, text, train={"steps": 30}, optimizer={"learning_rate": 0.01})
    result = Trainer(config).fit()
    lines = metrics_of(config)
    assert all(set(line) == KEYS for line in lines)
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert lines[0]["loss"] == pytest.approx(math.log(257), abs=0.1)
    assert lines[-1]["loss"] < 4.0
    assert all(line["tokens"] == 128 for line in lines)
    assert lines[3]["tokens_per_second"] == pytest.approx(128 / lines[3]["seconds"])
    assert lines[-1]["memory_bytes"] > 50 * 2**20
    assert (result.status, result.step, result.last.loss) == (FINISHED, 30, lines[-1]["loss"])
    assert (result.recent.steps, result.recent.loss) == (7, pytest.approx(sum(x["loss"] for x in lines[-7:]) / 7))
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / "step-00000030"


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_micro_batch_does_not_change_the_run(tmp_path, text, dtype):
    tolerance = {"float32": 1e-5, "float64": 1e-10, "bfloat16": 2e-2}[dtype]
    runs = []
    for micro_batch in (1, 2, 4):
        config = config_for(
            tmp_path,
            text,
            train={"micro_batch": micro_batch, "dtype": dtype},
            optimizer={"name": "sgd", "learning_rate": 0.3, "weight_decay": 0.0},
            log={"directory": str(tmp_path / f"run{micro_batch}")},
            checkpoint={"directory": None},
        )
        Trainer(config).fit()
        runs.append(metrics_of(config))
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            assert b["loss"] == pytest.approx(a["loss"], rel=tolerance)
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=tolerance)


@pytest.mark.parametrize(
    "dtype, name",
    [("float32", "adamw"), ("bfloat16", "adamw"), ("float64", "sgd"), ("float32", "muon"), ("bfloat16", "moments")],
)
def test_a_resumed_run_has_the_same_bits_as_one_that_was_never_stopped(tmp_path, text, dtype, name):
    sections = {
        "train": {"dtype": dtype},
        "optimizer": {
            "sgd": {"name": "sgd", "momentum": 0.9},
            "moments": {"name": "adamw", "moments_dtype": "bfloat16"},
        }.get(name, {"name": name}),
        "checkpoint": {"every": 3},
    }
    whole = config_for(tmp_path, text, **sections, log={"directory": str(tmp_path / "whole")})
    Trainer(whole).fit()
    parts = config_for(tmp_path, text, **sections)
    stop = Stop()

    class StopAfter:
        """A display that asks for a stop as a person would, in the middle of step 4."""

        def start(self, *_):
            pass

        def close(self):
            pass

        def step(self, metrics):
            stop.requested = metrics.step == 4

    first = Trainer(parts, stop=stop, display=StopAfter()).fit()
    assert (first.status, first.step, first.checkpoint.name) == (STOPPED, 4, "step-00000004")
    second = Trainer(parts).fit()
    assert (second.status, second.first.step) == (FINISHED, 5)
    for a, b in zip(metrics_of(whole), metrics_of(parts), strict=True):
        assert {k: a[k] for k in ("step", "loss", "grad_norm", "learning_rate")} == {
            k: b[k] for k in ("step", "loss", "grad_norm", "learning_rate")
        }


@pytest.mark.parametrize("recompute", ["selective", ["full", "ffn"]], ids=str)
def test_recomputation_changes_no_bit_of_a_run(tmp_path, text, recompute):
    runs = []
    for word in ("none", recompute):
        directory = {"directory": str(tmp_path / str(word))}
        config = config_for(tmp_path, text, train={"steps": 3, "recompute": word}, log=directory)
        Trainer(config).fit()
        runs.append([(line["loss"], line["grad_norm"]) for line in metrics_of(config)])
    assert runs[0] == runs[1]


def test_lines_of_steps_that_are_done_again_are_moved_not_lost(tmp_path, text):
    config = config_for(tmp_path, text, checkpoint={"every": 2, "keep_last": None})
    Trainer(config).fit()
    before = metrics_of(config)
    for step in (4, 6):  # as after a crash in step 6, before its checkpoint
        directory = tmp_path / "run" / "checkpoints" / f"step-{step:08d}"
        if step == 6:
            directory.rename(tmp_path / "elsewhere")
    Trainer(config).fit()
    after = metrics_of(config)
    assert [line["step"] for line in after] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in after] == [line["loss"] for line in before]
    assert read(tmp_path / "run" / "metrics-replaced-1.jsonl") == before[4:]


def test_a_finished_run_does_nothing_and_more_steps_go_on(tmp_path, text):
    config = config_for(tmp_path, text)
    Trainer(config).fit()
    before = metrics_of(config)
    again = Trainer(config).fit()
    assert (again.status, again.step) == (NOTHING_TO_DO, 6)
    assert metrics_of(config) == before
    more = Trainer(config_for(tmp_path, text, train={"steps": 8})).fit()
    assert (more.status, more.first.step, more.last.step) == (FINISHED, 7, 8)


def test_resume_never_refuses_to_write_over_a_run(tmp_path, text):
    Trainer(config_for(tmp_path, text)).fit()
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="there is a run already.*Nothing is written over"):
        Trainer(config_for(tmp_path, text, checkpoint={"resume": "never"})).fit()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_named_checkpoint_starts_another_run(tmp_path, text):
    first = Trainer(config_for(tmp_path, text)).fit()
    config = config_for(
        tmp_path,
        text,
        train={"steps": 8},
        checkpoint={"resume": str(first.checkpoint)},
        log={"directory": str(tmp_path / "other")},
    )
    assert Trainer(config).fit().first.step == 7
    with pytest.raises(ConfigError, match="holds later checkpoints"):
        Trainer(config).fit()


@pytest.mark.parametrize("given", [None, 1])
def test_the_micro_batch_is_recorded_as_it_was_and_may_change(tmp_path, text, given):
    from pyfast.parallel import read_metadata

    first = Trainer(config_for(tmp_path, text, train={"micro_batch": None})).fit()
    assert read_metadata(first.checkpoint).config["train"]["micro_batch"] == 4
    more = Trainer(config_for(tmp_path, text, train={"micro_batch": given, "steps": 8})).fit()
    assert (more.status, more.first.step) == (FINISHED, 7)


@pytest.mark.parametrize(
    "sections, message",
    [
        ({"model": {"width": 64}}, "another model.*model.width is 64, in the checkpoint 32"),
        ({"model": {"qk_norm": True}}, "another model.*model.qk_norm is true, in the checkpoint false"),
        ({"train": {"steps": 8}, "optimizer": {"name": "sgd", "momentum": 0.9}}, "optimizer.name = 'sgd'.*of adamw"),
        ({"checkpoint": {"resume": "/no/such/place"}}, "checkpoint.resume = '/no/such/place'"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_clear_error(tmp_path, text, sections, message):
    Trainer(config_for(tmp_path, text)).fit()
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(TrainingError, match=message):
        Trainer(config_for(tmp_path, text, **sections)).fit()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_momentum_needs_a_checkpoint_with_momentum(tmp_path, text):
    Trainer(config_for(tmp_path, text, optimizer={"name": "sgd", "momentum": 0.9})).fit()
    with pytest.raises(ConfigError, match="optimizer.momentum = 0.0.*optimizer state of 0.9"):
        Trainer(config_for(tmp_path, text, train={"steps": 8}, optimizer={"name": "sgd"})).fit()


def test_a_run_holds_its_directories_and_lets_them_go(tmp_path, text, monkeypatch):
    monkeypatch.setattr("pyfast.train.lock.PATIENCE_SECONDS", 0.0)
    other = RunLock({"log.directory": tmp_path / "run"})
    other.take()
    with pytest.raises(TrainingError, match="Another run"):
        Trainer(config_for(tmp_path, text)).fit()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    other.release()
    Trainer(config_for(tmp_path, text)).fit()
    RunLock({"log.directory": tmp_path / "run"}).take_existing()


def test_a_checkpoint_directory_that_is_a_file_is_found_before_training(tmp_path, text):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ConfigError, match="checkpoint.directory = .*file.*cannot be written to"):
        Trainer(config_for(tmp_path, text, checkpoint={"directory": str(tmp_path / "file")})).fit()
    assert not (tmp_path / "run" / "metrics.jsonl").exists() and (tmp_path / "file").read_text() == "precious"


def test_a_checkpoint_of_another_tokenizer_is_refused(tmp_path, text, monkeypatch):
    from pyfast.train import tokenizer

    Trainer(config_for(tmp_path, text)).fit()
    monkeypatch.setattr(tokenizer.ByteTokenizer, "fingerprint", "another")
    with pytest.raises(TrainingError, match="another tokenizer"):
        Trainer(config_for(tmp_path, text)).fit()


class Notes:
    """A display that keeps what is said at the start."""

    said: tuple[str, ...] = ()

    def start(self, trainer, start, moved_to):
        self.said = start.notices

    def step(self, metrics):
        pass

    def close(self):
        pass


def test_what_changed_since_the_checkpoint_is_said(tmp_path, text):
    Trainer(config_for(tmp_path, text)).fit()
    (text / "more.txt").write_text("more text than there was")
    notes = Notes()
    Trainer(config_for(tmp_path, text, train={"steps": 8}, optimizer={"learning_rate": 0.1}), display=notes).fit()
    assert "train.steps 6 -> 8" in notes.said[0] and "optimizer.learning_rate 0.003 -> 0.1" in notes.said[0]
    assert "data are not those of the checkpoint" in notes.said[1]


def test_a_directory_that_cannot_be_written_is_one_clear_error(tmp_path, text):
    (tmp_path / "run").write_text("a file is in the way")
    with pytest.raises(TrainingError, match=str(tmp_path / "run")):
        Trainer(config_for(tmp_path, text)).fit()


def test_a_damaged_checkpoint_is_one_clear_error(tmp_path, text):
    often = {"every": 2}
    result = Trainer(config_for(tmp_path, text, checkpoint=often)).fit()
    file = next(result.checkpoint.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    advice = rf"(?s){file.name}.*move .*{result.checkpoint.name} away.*goes on from step-"
    with pytest.raises(TrainingError, match=advice) as caught:
        Trainer(config_for(tmp_path, text, train={"steps": 8}, checkpoint=often)).fit()
    before = str(caught.value).rstrip(".").rsplit(" ", 1)[1]
    result.checkpoint.rename(tmp_path / "away")
    again = Trainer(config_for(tmp_path, text, train={"steps": 8}, checkpoint=often)).fit()
    assert again.status == FINISHED and again.first.step == int(before.removeprefix("step-")) + 1


def test_a_non_finite_loss_names_the_step_and_keeps_the_checkpoint(tmp_path, text):
    config = config_for(
        tmp_path,
        text,
        train={"steps": 40},
        checkpoint={"every": 1},
        optimizer={"name": "sgd", "learning_rate": 1e12, "warmup_steps": 0, "schedule": "constant"},
    )
    with pytest.raises(NonFiniteLoss) as caught:
        Trainer(config).fit()
    lines = metrics_of(config)
    failed = lines[-1]["step"] + 1
    assert f"Step {failed}:" in str(caught.value)
    assert "first parameter with a non-finite gradient is " in str(caught.value)
    assert f"The checkpoint of step {failed - 1} is kept" in str(caught.value)
    assert (tmp_path / "run" / "checkpoints" / f"step-{failed - 1:08d}").is_dir()
    assert all(math.isfinite(line["loss"]) for line in lines)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"data": {"paths": "/no/such/file.txt"}}, "/no/such/file.txt"),
        ({"data": {"tokenizer": "/no/such/tokenizer.json"}}, "/no/such/tokenizer.json"),
        ({"model": {"vocab": 100}}, "model.vocab = 100: must be at least 257"),
        ({"train": {"sequence_length": 5000}}, "fewer than one row of train.sequence_length 5000"),
        ({"model": {"max_positions": 8}}, "model.max_positions = 8"),
    ],
)
def test_data_that_do_not_fit_are_one_clear_error_and_nothing_is_written(tmp_path, text, change, message):
    with pytest.raises(TrainingError, match=message) as caught:
        Trainer(config_for(tmp_path, text, **change)).fit()
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_empty_text_is_one_clear_error(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(TrainingError, match="empty"):
        Trainer(config_for(tmp_path, tmp_path / "empty.txt")).fit()


def test_clipping_bounds_the_update(tmp_path, text):
    """With SGD, rate 1 and clip_norm c the first step moves the weights by exactly c."""
    config = config_for(
        tmp_path,
        text,
        train={"steps": 1, "dtype": "float64"},
        checkpoint={"directory": None},
        optimizer={
            "name": "sgd",
            "learning_rate": 1.0,
            "weight_decay": 0.0,
            "clip_norm": 0.01,
            "schedule": "constant",
            "warmup_steps": 0,
        },
    )
    still = Trainer(config)
    still._set_up()
    start = {name: p.detach().clone() for name, p in still.model.named_parameters()}
    trainer = Trainer(config)
    trainer.fit()
    moved = math.sqrt(
        sum(float((p.detach() - start[name]).square().sum()) for name, p in trainer.model.named_parameters())
    )
    assert moved == pytest.approx(0.01, rel=1e-9)
    assert metrics_of(config)[0]["grad_norm"] > 0.1  # the norm that is written is the one before clipping


def test_a_step_makes_no_sync_it_does_not_need(tmp_path, text):
    """One process: a step communicates nothing at all."""
    from pyfast import comm

    with comm.record() as events:
        Trainer(config_for(tmp_path, text, checkpoint={"directory": None})).fit()
    assert events == []


def test_a_line_that_a_crash_cut_short_is_moved_aside(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(StepMetrics(1, 2.0, 1.0, 0.1, 10, 5.0, 2.0, 100))
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    writer = MetricsWriter(tmp_path, last_step=1)
    writer.write(StepMetrics(2, 1.5, 1.0, 0.1, 10, 5.0, 2.0, 100))
    writer.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert (tmp_path / "metrics-replaced-1.jsonl").read_text() == '{"step": 2, "lo'
