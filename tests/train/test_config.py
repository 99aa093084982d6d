"""Keys, their limits, and the errors a person reads: key, value, what is allowed, the closest key."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import yaml

from pyfast.parallel import ParallelConfig
from pyfast.train.arguments import all_keys, format_help, parse
from pyfast.train.config import TrainConfig, from_dict, resolve, settings_to_show, to_dict, with_default_layout
from pyfast.train.errors import ConfigError, TrainingError

EXAMPLES = Path(__file__).parents[2] / "examples"

DESIGN_KEYS = """
model layers width heads kv_heads head_size ffn_width vocab tied_embeddings qk_norm rope_theta window
model experts experts_per_token expert_width shared_experts moe_every aux_loss_weight z_loss_weight capacity_factor
data paths tokenizer mask_prompt
parallel tensor context pipeline virtual_pipeline data expert expert_tensor zero sequence_parallel schedule
parallel layers_per_stage order context_method
train steps sequence_length micro_batch global_batch dtype seed recompute processes
optimizer name learning_rate schedule warmup_steps weight_decay clip_norm lr_scaling reference_batch
checkpoint directory every keep_last resume asynchronous
log directory every prometheus tensorboard timeline
"""


def error_of(*arguments: str, ranks: int | None = None) -> str:
    with pytest.raises(TrainingError) as caught:
        config = parse(arguments)
        resolve(config, ranks or config.processes)
    assert caught.value.exit_code == 2
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_every_key_of_the_design_exists():
    for line in DESIGN_KEYS.strip().splitlines():
        section, *keys = line.split()
        for key in keys:
            assert f"{section}.{key}" in all_keys()


def test_the_default_is_two_tensor_parallel_processes():
    assert parse([]) == TrainConfig()
    config = with_default_layout(parse([]))
    assert (config.parallel.tensor, config.processes) == (2, 2)
    assert resolve(config, 2).parallel.data == 1


@pytest.mark.parametrize(
    "arguments, layout",
    [
        (["--parallel.data", "2"], ParallelConfig(tensor=1, data=2)),
        (["--train.processes", "2"], ParallelConfig(tensor=1, data=2)),
        (["--parallel.tensor", "1"], ParallelConfig(tensor=1, data=1)),
        (["--model.heads", "3", "--model.kv_heads", "3", "--model.width", "96"], ParallelConfig(tensor=1, data=1)),
        (["--model.kv_heads", "1"], ParallelConfig(tensor=1, data=1)),
        (["--parallel.order", "dp-tp-cp-pp"], ParallelConfig(tensor=2, data=1, order="dp-tp-cp-pp")),
    ],
)
def test_who_asks_for_a_layout_gets_no_more_than_that(arguments, layout):
    config = with_default_layout(parse([*arguments, "--train.micro_batch", "1"]))
    assert resolve(config, config.processes).parallel == layout


def test_a_file_and_the_command_line_set_keys_and_the_later_one_wins(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: {layers: 7, rope_theta: 1e6}\ndata: {paths: [a.txt, b.txt]}\noptimizer: {clip_norm: 1.0}\n")
    config = parse(["--config", str(file), "--model.layers", "3", "--log.directory=out"])
    assert (config.model.layers, config.model.rope_theta, config.log.directory) == (3, 1e6, "out")
    assert config.data.path_list() == ["a.txt", "b.txt"]
    assert config.optimizer.clip_norm == 1.0
    assert parse(["--model.layers", "3", "--config", str(file)]).model.layers == 7


def test_a_config_that_does_not_mention_clipping_clips_nothing():
    assert parse([]).optimizer.clip_norm is None
    assert "optimizer.clip_norm" not in settings_to_show(parse([]))


def test_the_settings_that_are_shown_differ_from_the_defaults_or_change_the_maths_unseen():
    always = "steps sequence_length micro_batch global_batch dtype seed".split()
    maths = "learning_rate schedule warmup_steps final_fraction weight_decay".split()
    expected = [f"train.{name}" for name in always] + [f"optimizer.{name}" for name in maths]
    assert sorted(settings_to_show(resolve(parse(["--model.layers", "3", "--parallel.tensor", "1"]), 1))) == sorted(
        expected
    )
    config = from_dict({"optimizer": {"schedule": "constant"}})
    assert "optimizer.final_fraction" not in settings_to_show(config)


@pytest.mark.parametrize("name", sorted(all_keys()))
def test_every_key_that_is_set_is_shown(name):
    """But the model's sizes, which have a line of their own."""
    sizes = {f"model.{key}" for key in ("layers", "width", "heads", "kv_heads", "head_size", "ffn_width", "vocab")}
    section, key = name.split(".")
    base = TrainConfig()
    copy = object.__new__(type(getattr(base, section)))  # past the checks: some keys are not supported yet
    for other in dataclasses.fields(copy):
        object.__setattr__(copy, other.name, getattr(getattr(base, section), other.name))
    object.__setattr__(copy, key, "something")
    shown = settings_to_show(dataclasses.replace(base, **{section: copy}))
    assert shown.get(name) == (None if name in sizes else "something")


