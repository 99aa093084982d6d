"""Everything to check on a GPU, in one run: results first, then speed against what users have; prints markdown.

    python bench/device.py                        # all sections
    python bench/device.py --section attention
    python bench/device.py --checks-only          # no timing

A section is a module device_NAME.py beside this file with

    check(device) -> Iterator[Check]              every feature against float64, what training runs need first
    measure(device, deadline) -> Iterator[str]    lines of markdown; stops early when time.monotonic() passes deadline

and nothing is timed in a section whose checks fail. Each section has an equal share of the minutes that are left, its
checks at most three quarters of that: most of their time goes into compiling kernels. A kernel that cannot be compiled
or launched is a failed check, and the rest is still checked. The tables are meant for docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator
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


def guarded(name: str, compute: Callable[[], list[Check]]) -> list[Check]:
    """compute(), or a check that failed, with its traceback on stderr."""
    try:
        return compute()
    except Exception as error:
        traceback.print_exc()
        return [Check(f"{name}: {type(error).__name__}", float("inf"), 0.0)]


def report_checks(section: str, checks: Iterator[Check], deadline: float = float("inf")) -> bool:
    """Print a line a feature, the failures in bold, until `deadline`; whether all passed that were reached."""
    print(f"\n## {section}: results against float64\n\n| feature | error | allowed |\n|---|---|---|")
    all_passed = True
    for check in checks:
        mark = "" if check.passed else "**"
        print(f"| {mark}{check.name}{mark} | {mark}{check.error:.1e}{mark} | {check.allowed:.0e} |", flush=True)
        all_passed &= check.passed
        if time.monotonic() > deadline:
            print("\n(out of time: further checks, if any, were not made)", flush=True)
            break
    return all_passed


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="device.py", description=__doc__.split("\n")[0])
    parser.add_argument("--section", choices=SECTIONS, action="append", help="only this section; may be repeated")
    parser.add_argument("--checks-only", action="store_true", help="compare results, time nothing")
    parser.add_argument("--minutes", type=float, default=4.0, help="stop after this long (default 4)")
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
    device, failed, broken = torch.device("cuda"), [], []
    sections = options.section or SECTIONS
    for i, name in enumerate(sections):
        section = importlib.import_module(f"device_{name}")
        now = time.monotonic()
        share = max(0.0, deadline - now) / (len(sections) - i)
        for_checks = share if options.checks_only else 0.75 * share
        if not report_checks(name, section.check(device), now + for_checks):
            failed.append(name)
        elif not options.checks_only:
            try:
                for line in section.measure(device, now + share):
                    print(line, flush=True)
            except Exception:  # what other sections find out is not lost
                traceback.print_exc()
                broken.append(name)
    if failed:
        print(f"\nResults are wrong in {', '.join(failed)}: nothing was timed there.", file=sys.stderr)
    if broken:
        print(f"\nTiming broke off in {', '.join(broken)}.", file=sys.stderr)
    return 1 if failed or broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
