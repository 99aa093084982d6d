"""Every key of a training run: frozen dataclasses, checked when they are made.

A field carries its own help line and its own limits, so the command line, `--help`, the checks and the errors all come
from one place. A key of a feature that is not built yet is marked `later` and refused unless it is neutral.
"""

from __future__ import annotations

import dataclasses
import math
import os
import types
import typing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pyfast.nn.recompute import layer_kinds
from pyfast.parallel.config import COMPRESSIONS, ZERO_STAGES, ParallelConfig
from pyfast.train.errors import ConfigError, NotSupportedYet, yaml_word
from pyfast.train.parameter_groups import check_groups

LARGEST_DEFAULT_MICRO_BATCH = 8
LARGEST_INTEGER = 2**63 - 1  # what a tensor, a file and a generator's seed can hold
Dtype = Literal["float32", "bfloat16", "float16", "float64"]


def key(
    default: Any,
    text: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    later: bool = False,
    later_values: tuple = (),
) -> Any:
    """A config field: its default, its help line, its limits (`least` <= value <= `most`, value > `above`).

    later: refused unless equal to the default. later_values: single values that are refused.
    """
    limits = {"help": text, "least": least, "above": above, "most": most, "later": later, "later_values": later_values}
    return field(default=default, metadata=limits)


@dataclass(frozen=True)
class _Section:
    """A group of keys; `section` is the part before the dot."""

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        hints = field_types(type(self))
        for item in dataclasses.fields(self):
            check_value(f"{self.section}.{item.name}", getattr(self, item.name), hints[item.name], item)