def test_the_printed_config_is_the_config(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["--model.layers", "5", "--data.paths", "[a, b]", "--print_config"])
    assert caught.value.code == 0
    config = from_dict(yaml.safe_load(capsys.readouterr().out))
    assert config == parse(["--model.layers", "5", "--data.paths", "[a, b]"])


def test_a_config_survives_being_written_as_a_dictionary():
    config = parse(["--model.qk_norm", "true", "--parallel.data", "4", "--optimizer.name", "sgd"])
    assert from_dict(to_dict(config)) == config


def test_help_has_one_entry_a_key_with_default_and_limits(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in all_keys():
        assert text.count(f"--{name} ") == 1
    assert "at least 1" in text and "adamw | sgd" in text and "[pyfast-run]" in text
    assert max(map(len, format_help(120).splitlines())) <= 120


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["--model.layers", "three"], ["model.layers", "'three'", "integer, at least 1"]),
        (["--model.layers", "0"], ["model.layers", "= 0", "at least 1"]),
        (["--model.layers", "2.5"], ["model.layers", "2.5", "integer"]),
        (["--train.dtype", "int8"], ["train.dtype", "'int8'", "float32 | bfloat16 | float16 | float64"]),
        (["--optimizer.learning_rate", "-1"], ["optimizer.learning_rate", "-1", "at least 0"]),
        (["--optimizer.learning_rate", "nan"], ["optimizer.learning_rate", "nan"]),
        (["--optimizer.clip_norm", "0"], ["optimizer.clip_norm", "greater than 0"]),
        (["--parallel.tensor", "0"], ["parallel.tensor", "= 0", "at least 1"]),
        (["--parallel.order", "tp-dp"], ["parallel.order", "'tp-dp'", "tp, cp, pp and dp"]),
        (["--model.layerz", "3"], ["model.layerz", "Did you mean model.layers?"]),
        (["--steps", "3"], ["steps", "Did you mean train.steps?"]),
        (["--modell.layers", "3"], ["modell.layers", "Did you mean model.layers?"]),
        (["extra"], ["extra: no key stands before it", "--data.paths extra."]),
        (["a.txt", "b.txt"], ["a.txt: no key", "--data.paths '[a.txt, b.txt]'."]),
        (["it's.txt"], ["it's.txt: no key", "--data.paths"]),
        (["run.yaml"], ["run.yaml: no key", "--config run.yaml."]),
        (["--train.steps", "5", "mine.txt"], ["mine.txt: no key", "--data.paths mine.txt."]),
        (["mine.txt", "--train.steps", "5"], ["mine.txt: no key", "--data.paths mine.txt."]),
        (["--model.heads", "5", "--model.kv_heads", "2"], ["model.kv_heads", "= 2", "model.heads = 5"]),
        (["--model.width", "100", "--model.heads", "6"], ["model.heads", "= 6", "model.width = 100"]),
        (["--optimizer.momentum", "0.9"], ["optimizer.momentum", "not used", "adamw"]),
        (["--optimizer.name", "sgd", "--optimizer.beta1", "0.8"], ["optimizer.beta1", "not used", "sgd"]),
        (["--optimizer.lr_scaling", "linear"], ["optimizer.reference_batch", "must be given"]),
        (["--optimizer.name", "sgd", "--optimizer.moments_dtype", "bfloat16"], ["optimizer.moments_dtype", "not used"]),
        (["--train.dtype", "float64", "--optimizer.moments_dtype", "bfloat16"], ["moments_dtype", "float64"]),
        (["--optimizer.muon_steps", "3"], ["optimizer.muon_steps", "not used", "adamw"]),
        (["--optimizer.groups", "{'(': {rate: 1}}"], ["optimizer.groups", "no regular expression"]),
        (["--optimizer.groups", "{norm: {lr: 1}}"], ["optimizer.groups", "weight_decay, rate, rule"]),
        (["--optimizer.groups", "{norm: {rate: -1}}"], ["optimizer.groups", "rate -1", "at least 0"]),
        (["--optimizer.groups", "{norm: {rule: muon}}"], ["optimizer.groups", "with optimizer.name = muon"]),
        (["--train.recompute", "some"], ["train.recompute = 'some'", "none, full, selective"]),
        (["--train.recompute", "[full, none]"], ["train.recompute", "names 2 layers, the model has 4"]),
        (["--train.recompute_every", "2"], ["train.recompute_every", "not used with train.recompute = none"]),
        (["--train.offload_activations", "true"], ["train.offload_activations", "GPUs"]),
        (
            ["--train.global_batch", "6", "--train.micro_batch", "4"],
            ["train.global_batch = 6", "multiple of", "4 x 1", "Give --train.micro_batch 3."],
        ),
        (
            ["--train.processes", "3"],
            ["train.global_batch = 8", "data-parallel ranks = 3", "Give --train.global_batch 9."],
        ),
        (
            ["--train.processes", "3", "--train.micro_batch", "2"],
            ["train.global_batch = 8", "data-parallel ranks = 3", "Give --train.global_batch 12."],
        ),
    ],
)
def test_a_wrong_key_or_value_is_one_paragraph_that_names_it(arguments, parts):
    text = error_of(*arguments)
    for part in parts:
        assert part in text


