"""Everything to check on a GPU, in one run: results first, then speed against what users have; prints markdown.

    python bench/device.py                        # all sections
    python bench/device.py --section attention
    python bench/device.py --checks-only          # no timing

A section is a module device_NAME.py beside this file with

    check(device) -> Iterator[Check]              every feature against float64
    measure(device, deadline) -> Iterator[str]    lines of markdown; stops early when time.monotonic() passes deadline

and nothing is timed in a section whose checks fail. The tables are meant for docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

SECTIONS = ("attention", "moe")


class Check(NamedTuple):
    """One feature: its largest error relative to the norm, and what is allowed."""

    name: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # a NaN fails


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected|; infinite where one is finite and the other is not."""
    actual, expected = actual.double(), expected.double()
    if not torch.equal(actual.isfinite(), expected.isfinite()):
        return float("inf")
    finite = expected.isfinite()
    difference, size = (actual - expected)[finite].norm(), expected[finite].norm()
    return (difference / size).item() if size > 0 else difference.item()


def report_checks(section: str, checks: Iterator[Check]) -> bool:
    """Print a line a feature, the failures in bold; whether all passed."""
    print(f"\n## {section}: results against float64\n\n| feature | error | allowed |\n|---|---|---|")
    all_passed = True
    for check in checks:
        mark = "" if check.passed else "**"
        print(f"| {mark}{check.name}{mark} | {mark}{check.error:.1e}{mark} | {check.allowed:.0e} |", flush=True)
        all_passed &= check.passed
    return all_passed


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="device.py", description=__doc__.split("\n")[0])
    parser.add_argument("--section", choices=SECTIONS, action="append", help="only this section; may be repeated")
    parser.add_argument("--checks-only", action="store_true", help="compare results, time nothing")
    parser.add_argument("--minutes", type=float, default=4.0, help="stop measuring after this long (default 4)")
    return parser.parse_args(arguments)


def describe_device() -> str:
    import triton

    properties = torch.cuda.get_device_properties(0)
    memory = properties.total_memory / 2**30
    return f"{properties.name}, {memory:.0f} GiB, torch {torch.__version__}, triton {triton.__version__}"


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        print(
            "device.py needs an NVIDIA GPU that torch can use, and torch.cuda.is_available() is False here. Without a "
            "GPU the same kernels are tested by `pytest tests/kernels/triton`.",
            file=sys.stderr,
        )
        return 2
    deadline = time.monotonic() + 60 * options.minutes
    print(f"# {describe_device()}")
    device, failed = torch.device("cuda"), []
    for name in options.section or SECTIONS:
        section = importlib.import_module(f"device_{name}")
        if not report_checks(name, section.check(device)):
            failed.append(name)
        elif not options.checks_only:
            for line in section.measure(device, deadline):
                print(line, flush=True)
    if failed:
        print(f"\nResults are wrong in {', '.join(failed)}: nothing was timed there.", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
