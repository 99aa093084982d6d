"""Where a run starts: anew, from its own last checkpoint, or from one that is named; and what a checkpoint holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from pyfast.models import TransformerConfig
from pyfast.parallel import ParallelMesh
from pyfast.train.config import OptimizerConfig, TrainConfig, to_dict
from pyfast.train.errors import ConfigError, TrainingError, as_training_error, yaml_word
from pyfast.train.metrics import FILE_NAME
from pyfast.train.optimizer import FlatOptimizer
from pyfast.train.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pyfast.parallel import CheckpointState

# Keys that may differ between a checkpoint and the run that goes on from it without changing what is computed.
_FREE = {"checkpoint", "log"}
# Keys of the model that may differ: they change neither the tensors nor what they mean.
_NOT_THE_MODEL = {"max_positions", "residual_dtype", "initial_std"}


@dataclass(frozen=True)
class Start:
    """Where the run starts.

    step: steps done before. path: the checkpoint to load. data: fingerprint of the data it was trained on. notices:
    what the user should know.
    """

    step: int = 0
    path: Path | None = None
    data: str | None = None
    notices: tuple[str, ...] = ()

    def with_data(self, fingerprint: str) -> Start:
        """This start, with a notice when the data are not those of the checkpoint."""
        if self.data in (None, fingerprint):
            return self
        text = "The data are not those of the checkpoint: the sequences that follow are not the ones left over."
        return dataclasses.replace(self, notices=(*self.notices, text))


def find_start(config: TrainConfig, model: TransformerConfig, tokenizer: Tokenizer) -> Start:
    """Decide from the files that are there; reads only. Raises `TrainingError` rather than write over a run."""
    directory, resume = config.checkpoint_directory, config.checkpoint.resume
    if resume == "never":
        _refuse_to_write_over(config)
        return Start()
    own = _latest(directory)
    path = own if resume == "auto" else _named_checkpoint(resume)
    if path is None:
        return Start()
    metadata = _read(path)
    _check_same_run(config, model, tokenizer, metadata)
    if own is not None and _read(own).step > metadata.step:
        raise ConfigError(
            "checkpoint.resume",
            resume,
            f"{directory} holds later checkpoints (up to {own.name})",
            hint="Give another --log.directory to branch off, or resume from the last one.",
        )
    return Start(metadata.step, path, metadata.scalars.get("data"), tuple(_changes(config, metadata.config or {})))


def _read(path: Path) -> Any:
    from pyfast.parallel import read_metadata

    with checkpoint_errors(path):
        return read_metadata(path)


@contextmanager
def checkpoint_errors(read: Path | None = None) -> Iterator[None]:
    """Turn what can go wrong with files of a checkpoint (damaged, disk full) into an error without a traceback.

    read: the checkpoint that is being read; the error then says how to go on without it.
    """
    from pyfast.parallel import CheckpointError

    try:
        yield
    except (CheckpointError, FileExistsError) as error:
        if read is None:
            raise as_training_error(error) from error
        raise TrainingError(f"{str(error).rstrip('.')}. {_without(read)}") from error


def complete_checkpoints(directory: str | Path) -> list[str]:
    """Names of the complete checkpoints of a directory, the oldest first; looks at names alone, so it is quick."""
    return sorted(entry.name for entry in Path(directory).glob("step-*") if (entry / "metadata.json").is_file())


def where_it_stands(directory: str | None) -> str:
    """How the same command goes on when a run is left without saving."""
    names = complete_checkpoints(directory) if directory is not None else []
    if not names:
        return "there is no checkpoint yet, so the same command starts anew"
    return f"the same command goes on from step {int(names[-1].removeprefix('step-'))}"


def _without(path: Path) -> str:
    """What to do when a checkpoint cannot be read."""
    before = max((name for name in complete_checkpoints(path.parent) if name < path.name), default=None)
    then = f"goes on from {before}" if before else "starts anew"
    return f"If it is lost, move {path} away: with checkpoint.resume auto the run then {then}."


def _named_checkpoint(name: str) -> Path:
    path = Path(name)
    if not path.exists():
        raise ConfigError(
            "checkpoint.resume",
            name,
            "there is no such path",
            hint="Allowed are auto, never, a checkpoint, or a directory of checkpoints.",
        )
    # A checkpoint is a directory step-NNNNNNNN; anything else is a directory of them.
    found = path if path.name.startswith("step-") else _latest(path)
    if found is None:
        raise ConfigError("checkpoint.resume", name, "there is no complete checkpoint in it")
    return found


def _latest(directory: str | Path | None) -> Path | None:
    """The newest checkpoint of a directory; checkpoints are not even imported when there is no such directory."""
    if directory is None or not Path(directory).is_dir():
        return None
    from pyfast.parallel import latest

    return latest(directory)


def _refuse_to_write_over(config: TrainConfig) -> None:
    directory, metrics = config.checkpoint_directory, Path(config.log.directory) / FILE_NAME
    found = [str(metrics)] if metrics.exists() and metrics.stat().st_size else []
    if (checkpoint := _latest(directory)) is not None:
        found.append(str(checkpoint))
    if found:
        raise ConfigError(
            "checkpoint.resume",
            "never",
            f"there is a run already: {' and '.join(found)}",
            hint="Nothing is written over: give another --log.directory, or --checkpoint.resume auto.",
        )


def _check_same_run(config: TrainConfig, model: TransformerConfig, tokenizer: Tokenizer, metadata: Any) -> None:
    """Raise `TrainingError` when the checkpoint is of another model or another tokenizer."""
    theirs, ours = (metadata.config or {}).get("transformer", {}), dataclasses.asdict(model)
    other = [
        f"model.{name} is {yaml_word(ours[name])}, in the checkpoint {yaml_word(theirs[name])}"
        for name in ours
        if name in theirs and ours[name] != theirs[name] and name not in _NOT_THE_MODEL
    ]
    what_to_do = "Use the checkpoint's values, or start anew with another --log.directory."
    fingerprint = metadata.scalars.get("tokenizer")
    if fingerprint is not None and fingerprint != tokenizer.fingerprint:
        name = (metadata.config or {}).get("data", {}).get("tokenizer")
        raise TrainingError(
            f"{metadata.path} was trained with another tokenizer (data.tokenizer {name}); this run has "
            f"data.tokenizer {config.data.tokenizer}. {what_to_do}"
        )
    if other:
        raise TrainingError(f"{metadata.path} is a checkpoint of another model: {'; '.join(other)}. {what_to_do}")
    _check_same_optimizer(config.optimizer, metadata)


def _check_same_optimizer(optimizer: OptimizerConfig, metadata: Any) -> None:
    """Raise `ConfigError` when the checkpoint has optimizer state of another kind."""
    theirs = (metadata.config or {}).get("optimizer", {})
    if not any(name.startswith("optimizer.") for name in metadata.tensors):
        return
    # momentum: there is a state or there is none
    for name, kind in (("name", str), ("moments_dtype", str), ("momentum", bool)):
        value = getattr(optimizer, name)
        if name in theirs and kind(theirs[name]) != kind(value):
            raise ConfigError(
                f"optimizer.{name}",
                value,
                f"{metadata.path} has the optimizer state of {yaml_word(theirs[name])}",
                hint="Use the checkpoint's value, or start anew with another --log.directory.",
            )


def _changes(config: TrainConfig, theirs: dict[str, Any]) -> list[str]:
    """A line naming every key that differs from the checkpoint's, since the run then is not the one it continues."""
    changed = []
    for section, values in to_dict(config).items():
        for name, value in values.items():
            before = theirs.get(section, {}).get(name, value)
            if section not in _FREE and value != before and name != "processes":
                changed.append(f"{section}.{name} {yaml_word(before)} -> {yaml_word(value)}")
    return [f"Changed since the checkpoint: {', '.join(changed)}"] if changed else []


