"""Save and load whole checkpoints: `DIRECTORY/step-00000100/`, complete or not there at all.

A checkpoint is written into a hidden sibling directory and renamed when every byte is on disk. Whatever stops a save,
the checkpoints before it stay as they were; what it left behind is removed by the next save.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from pyfast.parallel.checkpoint.metadata import METADATA_FILE, CheckpointMetadata, check_hash, encode, read_metadata
from pyfast.parallel.checkpoint.state import (
    CheckpointState,
    LoadPlanner,
    LocalPart,
    SavePlanner,
    describe,
    differences,
    is_residual,
    layout_to_json,
)
from pyfast.parallel.checkpoint.storage import SafetensorsReader, SafetensorsWriter, sync_directory
from pyfast.parallel.checkpoint.together import on_first_rank, raise_as_ours, together

_COMPLETE = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(partial|removed)")


def save(
    directory: str | os.PathLike[str],
    step: int,
    state: CheckpointState,
    mesh: Any,
    *,
    keep_last: int | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write `state` as the checkpoint `directory/step-00000100` (for step 100) and return its path.

    A collective of all ranks of `mesh`: each writes the parts it holds, what several hold is written once. The
    directory must be on a file system that all ranks share; it is made if need be.

    Args:
        step: >= 0, the number of steps done.
        state: what to save; see CheckpointState.
        keep_last: once the new checkpoint is complete, keep it and the `keep_last - 1` newest before it, remove older
            ones. None keeps all. Checkpoints of later steps (of an earlier run) are never touched.
        config: plain values to record beside the state, such as the run's configuration.

    Raises, the same on every rank: ValueError/TypeError for arguments that do not fit, FileExistsError when there is a
    checkpoint of this step, CheckpointError when a rank could not write. Earlier checkpoints are intact in any case.
    """
    directory, world = Path(directory), mesh.group("world")
    name = f"save checkpoint of step {step} in {directory}"
    tensors, header = _snapshot(name, os.fspath(directory), step, state, mesh, keep_last, config)
    final = directory / f"step-{step:08d}"
    partial = directory / f".{final.name}.partial"
    on_first_rank(world, name, lambda: _prepare(directory, final, partial))
    try:
        _write(name, partial, tensors, header, world)
    except BaseException:
        if world.rank == 0:  # give the disk space back now; if that fails too, the next save does it
            shutil.rmtree(partial, ignore_errors=True)
        raise
    on_first_rank(world, name, lambda: _publish(partial, final))
    if keep_last is not None:
        name += " (which is complete): removing older ones"
        on_first_rank(world, name, lambda: _remove_old(directory, step, keep_last))
    return final


