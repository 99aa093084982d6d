"""`pyfast convert`: a checkpoint to a Hugging Face directory, and such a directory to a checkpoint to start from."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

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
    """Convert in the direction that `source` asks for; returns a line that says what was written.

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
    return f"{path} (step {metadata.step}) -> {destination}: config.json and model.safetensors, {dtype} as trained"


def _to_checkpoint(source: Path, destination: Path) -> str:
    from pyfast.models import from_hugging_face
    from pyfast.parallel import ParallelMesh
    from pyfast.parallel.checkpoint import CheckpointState, save

    model = from_hugging_face(source)
    config = {"transformer": dataclasses.asdict(model.config)}
    state = CheckpointState(dict(model.named_parameters()), None, {"optimizer_steps": 0})
    path = save(destination, 0, state, ParallelMesh.single(), config=config)
    return (
        f"{source} -> {path}: train on from it with --checkpoint.resume {destination} and the model keys of its config"
    )