def test_a_bare_name_with_spaces_is_one_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my text.txt").write_text("words")
    assert "--data.paths 'my text.txt'." in error_of("my text.txt")


@pytest.mark.parametrize(
    "content, parts",
    [
        ("model: {layerz: 3}", ["model.layerz", "Did you mean model.layers?"]),
        ("model: {layers: [3]}", ["model.layers", "[3]", "integer"]),
        ("modell: {layers: 3}", ["modell.layers", "Did you mean model.layers?"]),
        ("model: [", ["is not YAML", "line 1"]),
    ],
)
def test_a_wrong_file_is_one_paragraph(tmp_path, content, parts):
    file = tmp_path / "run.yaml"
    file.write_text(content)
    text = error_of("--config", str(file))
    for part in parts:
        assert part in text


def test_a_missing_file_is_named():
    assert "/no/such/file.yaml" in error_of("--config", "/no/such/file.yaml")


@pytest.mark.parametrize(
    "key, value",
    [
        ("model.experts", "8"),
        ("model.aux_loss_weight", "0.01"),
        ("model.capacity_factor", "1.25"),
        ("parallel.context", "2"),
        ("parallel.pipeline", "2"),
        ("parallel.virtual_pipeline", "2"),
        ("parallel.expert", "2"),
        ("parallel.expert_tensor", "2"),
        ("parallel.sequence_parallel", "true"),
        ("parallel.schedule", "1f1b"),
        ("parallel.layers_per_stage", "[2, 2]"),
        ("parallel.context_method", "ring"),
        ("checkpoint.asynchronous", "true"),
        ("log.prometheus", "9000"),
        ("log.tensorboard", "true"),
        ("log.timeline", "true"),
    ],
)
def test_keys_of_later_features_are_refused_and_never_ignored(key, value):
    text = error_of(f"--{key}", value)
    assert "not supported yet" in text and key in text


def test_neutral_values_of_later_keys_are_accepted():
    parse(
        [
            "--parallel.sequence_parallel",
            "false",
            "--parallel.zero",
            "0",
            "--train.recompute",
            "null",
            "--model.experts",
            "0",
            "--parallel.pipeline",
            "1",
        ]
    )


