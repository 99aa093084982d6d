"""`pyfast doctor`: what works on this machine, what is missing, and what to do about it."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass

GOOD, OPTIONAL, BAD = "ok", "missing", "broken"

REQUIRED = ("torch", "numpy", "safetensors", "jsonargparse", "PyYAML", "rich")
EXTRAS = {
    "tokenizers": "tokenizer.json files: pip install 'pyfast[tokenizers]'",
    "triton": "GPU kernels in Triton: comes with CUDA builds of torch on Linux",
    "transformers": "only for tests: pip install 'pyfast[test]'",
    "matplotlib": "only for benchmark plots: pip install 'pyfast[bench]'",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report. state: ok, missing (something optional) or broken (training will not work)."""

    what: str
    state: str
    detail: str


def main(arguments: list[str]) -> int:
    """Run `pyfast doctor`; exit code 1 when something that training needs is broken."""
    argparse.ArgumentParser(
        prog="pyfast doctor", description="Say what works on this machine, what is missing and what to do about it."
    ).parse_args(arguments)
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    findings = examine()
    colors = {GOOD: "green", OPTIONAL: "yellow", BAD: "red"}
    table = Table(show_edge=False, pad_edge=False)
    for column in ("what", "state", "detail"):
        table.add_column(column)
    for finding in findings:
        table.add_row(Text(finding.what), Text(finding.state, style=colors[finding.state]), Text(finding.detail))
    Console(highlight=False).print(table)
    broken = [finding.what for finding in findings if finding.state == BAD]
    print(f"\nBroken: {', '.join(broken)}." if broken else "\nReady: pyfast train")
    return 1 if broken else 0


def examine() -> list[Finding]:
    """Look at everything training can use."""
    findings = [_python(), *(_package(name) for name in REQUIRED), *_machine()]
    if importlib.util.find_spec("torch") is not None:
        findings += [_kernels(), _cuda_kernels(), *_backends(), *_gpus()]
    return findings + [_extra(name, use) for name, use in EXTRAS.items()]


def _python() -> Finding:
    enough = sys.version_info >= (3, 10)
    return Finding("Python", GOOD if enough else BAD, platform.python_version() + ("" if enough else ": needs 3.10"))


def _package(name: str) -> Finding:
    try:
        return Finding(name, GOOD, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, BAD, f"not installed: pip install {name}")


def _extra(name: str, use: str) -> Finding:
    try:
        return Finding(name, GOOD, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, OPTIONAL, use)


def _machine() -> list[Finding]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS")
    note = f", OMP_NUM_THREADS={threads} for each rank" if threads else ", shared out over the ranks"
    findings = [Finding("cores", GOOD, f"{usable} usable of {os.cpu_count()}{note}")]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        findings.append(Finding("memory", GOOD, f"{memory:.1f} GiB"))
    if os.path.isdir("/dev/shm"):
        findings.append(
            Finding("shared memory", GOOD, f"{shutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB free in /dev/shm")
        )
    return findings


def _kernels() -> Finding:
    try:
        from pyfast.kernels.extension import _C

        importlib.import_module("pyfast.kernels.cpu")
        return Finding("CPU kernels", GOOD, f"{_C.isa()} (this processor has {', '.join(_C.supported_isas())})")
    except (ImportError, OSError) as error:
        return Finding("CPU kernels", BAD, str(error))


def _cuda_kernels() -> Finding:
    from pyfast.kernels import cuda_library

    if cuda_library.path() is None:
        return Finding(
            "CUDA kernels", OPTIONAL, "only for GPUs: built where nvcc is (CUDA toolkit); then pip install . again"
        )
    try:
        cuda_library.load()
    except OSError as error:
        return Finding("CUDA kernels", BAD, f"cannot be loaded: {error}")
    return Finding("CUDA kernels", GOOD, "built, used on GPUs from compute capability 8.0 on")


def _backends() -> list[Finding]:
    import torch.distributed as dist

    if not dist.is_available():
        return [Finding("torch.distributed", BAD, "this build of torch has none: install another")]
    gloo = dist.is_gloo_available()
    nccl = dist.is_nccl_available()
    return [
        Finding("gloo", GOOD if gloo else BAD, "several processes on CPU" if gloo else "this build of torch lacks it"),
        Finding(
            "nccl",
            GOOD if nccl else OPTIONAL,
            "several GPUs" if nccl else "only for GPUs: a CUDA build of torch has it",
        ),
    ]


def _gpus() -> list[Finding]:
    import torch

    if torch.cuda.is_available():
        return [
            Finding(f"GPU {index}", GOOD, torch.cuda.get_device_name(index))
            for index in range(torch.cuda.device_count())
        ]
    return [Finding("GPU", OPTIONAL, "none found; training runs on the CPU")]