def load(
    path: str | os.PathLike[str], state: CheckpointState, mesh: Any, *, verify: str = "hash"
) -> CheckpointMetadata:
    """Fill `state` in place from a checkpoint, or from the latest one in a directory of checkpoints.

    A collective of all ranks of `mesh`, which may have any layout, whatever the checkpoint was saved under. Each rank
    reads only what it holds. Floating-point tensors are converted to the dtype of the tensor they go to.

    Args:
        verify: "hash" compares the SHA-256 of every data file (each file read by one rank), "size" only the sizes,
            which are compared in any case.

    Returns what the checkpoint says about itself (`step`, `config`, ...). Raises, the same on every rank and before
    anything in `state` is changed: FileNotFoundError when there is no complete checkpoint, ValueError when names or
    shapes are not those of `state`, CheckpointError, naming the file, for damaged, missing or foreign files.
    """
    if verify not in ("hash", "size"):
        raise ValueError(f'verify: is {verify!r}, must be "hash" or "size"')
    world = mesh.group("world")
    name = f"load checkpoint {os.fspath(path)}"
    # Rank 0 decides for all: "latest" must not depend on when a rank looks.
    path = Path(on_first_rank(world, name, lambda: os.fspath(_resolve(Path(path)))))
    metadata, tensors = None, {}

    def inspect() -> dict[str, tuple[tuple[int, ...], str]]:
        nonlocal metadata, tensors
        metadata, tensors = read_metadata(path), state.tensors(mesh)
        # what another number of ranks left unsent, or none did, is not there to be read
        tensors = {name: t for name, t in tensors.items() if name in metadata.tensors or not is_residual(name)}
        return describe(tensors)

    # Names of all ranks together are the model's: a rank may hold only some of them.
    wanted = {key: value for part in together(world, name, inspect) for key, value in part.items()}
    together(world, name, lambda: _check(metadata, wanted, state, verify, world))
    with _from_dcp(name, world):
        dcp.load(
            tensors,
            storage_reader=SafetensorsReader(metadata),
            planner=LoadPlanner(),
            process_group=world.process_group,
            no_dist=world.process_group is None,
        )
    state.finish_load(metadata.scalars)
    return metadata


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint with the highest step in `directory`, or None. Half-written ones are never returned."""
    steps = _complete_steps(Path(directory))
    return steps[max(steps)] if steps else None


def _complete_steps(directory: Path) -> dict[int, Path]:
    if not directory.is_dir():
        return {}
    matches = ((_COMPLETE.fullmatch(entry.name), entry) for entry in directory.iterdir())
    return {int(match[1]): entry for match, entry in matches if match and (entry / METADATA_FILE).is_file()}


# ------------------------------------------------------------------------------------------------------- saving


def _snapshot(
    name: str,
    directory: str,
    step: int,
    state: CheckpointState,
    mesh: Any,
    keep_last: int | None,
    config: dict[str, Any] | None,
) -> tuple[dict[str, LocalPart], dict[str, Any]]:
    """What is to be written, checked on all ranks; nothing is written yet."""

    def check() -> tuple[dict[str, str], dict[str, Any]]:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step: is {step!r}, must be an int >= 0")
        if keep_last is not None and (not isinstance(keep_last, int) or keep_last < 1):
            raise ValueError(f"keep_last: is {keep_last!r}, must be None (keep all) or an int >= 1")
        nonlocal tensors
        tensors = state.tensors(mesh)
        state.check_masters()
        values = {"directory": directory, "step": step, "keep_last": keep_last, "config": encode(config, "config")}
        values.update({f"scalars.{key}": encode(value, f"scalars.{key}") for key, value in state.scalars.items()})
        layouts = {key: layout_to_json(tensor.layout) for key, tensor in tensors.items()}
        return {key: _digest(value) for key, value in values.items()}, layouts

    tensors: dict[str, LocalPart] = {}
    layouts: dict[str, Any] = {}
    ranks = together(mesh.group("world"), name, check)
    first = ranks[0][0]
    for rank, (digests, its_layouts) in enumerate(ranks):
        different = sorted(key for key in digests.keys() | first.keys() if digests.get(key) != first.get(key))
        if different:
            raise ValueError(f"{name}: {different[0]} is not the same on rank {rank} as on rank 0; it must be")
        layouts.update(its_layouts)
    sizes = {dim: mesh.size(dim) for dim in ("world", *mesh.order.split("-"))}
    return tensors, {"step": step, "mesh": sizes, "scalars": dict(state.scalars), "config": config, "layouts": layouts}


def _digest(encoded: Any) -> str:
    return hashlib.sha256(json.dumps(encoded, sort_keys=True).encode("ascii")).hexdigest()


def _prepare(directory: Path, final: Path, partial: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if final.exists():
        raise FileExistsError(f"{final} exists already and is never overwritten: remove it, or save elsewhere")
    for entry in directory.iterdir():
        if _LEFTOVER.fullmatch(entry.name):
            shutil.rmtree(entry)
    partial.mkdir()


def _write(name: str, path: Path, tensors: dict[str, LocalPart], header: dict[str, Any], world: Any) -> None:
    with _from_dcp(name, world):
        dcp.save(
            tensors,
            storage_writer=SafetensorsWriter(path, rank=world.rank, description=header),
            planner=SavePlanner(),
            process_group=world.process_group,
            no_dist=world.process_group is None,
        )


def _publish(partial: Path, final: Path) -> None:
    os.rename(partial, final)
    sync_directory(final.parent)


def _remove_old(directory: Path, step: int, keep_last: int) -> None:
    steps = _complete_steps(directory)
    older = sorted(other for other in steps if other < step)
    for other in older[: max(0, len(older) - (keep_last - 1))]:
        # Renamed first, so that a checkpoint that is half removed is not taken for a complete one.
        removed = directory / f".{steps[other].name}.removed"
        os.rename(steps[other], removed)
        shutil.rmtree(removed)


# ------------------------------------------------------------------------------------------------------ loading


def _resolve(path: Path) -> Path:
    if (path / METADATA_FILE).is_file() or _COMPLETE.fullmatch(path.name):
        return path
    found = latest(path)
    if found is None:
        raise FileNotFoundError(f"{path} holds no complete checkpoint (a directory step-NNNNNNNN with {METADATA_FILE})")
    return found


def _check(
    metadata: CheckpointMetadata, wanted: dict[str, Any], state: CheckpointState, verify: str, world: Any
) -> None:
    lines = differences(metadata.tensors, wanted, ignore_optimizer=state.optimizer_state is None)
    if lines:
        raise ValueError(f"{metadata.path} is not a checkpoint of this model:\n  " + "\n  ".join(lines))
    if verify == "hash":
        for record in metadata.files[world.rank :: world.size]:
            check_hash(metadata.path, record)


@contextmanager
def _from_dcp(name: str, world: Any) -> Iterator[None]:
    """Run torch.distributed.checkpoint: its exceptions become ours, its advice to single processes is left out."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        raise_as_ours(name, error, world.size)