@pytest.mark.parametrize(
    "arguments, ranks, parts",
    [
        (["--parallel.tensor", "2"], 3, ["3", "multiple of 2"]),
        (["--parallel.tensor", "2", "--parallel.data", "2"], 2, ["2", "= 4"]),
        (
            ["--parallel.tensor", "1", "--parallel.data", "3", "--train.global_batch", "9", "--train.micro_batch", "1"],
            4,
            ["4", "3"],
        ),
    ],
)
def test_the_number_of_ranks_must_be_the_product_of_the_layout(arguments, ranks, parts):
    text = error_of(*arguments, ranks=ranks)
    for part in parts:
        assert part in text


def test_ranks_that_are_left_become_data_parallel():
    config = parse(["--train.micro_batch", "1", "--parallel.tensor", "2"])
    assert resolve(config, 8).parallel == ParallelConfig(tensor=2, data=4)
    assert resolve(parse(["--train.micro_batch", "1"]), 8).parallel == ParallelConfig(tensor=1, data=8)
    assert parse(["--train.processes", "4"]).processes == 4


@pytest.mark.parametrize(
    "batch, ranks, expected",
    [(8, 1, 8), (8, 2, 4), (8, 8, 1), (12, 1, 6), (26, 1, 2), (13, 1, 1), (96, 2, 8), (7, 1, 7), (10**12 + 39, 1, 1)],
)
def test_the_micro_batch_that_is_not_given_divides_each_rank_s_share(batch, ranks, expected):
    config = parse(["--train.global_batch", str(batch), "--parallel.tensor", "1", "--parallel.data", str(ranks)])
    resolved = resolve(config, ranks)
    assert config.train.micro_batch is None and resolved.train.micro_batch == expected
    assert resolve(resolved, ranks) == resolved


@pytest.mark.parametrize(
    "key, heads",
    [
        ("model.heads", ["--model.heads", "3", "--model.kv_heads", "3", "--model.width", "96"]),
        ("model.kv_heads", ["--model.kv_heads", "1"]),
    ],
)
def test_heads_must_divide_over_the_tensor_parallel_ranks(key, heads):
    text = error_of(*heads, "--parallel.tensor", "2")
    assert key in text and "parallel.tensor = 2" in text


def test_a_config_made_in_python_is_checked_alike():
    with pytest.raises(ConfigError, match="model.layers.*'4'.*integer"):
        dataclasses.replace(TrainConfig().model, layers="4")
    with pytest.raises(ConfigError, match="not supported yet"):
        dataclasses.replace(TrainConfig().model, experts=4)


def test_errors_survive_the_way_between_processes():
    import pickle

    for arguments in (["--model.layers", "0"], ["--model.experts", "8"], ["--model.layerz", "1"]):
        with pytest.raises(TrainingError) as caught:
            parse(arguments)
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (type(copy), str(copy), copy.exit_code) == (type(caught.value), str(caught.value), 2)


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_examples_are_valid(name):
    config = parse(["--config", str(EXAMPLES / name)])
    assert resolve(config, max(config.processes, 2)).parallel.data >= 1


def from_file(tmp_path, content: str | bytes) -> list[str]:
    file = tmp_path / "run.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return ["--config", str(file)]


