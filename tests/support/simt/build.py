"""Compiles .cu files for the CPU with simt.h in CUDA's place; libraries are kept from run to run, named by content."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
CUDA_SOURCES = HERE.parents[2] / "csrc" / "cuda"
FLAGS = ["-x", "c++", "-std=c++17", "-O1", "-g", "-fPIC", "-fno-gnu-unique", "-Wall", "-Wno-unknown-pragmas"]


def compiled(sources: Sequence[Path], *extra_flags: str) -> Path:
    """The shared library of `sources`. Skips the test without g++ or the sources (an installed package has none)."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is needed to run the CUDA kernels on the CPU")
    if not all(source.exists() for source in sources):
        pytest.skip("the CUDA sources are not here: these tests run in the source tree")
    flags = [*FLAGS, *extra_flags, f"-I{HERE}", f"-I{CUDA_SOURCES}"]
    read = [*sources, *CUDA_SOURCES.glob("*.h"), HERE / "simt.h"]
    key = hashlib.sha256("\0".join([compiler, *flags]).encode() + b"".join(path.read_bytes() for path in read))
    target = _cache() / f"{key.hexdigest()[:24]}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [Path(work) / f"{source.stem}.o" for source in sources]
        commands = [[compiler, *flags, "-c", s, "-o", o] for s, o in zip(sources, objects, strict=True)]
        list(pool.map(_run, commands))
        library = target.with_suffix(f".{os.getpid()}")  # named at once when it is whole: tests may run side by side
        _run([compiler, *extra_flags, "-shared", *objects, "-o", library])
        library.rename(target)
    return target


def _run(command: list) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _cache() -> Path:
    """A directory of this user's own, which is checked because libraries are loaded from it."""
    directory = Path(tempfile.gettempdir()) / f"pyfast-simt-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
        raise RuntimeError(f"{directory} must be a directory that only this user can write to")
    return directory


def load(*sources: str, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """csrc/cuda/SOURCE... for the CPU."""
    return ctypes.CDLL(str(compiled([CUDA_SOURCES / source for source in sources], *flags)))


def no_stream(device: torch.device):
    """In the place of `pyfast.kernels.cuda_row_map.torch_stream`."""
    return nullcontext(None)
