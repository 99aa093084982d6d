"""`pytest bench/`: options, the `race` fixture, and one table a kernel at the end (docs/benchmarks.md).

--benchmark-max-time (seconds for all candidates of a case together) and --benchmark-min-rounds are pytest-benchmark's.
"""

from __future__ import annotations

import time

import pytest
import torch
from race import Race, Row
from report import table
from support import fma_peak, tune_allocator

from pyfast import _C

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
ROWS = pytest.StashKey[dict[str, list[Row]]]()
collect_ignore = ["bench_data.py"]  # a script


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pyfast")
    group.addoption("--sizes", choices=["quick", "full"], default="quick", help="which cases (default: quick)")
    group.addoption(
        "--clock", choices=list(CLOCKS), default="wall",
        help="cpu: processor time of all threads of this process, which says more on a busy machine (default: wall)",
    )  # fmt: skip
    group.addoption("--threads", type=int, default=1, help="threads of both sides (default: 1)")


@pytest.hookimpl(tryfirst=True)  # before pytest-benchmark reads its options
def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    if option.threads < 1:
        raise pytest.UsageError(f"--threads is {option.threads}; at least 1 is needed")
    option.benchmark_timer = f"time.{CLOCKS[option.clock].__name__}"
    if not (option.benchmark_compare or option.benchmark_histogram):
        option.benchmark_quiet = True  # its table shows our side alone
    config.stash[ROWS] = {}
    torch.set_num_threads(option.threads)
    tune_allocator()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --sizes full, leave out what is marked full."""
    if config.option.sizes == "full":
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture(scope="session")
def peak(request: pytest.FixtureRequest) -> float:
    """Float32 FLOP/s of one thread."""
    return fma_peak()


@pytest.fixture(autouse=True)
def _same_numbers_on_every_run() -> None:
    torch.manual_seed(0)


@pytest.fixture
def race(benchmark, request: pytest.FixtureRequest, peak: float) -> Race:
    """Times candidates in turn once they agree: see `race.Race.__call__`."""
    option, node = request.config.option, request.node
    marker = node.get_closest_marker("benchmark")
    clock = (marker.kwargs if marker else {}).get("timer", CLOCKS[option.clock])
    name = node.originalname.removeprefix("bench_").replace("_", " ")
    return Race(
        benchmark=benchmark,
        case=f"{name} {node.callspec.id}" if hasattr(node, "callspec") else name,
        clock=clock,
        seconds=float(option.benchmark_max_time),
        least_rounds=option.benchmark_min_rounds,
        peak=peak if clock is time.process_time else peak * option.threads,  # CPU time adds up over threads
        rows=request.config.stash[ROWS],
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash[ROWS]
    if not rows:
        return
    option = config.option
    terminalreporter.section("ratio: the other's time over ours; above 1, pyfast is faster", sep="=")
    terminalreporter.write_line(
        f"{option.threads} thread(s), {option.clock} time, torch {torch.__version__}, {_C.isa()}, "
        f"float32 FMA peak of a thread {fma_peak(0.1) / 1e9:.1f} GFLOP/s; medians\n"
    )
    for title, lines in rows.items():
        for line in table(title, lines):
            terminalreporter.write_line(line)