@pytest.mark.parametrize(
    "content, parts",
    [
        ("- a\n- b\n", ["must be a mapping", "list"]),
        ("some words", ["must be a mapping"]),
        ("train:\n\tsteps: 3\n", ["line 2", "not with tabs"]),
        ("train: {steps: 3", ["is not YAML", "line"]),
        ("train: {steps: 3}\n---\ntrain: {steps: 4}\n", ["is not YAML", "document"]),
        ("!!python/object/apply:os.system ['true']", ["is not YAML"]),
        (b"train: {steps: \xff}", ["is not UTF-8", "byte 15"]),
        (b"\0\1", ["is not YAML"]),
        ("train:\n  steps: 3\n  seed: 1\n  steps: 5\n", ["train.steps is given twice", "lines 2 and 4"]),
        ("train: {steps: 3}\nmodel: {}\ntrain: {seed: 5}\n", ["train is given twice", "lines 1 and 3"]),
        ("train: {steps: 3}\ntrain.steps: 4\n", ["train.steps is given twice"]),
        ("train: &a {steps: *a}\n", ["train.steps"]),
        ("train:\n", ["train = null", "leave the section out"]),
        ("train: 3\n", ["train = 3", "mapping"]),
        ("train: [1]\n", ["train = [1]", "mapping"]),
        ("1: 2\n", ["there is no key 1", "Sections"]),
        ("config: other.yaml\n", ["config", "more than once"]),
        ("train: {steps: [3]}", ["train.steps = [3]", "integer"]),
        ("train: {steps: 3.0}", ["train.steps = 3.0", "integer"]),
        ("train: {steps: 1e2}", ["train.steps", "integer"]),
        ("train: {steps: true}", ["train.steps = true", "integer"]),
        ("train: {steps: null}", ["train.steps = null", "integer"]),
        ("train: {steps: 99999999999999999999}", ["train.steps = 99999999999999999999", "no more than"]),
        ("model: {rope_scaling: 3}", ["model.rope_scaling = 3", "mapping or null"]),
        ("optimizer: {learning_rate: .nan}", ["optimizer.learning_rate = nan", "at least 0"]),
        ("optimizer: {learning_rate: .inf}", ["optimizer.learning_rate = inf", "at least 0"]),
        ("data: {paths: []}", ["data.paths = []", "at least one"]),
        ("log: {directory: ''}", ["log.directory = ''", "must not be empty"]),
    ],
)
def test_a_file_of_the_wrong_form_is_one_error(tmp_path, content, parts):
    text = error_of(*from_file(tmp_path, content))
    for part in parts:
        assert part in text
    assert "<unicode string>" not in text and "Parser key" not in text and "Union" not in text


@pytest.mark.parametrize("content", ["", "# train: {steps: 3}\n", "{}\n", "\n---\n"])
def test_a_file_without_keys_sets_nothing(tmp_path, content):
    assert parse(from_file(tmp_path, content)) == TrainConfig()


def test_numbers_need_no_dot_and_files_may_carry_a_mark_or_crlf(tmp_path):
    assert parse(from_file(tmp_path, "optimizer: {learning_rate: 1e-3}")).optimizer.learning_rate == 1e-3
    assert parse(from_file(tmp_path, "optimizer: {learning_rate: '1e-3'}")).optimizer.learning_rate == 1e-3
    assert parse(from_file(tmp_path, b"\xef\xbb\xbftrain:\r\n  steps: 3\r\n")).train.steps == 3


@pytest.mark.parametrize("path", ["", "missing.yaml", ".", os.devnull])
def test_a_config_that_is_no_file_is_one_error(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    text = error_of("--config", path)
    assert repr(path) in text and "Give the path of a YAML file" in text


def test_keys_are_not_abbreviated():
    """A key that a later version adds must not change what a command line means."""
    assert "Did you mean train.steps?" in error_of("--train.step", "5")
    assert "conf: there is no such key" in error_of("--conf", "run.yaml")


def test_no_is_neutral_for_what_is_not_built_yet():
    assert parse(["--log.tensorboard", "false", "--log.timeline", "false"])
    assert "not supported yet" in error_of("--log.timeline", "true")


def test_zero_ranks_says_what_it_cannot_do():
    data = ("--parallel.data", "4", "--parallel.zero_ranks")
    assert parse([*data, "2", "--parallel.zero", "3"]).parallel.zero_ranks == 2
    assert "parallel.zero = 0" in error_of(*data, "2")
    assert "from 2 on" in error_of(*data, "1", "--parallel.zero", "1")
    assert "parallel.compression" in error_of(*data, "2", "--parallel.zero", "1", "--parallel.compression", "bf16")
    assert "must divide the 4 data-parallel ranks" in error_of(*data, "3", "--parallel.zero", "1")
    with pytest.raises(ConfigError, match="must divide the 4 data-parallel ranks"):
        resolve(parse(["--parallel.zero_ranks", "3", "--parallel.zero", "1"]), 4)


def test_compression_says_what_it_cannot_do():
    data = ("--parallel.data", "2", "--parallel.compression")
    assert parse([*data, "bf16"]).parallel.compression == "bf16"
    assert "parallel.compression" in error_of(*data, "zip") and "one_bit" in error_of(*data, "zip")
    assert "changes their scale" in error_of(*data, "one_bit", "--train.dtype", "float16")
    assert "allowed is none" in error_of(*data, "bf16", "--train.dtype", "float64")
