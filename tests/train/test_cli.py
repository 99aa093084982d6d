"""The command `pyfast`: help, errors, and the small commands beside train."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from pyfast.cli import COMMANDS, LATER, main
from pyfast.train.arguments import parse
from pyfast.train.model import transformer_config
from pyfast.train.tokenizer import ByteTokenizer

SMALL = [
    "--model.layers",
    "1",
    "--model.width",
    "16",
    "--model.heads",
    "2",
    "--model.kv_heads",
    "2",
    "--train.sequence_length",
    "16",
    "--train.micro_batch",
    "2",
    "--train.global_batch",
    "2",
    "--parallel.tensor",
    "1",
]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return path


def error_of(capsys, *arguments: str) -> str:
    """What a failing command says: one paragraph on stderr, nothing else, and no traceback."""
    code = main(list(arguments))
    said = capsys.readouterr()
    assert code not in (0, None)
    assert said.out == "" and "Traceback" not in said.err
    assert said.err.startswith("pyfast: ") and "\n\n" not in said.err
    return " ".join(said.err.split())


def test_help_lists_every_command_and_does_not_import_torch():
    program = (
        "import sys\nfrom pyfast.cli import main\ncode = main(['--help'])\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    ready, later = done.stdout.split("Not supported yet:")
    assert all(f"  {name} " in ready and f"  {name} " not in later for name in COMMANDS)
    assert all(f"  {name} " in later and f"  {name} " not in ready for name in LATER)


def test_the_package_is_a_program_too():
    done = subprocess.run([sys.executable, "-m", "pyfast", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("pyfast ")


def test_an_unknown_command_names_those_there_are(capsys):
    text = error_of(capsys, "trian")
    assert "trian" in text and "train" in text


@pytest.mark.parametrize("name", ["verify", "plan", "bench"])
def test_commands_of_later_features_say_so_and_what_to_do_instead(capsys, name):
    assert f"{name} is not supported yet" in error_of(capsys, name)
    for option in ("--help", "-h"):
        assert main([name, option]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert said.startswith(f"pyfast {name}: ") and "Not supported yet." in said and LATER[name][1] in said


@pytest.mark.parametrize(
    "arguments, code, parts",
    [
        (["--model.layerz", "3"], 2, ["model.layerz", "Did you mean model.layers?"]),
        (["--model.layers", "0"], 2, ["model.layers = 0", "at least 1"]),
        (["--parallel.zero", "4"], 2, ["parallel.zero = 4", "allowed is 0, 1, 2, 3"]),
        (["--train.processes", "3", "--parallel.tensor", "2"], 2, ["number of ranks = 3", "multiple of 2"]),
        (
            ["--model.heads", "3", "--model.kv_heads", "3", "--model.width", "96", "--parallel.tensor", "2"],
            2,
            ["model.heads = 3", "parallel.tensor = 2"],
        ),
        (["--data.paths", "/no/such/text.txt"], 1, ["/no/such/text.txt"]),
        (["--data.tokenizer", "/no/such/tokenizer.json"], 1, ["/no/such/tokenizer.json"]),
        (["--model.vocab", "100"], 2, ["model.vocab = 100", "at least 257"]),
        (["--checkpoint.resume", "/no/such/checkpoint"], 2, ["/no/such/checkpoint"]),
    ],
)
def test_bad_input_is_found_before_any_process_starts(capsys, tmp_path, arguments, code, parts, monkeypatch):
    from pyfast.train import launcher

    monkeypatch.setattr(launcher, "start_processes", None)  # starting one would be a TypeError
    text = error_of(capsys, "train", *arguments, "--log.directory", str(tmp_path / "run"))
    for part in parts:
        assert part in text
    assert main(["train", *arguments, "--log.directory", str(tmp_path / "run")]) == code
    assert not (tmp_path / "run").exists()


def test_empty_text_is_one_paragraph(capsys, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    assert "empty" in error_of(capsys, "train", "--data.paths", str(tmp_path / "empty.txt"))


def test_too_little_text_is_one_paragraph(capsys, tmp_path, text):
    said = error_of(
        capsys,
        "train",
        *SMALL,
        "--data.paths",
        str(text),
        "--train.sequence_length",
        "4096",
        "--log.directory",
        str(tmp_path / "run"),
    )
    assert "train.sequence_length 4096" in said
    assert not (tmp_path / "run").exists()


def test_training_prints_what_it_does_and_where_it_lies(capsys, tmp_path, text):
    arguments = [*SMALL, "--data.paths", str(text), "--train.steps", "3", "--log.directory", str(tmp_path / "run")]
    assert main(["train", *arguments]) == 0
    said = capsys.readouterr().out
    for part in (
        "parameters",
        "rank 0: the whole model",
        "weight decay 0.1",
        "step 1/3",
        "step 3/3",
        " at step 1, ",
        "loss",
        "tokens/s",
        "metrics.jsonl",
        "step-00000003",
        "too early for a sample: the mean loss is 5.",
        "Next:",
        "--train.steps 6",
    ):
        assert part in said
    assert main(["train", *arguments]) == 0
    said = capsys.readouterr().out
    assert "finished already" in said and "--train.steps 6" in said and "--log.directory" in said
    assert "not supported" not in said
    assert main(["train", *arguments, "--train.steps", "2"]) == 0
    said = capsys.readouterr().out
    assert "this run is at step 3, past train.steps = 2" in said and "3 of 2" not in said and "--train.steps 6" in said


def test_a_checkpoint_becomes_a_hugging_face_model_and_back(capsys, tmp_path, text):
    transformers = pytest.importorskip("transformers")
    from pyfast.models import Transformer, TransformerConfig
    from pyfast.parallel import ParallelMesh
    from pyfast.parallel.checkpoint import CheckpointState, load, read_metadata

    arguments = [*SMALL, "--data.paths", str(text), "--train.steps", "2"]
    assert main(["train", *arguments, "--log.directory", str(tmp_path / "run")]) == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert main(["convert", str(checkpoint), str(tmp_path / "model")]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ours = Transformer(TransformerConfig(**read_metadata(checkpoint).config["transformer"]), seed=None)
    load(checkpoint, CheckpointState(dict(ours.named_parameters())), ParallelMesh.single())
    ids = torch.tensor([list(b"the quick brown")])
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)

    capsys.readouterr()
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "again")]) == 0
    assert f"--config {tmp_path}/again/model.yaml --checkpoint.resume {tmp_path}/again" in capsys.readouterr().out
    config = parse(["--config", str(tmp_path / "again" / "model.yaml"), "--train.sequence_length", "16"])
    assert transformer_config(config, ByteTokenizer()) == ours.config
    before = (tmp_path / "model" / "config.json").read_text()
    assert "exists already" in error_of(capsys, "convert", str(checkpoint), str(tmp_path / "model"))
    assert (tmp_path / "model" / "config.json").read_text() == before
    assert "does not exist" in error_of(capsys, "convert", "/no/such/thing", str(tmp_path / "x"))

    assert (
        main(
            [
                "train",
                *arguments,
                "--train.steps",
                "1",
                "--checkpoint.resume",
                str(tmp_path / "again"),
                "--log.directory",
                str(tmp_path / "tuned"),
                "--optimizer.warmup_steps",
                "0",
            ]
        )
        == 0
    )
    trained = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    tuned = json.loads((tmp_path / "tuned" / "metrics.jsonl").read_text())
    assert tuned["loss"] < trained["loss"]  # the same batch, by a model that has seen it


def test_doctor_says_what_is_there_and_what_is_missing(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for part in ("Python", "torch", "cores", "CPU kernels", "gloo", "Ready: pyfast train"):
        assert part in said


def test_doctor_reports_what_is_broken(capsys, monkeypatch):
    from pyfast import doctor

    monkeypatch.setattr(doctor, "REQUIRED", ("torch", "no-such-package"))
    assert main(["doctor"]) == 1
    assert "Broken: no-such-package" in capsys.readouterr().out


def test_prepare_writes_a_file_that_train_reads(capsys, tmp_path, text):
    assert main(["prepare", str(text), "--output", str(tmp_path / "tokens.bin"), "--processes", "1"]) == 0
    assert (
        main(
            [
                "train",
                *SMALL,
                "--data.paths",
                str(tmp_path / "tokens.bin"),
                "--train.steps",
                "1",
                "--log.directory",
                str(tmp_path / "run"),
            ]
        )
        == 0
    )
    assert main(["prepare", "/no/such", "--output", str(tmp_path / "other.bin")]) == 1
    assert "/no/such" in capsys.readouterr().err
