"""`pyfast convert`: a checkpoint to a Hugging Face directory, and such a directory to a checkpoint to start from."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyfast.models import TransformerConfig

ABOUT = """Convert a model. SOURCE is a checkpoint (a directory step-NNNNNNNN, or a directory of them: the newest), then
DESTINATION becomes a directory that transformers' from_pretrained loads; or SOURCE is such a directory (config.json and
safetensors), then DESTINATION becomes a directory of checkpoints to train on from, with --checkpoint.resume
DESTINATION."""


def main(arguments: list[str]) -> int:
    """Run `pyfast convert`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="pyfast convert", description=" ".join(ABOUT.split()))
    parser.add_argument("source", metavar="SOURCE", type=Path)
    parser.add_argument("destination", metavar="DESTINATION", type=Path)
    options = parser.parse_args(arguments)
    from pyfast.parallel.checkpoint import CheckpointError

    try:
        print(convert(options.source, options.destination))
    except (ValueError, OSError, CheckpointError) as error:
        print(f"pyfast: {error}", file=sys.stderr)
        return 1
    return 0


def convert(source: Path, destination: Path) -> str:
    """Convert in the direction that `source` asks for; returns what was written, and what to do next with it.

    Raises ValueError when `source` is neither a checkpoint nor a Hugging Face directory, FileExistsError when
    `destination` is there and not empty: nothing is written over.
    """
    if not source.exists():
        raise ValueError(f"SOURCE {source} does not exist")
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise FileExistsError(f"DESTINATION {destination} exists already; nothing is written over: name another")
    if (source / "config.json").is_file():
        return _to_checkpoint(source, destination)
    return _to_hugging_face(source, destination)


def _to_hugging_face(source: Path, destination: Path) -> str:
    import torch

    from pyfast.models import Transformer, TransformerConfig, save_hugging_face
    from pyfast.parallel import ParallelMesh
    from pyfast.parallel.checkpoint import CheckpointState, latest, load, read_metadata

    path = source if source.name.startswith("step-") else latest(source)
    if path is None:
        raise ValueError(
            f"SOURCE {source} is neither a checkpoint, nor a directory of them, nor a directory with a config.json"
        )
    metadata = read_metadata(path)
    recorded = metadata.config or {}
    if "transformer" not in recorded:
        raise ValueError(f"{path} does not say which model it holds; only checkpoints of pyfast train can be converted")
    dtype = getattr(torch, recorded.get("train", {}).get("dtype", "float32"))
    model = Transformer(TransformerConfig(**recorded["transformer"]), dtype=dtype, seed=None)
    load(path, CheckpointState(dict(model.named_parameters())), ParallelMesh.single())
    save_hugging_face(model, destination)
    written = ["config.json", "model.safetensors", *_copy_tokenizer(recorded, destination)]
    return f"{path} (step {metadata.step}) -> {destination}: {', '.join(written)}, {dtype} as trained\n" + _how_to_load(
        destination, byte_tokenizer="tokenizer.json" not in written
    )


def _copy_tokenizer(recorded: dict[str, Any], destination: Path) -> list[str]:
    """Put the run's tokenizer files beside the weights; the byte tokenizer has none."""
    tokenizer = Path(recorded.get("data", {}).get("tokenizer", "byte"))
    directory = tokenizer if tokenizer.is_dir() else tokenizer.parent
    names = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
    found = [name for name in names if tokenizer.name != "byte" and (directory / name).is_file()]
    for name in found:
        shutil.copyfile(directory / name, destination / name)
    return found


def _how_to_load(destination: Path, *, byte_tokenizer: bool) -> str:
    lines = ["Next, in Python:", "  from transformers import AutoModelForCausalLM, AutoTokenizer"]
    lines.append(f'  model = AutoModelForCausalLM.from_pretrained("{destination}")')
    if byte_tokenizer:
        lines[1] = "  import torch; from transformers import AutoModelForCausalLM"
        lines.append('  ids = torch.tensor([list("import ".encode())])  # ids are bytes; 256 ends a document')
        lines.append("  out = model.generate(ids, max_new_tokens=100, do_sample=True, eos_token_id=256)[0].tolist()")
        lines.append('  print(bytes(i for i in out if i < 256).decode(errors="replace"))')
    else:
        lines.append(f'  tokenizer = AutoTokenizer.from_pretrained("{destination}")')
    return "\n".join(lines)


def _to_checkpoint(source: Path, destination: Path) -> str:
    from pyfast.models import from_hugging_face
    from pyfast.parallel import ParallelMesh
    from pyfast.parallel.checkpoint import CheckpointState, save

    model = from_hugging_face(source)
    config = {"transformer": dataclasses.asdict(model.config)}
    state = CheckpointState(dict(model.named_parameters()), None, {"optimizer_steps": 0})
    path = save(destination, 0, state, ParallelMesh.single(), config=config)
    _write_model_keys(model.config, destination / "model.yaml")
    tokenizer = f" --data.tokenizer {source}/tokenizer.json" if (source / "tokenizer.json").is_file() else ""
    return (
        f"{source} -> {path}, and {destination}/model.yaml with the model's keys\n"
        f"Next:\n  pyfast train --config {destination}/model.yaml --checkpoint.resume {destination}{tokenizer} "
        "--data.paths TEXT --log.directory my-run"
    )


def _write_model_keys(config: TransformerConfig, path: Path) -> None:
    """The `model` section that describes `config`, for `pyfast train --config`."""
    import yaml

    from pyfast.train.config import ModelConfig

    names = {field.name: field.default for field in dataclasses.fields(ModelConfig)}
    values = {name: value for name, value in dataclasses.asdict(config).items() if name in names}
    if values["rope_scaling"] is not None:  # only the keys of its kind
        values["rope_scaling"] = {name: value for name, value in values["rope_scaling"].items() if value is not None}
    path.write_text(yaml.safe_dump({"model": values}, sort_keys=False))