def checkpoint_state(
    model: nn.Module, optimizer: FlatOptimizer, scalars: dict[str, Any], *, model_only: bool = False
) -> CheckpointState:
    """What is saved: what this rank keeps of parameters and optimizer state, by name, and the plain values."""
    from pyfast.parallel import CheckpointState

    parameters = {**dict(model.named_parameters()), **optimizer.parameter_parts()}
    state = None if model_only else optimizer.state_by_name() | optimizer.residuals()
    return CheckpointState(parameters, state, scalars)


def load_state(path: Path, model: nn.Module, optimizer: FlatOptimizer, mesh: ParallelMesh) -> dict[str, Any]:
    """Fill model and optimizer from a checkpoint; one without optimizer state (a converted model) starts it anew.

    Any layout and any stage of ZeRO reads what any other wrote. Returns the plain values that were saved beside the
    tensors.
    """
    from pyfast.parallel import load

    complete = any(name.startswith("optimizer.") for name in _read(path).tensors)
    stateless = not [kind for kind in optimizer.state_by_name() if kind != "master"]
    state = checkpoint_state(model, optimizer, {}, model_only=not (complete or stateless))
    with checkpoint_errors(path):
        load(path, state, mesh)
    if state.optimizer_state is None:
        optimizer.reset_masters()
    else:
        optimizer.update_parameters()  # of which a rank that shares its masters out has read only its stretch
    optimizer.steps = state.scalars.get("optimizer_steps", 0)
    return state.scalars


def recorded_config(config: TrainConfig, model: TransformerConfig) -> dict[str, Any]:
    """What a checkpoint says about its run: every key, and the model with all that follows from them."""
    return {**to_dict(config), "transformer": dataclasses.asdict(model)}