@dataclass(frozen=True)
class ModelConfig(_Section):
    """The decoder-only transformer (Llama, Qwen and Mistral style)."""

    section: ClassVar[str] = "model"
    layers: int = key(4, "decoder layers", least=1)
    width: int = key(192, "width of the residual stream", least=1)
    heads: int = key(6, "query heads", least=1)
    kv_heads: int | None = key(2, "key/value heads, a divisor of heads; null = as many as heads", least=1)
    head_size: int | None = key(None, "size of one head, even; null = width / heads", least=2)
    ffn_width: int | None = key(None, "inner width of the feed-forward; null = 8/3 of width, in steps of 64", least=1)
    vocab: int | None = key(None, "vocabulary size; null = the tokenizer's", least=1)
    tied_embeddings: bool = key(False, "one matrix for the embedding and the head")
    qk_norm: bool = key(False, "RMSNorm on each head's query and key (Qwen3)")
    rope_theta: float = key(10000.0, "base of the rotary frequencies", above=0.0)
    norm_eps: float = key(1e-6, "epsilon of every RMSNorm", least=0.0)
    attention_bias: bool = key(False, "bias on the query, key and value projections (Qwen2)")
    attention_output_bias: bool = key(False, "bias on the attention's output projection")
    ffn_bias: bool = key(False, "biases in the feed-forward")
    rope_scaling: dict[str, Any] | None = key(
        None, "stretched positions: kind (linear, llama3, yarn), factor, and the keys of that kind"
    )
    max_positions: int | None = key(None, "longest sequence the model can read; null = train.sequence_length", least=1)
    residual_dtype: Literal["float32"] | None = key(
        None, "float32 keeps the residual stream in float32 over bfloat16; null = train.dtype"
    )
    window: int | None = key(None, "tokens a query sees, itself included; null = all before it", least=1)
    experts: int = key(0, "experts of a mixture-of-experts layer", later=True)
    experts_per_token: int | None = key(None, "experts each token is sent to", later=True)
    expert_width: int | None = key(None, "inner width of one expert", later=True)
    shared_experts: int = key(0, "experts every token is sent to", later=True)
    moe_every: int | None = key(None, "every n-th layer has experts", later=True)
    aux_loss_weight: float = key(0.0, "weight of the load-balancing loss", later=True)
    z_loss_weight: float = key(0.0, "weight of the router's z loss", later=True)
    capacity_factor: float | None = key(None, "slots of an expert over its fair share", later=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        kv_heads = self.kv_heads or self.heads
        if self.heads % kv_heads:
            raise ConfigError("model.kv_heads", kv_heads, f"must divide model.heads = {self.heads}")
        if self.head_size is None and self.width % self.heads:
            raise ConfigError(
                "model.heads", self.heads, f"must divide model.width = {self.width}", hint="Or give model.head_size."
            )
        size = self.head_size or self.width // self.heads
        if size % 2:
            raise ConfigError("model.head_size", size, "must be even, because rotary positions turn pairs")


@dataclass(frozen=True)
class DataConfig(_Section):
    """The text that is trained on."""

    section: ClassVar[str] = "data"
    paths: str | list[str] | None = key(
        None, "text files, directories, .jsonl or prepared files; null = the Python standard library's source"
    )
    tokenizer: str = key("byte", "byte, or the path of a Hugging Face tokenizer.json")
    end_token: str | int | None = key(
        None, "token (text or id) that ends a document; null = the one the tokenizer's files name"
    )
    mask_prompt: bool = key(False, "no loss on the prompt of .jsonl lines with prompt and completion")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.paths == []:
            raise ConfigError(
                "data.paths", [], "must name at least one path", hint="null stands for the standard library's source."
            )

    def path_list(self) -> list[str] | None:
        """The paths as a list; None stands for the default text."""
        return [self.paths] if isinstance(self.paths, str) else self.paths


@dataclass(frozen=True)
class RunConfig(_Section):
    """How long, how much at a time, in which number format, on how many processes."""

    section: ClassVar[str] = "train"
    steps: int = key(400, "optimizer steps of the whole run", least=1)
    sequence_length: int = key(256, "tokens of one sequence", least=1)
    micro_batch: int | None = key(
        None,
        "sequences of one forward and backward on one rank; null = the largest divisor, at most 8, of a rank's share "
        "of global_batch",
        least=1,
    )
    global_batch: int = key(8, "sequences of one step, over all ranks and micro-batches", least=1)
    dtype: Dtype = key("float32", "number format of the parameters; bfloat16 and float16 keep a float32 master copy")
    loss_scale: float | None = key(
        None, "float16: factor of the loss at the start, a power of two; null = 65536", least=1.0
    )
    loss_scale_interval: int | None = key(
        None, "float16: steps without overflow after which the loss scale doubles; null = 2000", least=1
    )
    seed: int = key(0, "seed of the weights and of the data order", least=0)
    recompute: str | list[str] | None = key(
        None,
        "activations computed again in backward: none, full (a whole layer), selective (what is element-wise), "
        "attention or ffn (that half of a layer), or a list of one of these a layer; null = none",
    )
    recompute_every: int = key(1, "recompute in every so many layers only, the first among them", least=1)
    offload_activations: bool = key(False, "keep what is saved for backward in host memory (GPUs only)")
    check_replicas: int | None = key(
        None, "steps between bit-by-bit comparisons of what ranks hold copies of; null = at the start only", least=1
    )
    processes: int | None = key(None, "processes to start; null = as many as the layout needs", least=1)


@dataclass(frozen=True)
class OptimizerConfig(_Section):
    """The update rule and the learning rate over the run."""

    section: ClassVar[str] = "optimizer"
    name: Literal["adamw", "sgd", "muon"] = key("adamw", "update rule")
    learning_rate: float = key(3e-3, "peak learning rate", least=0.0)
    schedule: Literal["constant", "cosine", "linear", "wsd"] = key(
        "cosine", "course after the warmup (wsd: constant, then a linear fall over decay_steps)"
    )
    warmup_steps: int = key(20, "steps of linear rise from 0 to the peak", least=0)
    decay_steps: int | None = key(None, "steps of wsd's fall at the end; null = a fifth of the run", least=0)
    final_fraction: float = key(
        0.1, "learning rate at the end, as a fraction of the peak (not for constant)", least=0.0, most=1.0
    )
    weight_decay: float = key(0.1, "decoupled weight decay (adamw, muon) or L2 term (sgd)", least=0.0)
    decay_all: bool = key(False, "decay norm weights and biases too")
    beta1: float = key(0.9, "adamw: decay of the first moment", least=0.0, most=1.0)
    beta2: float = key(0.95, "adamw: decay of the second moment", least=0.0, most=1.0)
    eps: float = key(1e-8, "adamw: added to the root of the second moment", least=0.0)
    moments_dtype: Literal["float32", "bfloat16"] = key(
        "float32", "adamw: format of both moments; bfloat16 is rounded stochastically (train.dtype float64 has float64)"
    )
    momentum: float = key(0.0, "sgd: momentum", least=0.0, most=1.0)
    muon_momentum: float = key(0.95, "muon: momentum", least=0.0, most=1.0)
    muon_steps: int = key(5, "muon: Newton-Schulz steps", least=1, most=99)
    muon_scale: Literal["match_rms_adamw", "original"] = key(
        "match_rms_adamw", "muon: size of an update, as large as adamw's or as in the first publication"
    )
    groups: dict[str, Any] | None = key(
        None,
        "regular expression -> mapping of weight_decay, rate (factor of the learning rate), rule (adamw | muon) for "
        "the parameters whose name it is found in; the first that fits decides",
    )
    clip_norm: float | None = key(None, "largest global gradient norm; null = no clipping", above=0.0)
    lr_scaling: Literal["none", "linear", "sqrt"] = key(
        "none", "scale learning_rate by global_batch / reference_batch, or by its square root"
    )
    reference_batch: int | None = key(None, "global batch that learning_rate was chosen for (with lr_scaling)", least=1)


@dataclass(frozen=True)
class CheckpointConfig(_Section):
    """Where the state of the run is kept."""

    section: ClassVar[str] = "checkpoint"
    directory: str | None = key("auto", "directory; auto = <log.directory>/checkpoints, null = no checkpoints")
    every: int | None = key(100, "steps between checkpoints; null = only at the end and at Ctrl-C", least=1)
    keep_last: int | None = key(2, "checkpoints kept, the newest; null = all", least=1)
    resume: str = key("auto", "auto = go on from the newest in directory, never, or the PATH of a checkpoint")
    asynchronous: bool = key(False, "write while training goes on", later=True)


@dataclass(frozen=True)
class LogConfig(_Section):
    """What is written beside the screen."""

    section: ClassVar[str] = "log"
    directory: str = key("pyfast-run", "directory of metrics.jsonl and the checkpoints")
    every: int = key(10, "steps between lines on the screen", least=1)
    prometheus: int | str | None = key(None, "serve metrics for Prometheus", later=True)
    tensorboard: bool | str | None = key(None, "write TensorBoard events", later=True)
    timeline: bool | str | None = key(None, "write a timeline of each rank", later=True)


@dataclass(frozen=True)
class TrainConfig:
    """A whole run. `TrainConfig()` is what `pyfast train` without arguments does."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: RunConfig = field(default_factory=RunConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def processes(self) -> int:
        """Ranks of the run when this machine starts them: as asked for, or as many as the layout needs."""
        return self.train.processes or layout_size(self.parallel) * (self.parallel.data or 1)

    @property
    def checkpoint_directory(self) -> str | None:
        """Directory of the checkpoints, None for none."""
        directory = self.checkpoint.directory
        return os.path.join(self.log.directory, "checkpoints") if directory == "auto" else directory

    @property
    def written_directories(self) -> dict[str, str]:
        """Key -> directory that the run writes to."""
        found = {"log.directory": self.log.directory, "checkpoint.directory": self.checkpoint_directory}
        return {name: path for name, path in found.items() if path is not None}


PARALLEL_HELP = {
    "tensor": "ranks that share each matrix; null = 2 where pyfast starts the ranks, the heads divide by 2 and neither "
    "parallel.data nor train.processes is set, else 1",
    "context": "ranks that share each sequence",
    "pipeline": "ranks that share the layers",
    "virtual_pipeline": "chunks of layers a pipeline rank holds",
    "data": "ranks that take different sequences; null = the ranks that are left",
    "expert": "ranks that share the experts",
    "expert_tensor": "ranks that share each expert",
    "zero": "what data-parallel ranks share out: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too",
    "zero_ranks": "how many neighbouring data-parallel ranks share it out among themselves; null = all of them",
    "compression": "of gradients between data-parallel ranks: none, bf16, fp16 or one_bit (with error feedback)",
    "sequence_parallel": "norms and residual split along the sequence over the tensor ranks",
    "schedule": "gpipe, 1f1b, interleaved, zb-h1 or zb-v",
    "layers_per_stage": "layers of each pipeline stage; null = even",
    "order": "which dimension of the layout varies fastest over the ranks, innermost first",
    "context_method": "how attention crosses the ranks of context",
}
PARALLEL_READY = ("tensor", "data", "order", "zero", "zero_ranks", "compression")


def field_types(section: type) -> dict[str, Any]:
    """The types of a dataclass's fields, resolved."""
    hints = typing.get_type_hints(section)
    return {item.name: hints[item.name] for item in dataclasses.fields(section)}


def sections() -> dict[str, type]:
    """Section name -> dataclass, in the order they are shown."""
    return field_types(TrainConfig)


def describe_type(hint: Any) -> str:
    """A type in the words of the help: `integer`, `text or null`, `adamw | sgd`."""
    words = {int: "integer", float: "number", str: "text", bool: "true | false", type(None): "null"}
    if typing.get_origin(hint) is Literal:
        return " | ".join(typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(describe_type(part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        return f"list of {describe_type(typing.get_args(hint)[0])}s"
    if typing.get_origin(hint) is dict:
        return "mapping"
    return words.get(hint, str(hint))


def describe_allowed(item: dataclasses.Field, hint: Any) -> str:
    """What a field may hold: its type and its limits."""
    limits = item.metadata
    text = describe_type(hint)
    later = limits.get("later_values", ())
    if later:
        text = " | ".join(word for word in typing.get_args(hint) if word not in later)
    least, above, most = limits.get("least"), limits.get("above"), limits.get("most")
    if least is not None:
        text += f", at least {least:g}"
    if above is not None:
        text += f", greater than {above:g}"
    if most is not None:
        text += f", at most {most:g}"
    return text


def has_type(value: object, hint: Any) -> bool:
    """Whether a value is of a config type. An integer is a number, a truth value is not."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(has_type(value, part) for part in typing.get_args(hint))
    if origin is list:
        return isinstance(value, list) and all(has_type(item, typing.get_args(hint)[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict)
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, hint)


def check_value(name: str, value: object, hint: Any, item: dataclasses.Field) -> None:
    """Raise `ConfigError` unless `value` is of the field's type, within its limits and supported."""
    limits = item.metadata
    if not has_type(value, hint):
        raise ConfigError(name, value, f"allowed is {describe_allowed(item, hint)}")
    if value == "":
        raise ConfigError(name, value, f"must not be empty; allowed is {describe_allowed(item, hint)}")
    off = value is False and item.default is None  # "no" and "not given" are the same while it is not built
    if limits.get("later") and value != item.default and not off:
        raise NotSupportedYet(name, value, item.default)
    if isinstance(value, str) and value in limits.get("later_values", ()):
        raise NotSupportedYet(name, value, item.default)
    if value is None or isinstance(value, (bool, str, list, dict)):
        return
    least, above, most = limits.get("least"), limits.get("above"), limits.get("most")
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise ConfigError(name, value, f"allowed is {describe_allowed(item, hint)}, and no more than {LARGEST_INTEGER}")
    if (
        not math.isfinite(value)
        or (least is not None and value < least)
        or (above is not None and value <= above)
        or (most is not None and value > most)
    ):
        raise ConfigError(name, value, f"allowed is {describe_allowed(item, hint)}")


def check_parallel(values: dict[str, Any]) -> None:
    """Raise `ConfigError` for a wrong type or count in `parallel`, and for layouts that are not built yet."""
    hints = field_types(ParallelConfig)
    for item in dataclasses.fields(ParallelConfig):
        name, value = f"parallel.{item.name}", values.get(item.name, item.default)
        check_value(name, value, hints[item.name], item)
        if item.name not in PARALLEL_READY and value != item.default:
            raise NotSupportedYet(name, value, item.default)
        if item.name in ("tensor", "data") and value is not None and value < 1:
            raise ConfigError(name, value, f"allowed is {describe_type(hints[item.name])}, at least 1")
        if item.name == "zero" and value not in ZERO_STAGES:
            raise ConfigError(name, value, f"allowed is {', '.join(map(str, ZERO_STAGES))}")
        if item.name == "zero_ranks" and value is not None:
            _check_zero_ranks(value, values)
        if item.name == "compression" and value not in COMPRESSIONS:
            raise ConfigError(name, value, f"allowed is {', '.join(COMPRESSIONS)}")
        if item.name == "order" and sorted(value.split("-")) != ["cp", "dp", "pp", "tp"]:
            raise ConfigError(name, value, "allowed is any order of tp, cp, pp and dp, joined by dashes")


def _check_zero_ranks(ranks: int, values: dict[str, Any]) -> None:
    name = "parallel.zero_ranks"
    if ranks < 2:
        raise ConfigError(name, ranks, "allowed is null or a number from 2 on")
    if not values.get("zero", 0):
        raise ConfigError(name, ranks, "is not used with parallel.zero = 0", hint="Set parallel.zero to 1, 2 or 3.")
    if values.get("compression", "none") != "none":
        why = f"does not go with parallel.compression = {values['compression']}"
        raise ConfigError(name, ranks, why, hint="Leave one of the two out.")
    count = (values.get("data") or 0) * values.get("context", 1)
    if count % ranks:
        raise ConfigError(name, ranks, f"must divide the {count} data-parallel ranks")


def layout_size(parallel: ParallelConfig) -> int:
    """Ranks of one data-parallel replica."""
    return (parallel.tensor or 1) * parallel.context * parallel.pipeline


def with_default_layout(config: TrainConfig) -> TrainConfig:
    """What a run that says nothing of its layout gets where this machine starts the ranks: two of tensor parallel.

    Whoever sets a part of the layout or the number of processes gets what that says and no more, and a model whose
    heads do not divide by two runs in one process.
    """
    heads = (config.model.heads, config.model.kv_heads or config.model.heads)
    asked = config.parallel != ParallelConfig(order=config.parallel.order) or config.train.processes is not None
    if asked or any(count % 2 for count in heads):
        return config
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, tensor=2))


def resolve(config: TrainConfig, world_size: int) -> TrainConfig:
    """Check a run against the number of ranks it has, and fill what follows: `parallel.data`, `train.micro_batch`.

    Raises `ConfigError` where keys contradict one another or the number of ranks.
    """
    replica, data, tensor = layout_size(config.parallel), config.parallel.data, config.parallel.tensor or 1
    if world_size % replica or (data is not None and data * replica != world_size):
        need = f"{replica}" if data is None else f"{replica} x data {data} = {replica * data}"
        allowed = (
            f"the layout tensor {tensor} x context {config.parallel.context} x pipeline "
            f"{config.parallel.pipeline} needs " + (f"a multiple of {need}" if data is None else need) + " ranks"
        )
        raise ConfigError("number of ranks", world_size, allowed, hint="Change parallel.* or train.processes.")
    ranks, groups_of = world_size // replica * config.parallel.context, config.parallel.zero_ranks
    if groups_of is not None and ranks % groups_of:
        raise ConfigError("parallel.zero_ranks", groups_of, f"must divide the {ranks} data-parallel ranks")
    parallel = config.parallel.resolve(world_size)
    _check_tensor_parallel(config.model, parallel.tensor)
    micro_batch = _micro_batch(config.train, parallel.data)
    _check_optimizer(config)
    _check_compression(config)
    _check_loss_scale(config.train)
    _check_recompute(config)
    return dataclasses.replace(
        config, parallel=parallel, train=dataclasses.replace(config.train, micro_batch=micro_batch)
    )


def _check_tensor_parallel(model: ModelConfig, tensor: int) -> None:
    for name, count in (("heads", model.heads), ("kv_heads", model.kv_heads or model.heads)):
        if count % tensor:
            raise ConfigError(
                f"model.{name}",
                count,
                f"must be a multiple of parallel.tensor = {tensor}",
                hint="Each tensor-parallel rank holds whole heads.",
            )


def _micro_batch(run: RunConfig, data: int) -> int:
    """The micro-batch of a run: as given, or the largest default that divides each data-parallel rank's share."""
    if run.global_batch % data:
        unit = (run.micro_batch or 1) * data
        raise ConfigError(
            "train.global_batch",
            run.global_batch,
            f"must be a multiple of the data-parallel ranks = {data}",
            hint=f"Give --train.global_batch {-(-run.global_batch // unit) * unit}.",
        )
    share = run.global_batch // data
    fitting = _largest_divisor(share, run.micro_batch or LARGEST_DEFAULT_MICRO_BATCH)
    if run.micro_batch not in (None, fitting):
        raise ConfigError(
            "train.global_batch",
            run.global_batch,
            f"must be a multiple of train.micro_batch x data-parallel ranks = {run.micro_batch} x {data}",
            hint=f"Give --train.micro_batch {fitting}.",
        )
    return fitting


def _largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)


def _check_optimizer(config: TrainConfig) -> None:
    optimizer, steps = config.optimizer, config.train.steps
    for name in ("beta1", "beta2", "momentum", "muon_momentum"):
        if getattr(optimizer, name) >= 1.0:
            raise ConfigError(f"optimizer.{name}", getattr(optimizer, name), "must be less than 1")
    _check_used(optimizer)
    if optimizer.moments_dtype != "float32" and config.train.dtype == "float64":
        why = "is not used with train.dtype = float64, whose moments are float64"
        raise ConfigError("optimizer.moments_dtype", optimizer.moments_dtype, why, hint="Leave it at float32.")
    try:
        check_groups(optimizer.groups or {}, optimizer.name)
    except ValueError as error:
        raise ConfigError("optimizer.groups", optimizer.groups, str(error)) from error
    if optimizer.lr_scaling != "none" and optimizer.reference_batch is None:
        raise ConfigError(
            "optimizer.reference_batch", None, f"must be given with optimizer.lr_scaling = {optimizer.lr_scaling}"
        )
    if optimizer.schedule == "wsd" and optimizer.warmup_steps + (optimizer.decay_steps or 0) > steps:
        raise ConfigError(
            "optimizer.decay_steps",
            optimizer.decay_steps,
            f"warmup_steps {optimizer.warmup_steps} + decay_steps must be at most train.steps = {steps}",
        )


def _check_used(optimizer: OptimizerConfig) -> None:
    """Refuse keys that were set but that the chosen rule or schedule does not read: nothing is ignored."""
    default = OptimizerConfig()
    adamw, muon = {"beta1", "beta2", "eps", "moments_dtype"}, {"muon_momentum", "muon_steps", "muon_scale"}
    unused = {"adamw": {"momentum"} | muon, "sgd": adamw | muon, "muon": {"momentum"}}[optimizer.name]
    reason = {name: f"is not used by optimizer.name = {optimizer.name}" for name in unused}
    if optimizer.schedule != "wsd":
        reason["decay_steps"] = f"is not used by optimizer.schedule = {optimizer.schedule}"
    if optimizer.schedule == "constant":
        reason["final_fraction"] = "is not used by optimizer.schedule = constant"
    if optimizer.lr_scaling == "none":
        reason["reference_batch"] = "is not used with optimizer.lr_scaling = none"
    for name, why in reason.items():
        value, neutral = getattr(optimizer, name), getattr(default, name)
        if value != neutral:
            raise ConfigError(f"optimizer.{name}", value, why, hint=f"Leave it at {yaml_word(neutral)}.")


def _check_compression(config: TrainConfig) -> None:
    """What is left unsent is in units of the loss scale, which float16 changes; and float64 asks for all its digits."""
    kind, dtype = config.parallel.compression, config.train.dtype
    if kind != "none" and dtype == "float64":
        raise ConfigError(
            "parallel.compression", kind, "is for float32 gradients; with train.dtype float64 allowed is none"
        )
    if kind == "one_bit" and dtype == "float16":
        why = "keeps gradients over steps, between which train.dtype float16 changes their scale"
        raise ConfigError(
            "parallel.compression", kind, why,
            hint="Set train.dtype: bfloat16, or parallel.compression: fp16.",
        )  # fmt: skip


def _check_loss_scale(run: RunConfig) -> None:
    """Refuse a scale that would round gradients, and keys of it where nothing is scaled."""
    for name in ("loss_scale", "loss_scale_interval"):
        value = getattr(run, name)
        if value is not None and run.dtype != "float16":
            why = f"is not used with train.dtype = {run.dtype}, whose range holds every gradient"
            raise ConfigError(f"train.{name}", value, why, hint="Leave it at null.")
    if run.loss_scale is not None and math.frexp(run.loss_scale)[0] != 0.5:
        raise ConfigError("train.loss_scale", run.loss_scale, "must be a power of two, so that unscaling is exact")


def _check_recompute(config: TrainConfig) -> None:
    run = config.train
    try:
        layer_kinds(run.recompute or "none", config.model.layers, run.recompute_every)
    except ValueError as error:
        name, _, why = str(error).partition(": ")
        raise ConfigError(f"train.{name}", getattr(run, name), why) from error
    if run.recompute in (None, "none") and run.recompute_every != 1:
        why = "is not used with train.recompute = none"
        raise ConfigError("train.recompute_every", run.recompute_every, why, hint="Leave it at 1.")
    if run.offload_activations:
        why = "is for GPUs: this run trains on the CPU, whose activations are in host memory already"
        raise ConfigError("train.offload_activations", True, why, hint="Leave it at false.")


def to_dict(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """The config as plain nested dictionaries, as in YAML."""
    return {
        name: {item.name: getattr(getattr(config, name), item.name) for item in dataclasses.fields(section)}
        for name, section in sections().items()
    }


def from_dict(values: dict[str, dict[str, Any]]) -> TrainConfig:
    """The inverse of `to_dict`; keys that are left out keep their defaults."""
    base = TrainConfig()
    made = {}
    for name in sections():
        given = dict(values.get(name, {}))
        if name == "parallel":
            if given.get("sequence_parallel") is False:  # "no" and "not decided" are the same while it is not built
                given["sequence_parallel"] = None
            check_parallel(given)
        made[name] = dataclasses.replace(getattr(base, name), **given)
    return TrainConfig(**made)


# Shown at every start, whether or not they are the defaults: what a run is, and what changes its maths unseen.
_ALWAYS_SHOWN = {
    "train": ("steps", "sequence_length", "micro_batch", "global_batch", "dtype", "seed"),
    "optimizer": ("learning_rate", "schedule", "warmup_steps", "final_fraction", "weight_decay"),
}
_SHOWN_AS_THE_MODEL = {"layers", "width", "heads", "kv_heads", "head_size", "ffn_width", "vocab"}


def settings_to_show(config: TrainConfig) -> dict[str, str]:
    """The settings that the start of a run shows, `section.key` -> YAML word: those that differ from the defaults, and
    the most important ones always. The model's sizes are left out: they have a line of their own.
    """
    unread = {"optimizer.final_fraction"} if config.optimizer.schedule == "constant" else set()
    unread |= {f"model.{name}" for name in _SHOWN_AS_THE_MODEL}
    neutral, shown = to_dict(TrainConfig()), {}
    for section, values in to_dict(config).items():
        for name, value in values.items():
            same = value == neutral[section][name] or (section == "parallel" and name != "zero" and value == 1)
            if f"{section}.{name}" not in unread and (not same or name in _ALWAYS_SHOWN.get(section, ())):
                shown[f"{section}.{name}"] = yaml_word(value)
    return shown
