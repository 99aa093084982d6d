"""Pytest hooks that run Triton's tests in processes of their own, and report each test as if it had run here.

Triton reads TRITON_INTERPRET once, when a kernel is defined: with it kernels run in numpy on the CPU, without it they
compile. One process cannot do both, so tests say which they need:

    pytestmark = pytest.mark.triton_interpreter     # TRITON_INTERPRET=1, the interpreter mended (triton_interpreter.py)
    pytestmark = pytest.mark.triton_compile         # without it, for compiling for absent GPUs (triton_compile.py)

At the first test of either kind one process for each kind is started, for all tests of that kind that were selected;
both run beside this one, which is left untouched. Without triton these tests are skipped. In a debugger, say:

    TRITON_INTERPRET=1 pytest --triton-process interpreter tests/kernels/triton/...
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

KINDS = ("interpreter", "compile")
_TIMEOUT_S = 900.0  # of one test
_OUTPUT = 4000  # characters of a failed process' output that are shown


def pytest_addoption(parser):
    group = parser.getgroup("triton", "tests of Triton kernels")
    group.addoption("--triton-process", choices=KINDS, help="run the tests of this kind in this very process")
    group.addoption("--triton-items", metavar="FILE", help="run only the tests listed in FILE; for the suite itself")
    group.addoption("--triton-reports", type=int, metavar="FD", help="write reports to FD; for the suite itself")


def pytest_configure(config):
    for kind in KINDS:
        config.addinivalue_line("markers", f"triton_{kind}: runs in the {kind} process (support/triton_processes.py)")
    here = config.getoption("--triton-process")
    if here is None:
        config.pluginmanager.register(_Parent(), "triton-parent")
        return
    if (os.environ.get("TRITON_INTERPRET") == "1") != (here == "interpreter"):
        wanted = "needs TRITON_INTERPRET=1" if here == "interpreter" else "needs TRITON_INTERPRET unset"
        raise pytest.UsageError(f"--triton-process {here} {wanted} in the environment")
    if here == "interpreter":
        from support import triton_interpreter

        triton_interpreter.install()
    if config.getoption("--triton-reports") is not None:
        config.pluginmanager.register(_Reporter(config), "triton-reporter")


def pytest_collection_modifyitems(config, items):
    """In a process for one kind: only that kind, and only what the parent asked for."""
    kind = config.getoption("--triton-process")
    if kind is None:
        return
    wanted = config.getoption("--triton-items")
    listed = None if wanted is None else set(json.loads(Path(wanted).read_text()))
    kept = [x for x in items if x.get_closest_marker(f"triton_{kind}") and (listed is None or x.nodeid in listed)]
    config.hook.pytest_deselected(items=[x for x in items if x not in kept])
    items[:] = kept


def _kind(item) -> str | None:
    return next((kind for kind in KINDS if item.get_closest_marker(f"triton_{kind}")), None)


class _Reporter:
    """In the child: one JSON line a report, written as soon as it is known."""

    def __init__(self, config):
        self.config = config
        self.file = open(config.getoption("--triton-reports"), "w", buffering=1)

    def pytest_runtest_logreport(self, report):
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.file.write(json.dumps(data) + "\n")


class _Parent:
    """In the process the user started: starts the children and passes their reports on."""

    def __init__(self):
        self.children: dict[str, _Child] = {}

    def pytest_collection_modifyitems(self, items):
        if importlib.util.find_spec("triton") is None:
            for item in items:
                if _kind(item):
                    item.add_marker(pytest.mark.skip(reason="triton is not installed"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        kind = _kind(item)
        if kind is None or any(mark.name == "skip" for mark in item.iter_markers()):
            return None
        if not self.children:
            for name in KINDS:
                nodes = [x.nodeid for x in item.session.items if _kind(x) == name]
                if nodes:
                    self.children[name] = _Child(item.config, name, nodes)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self.children[kind].reports(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_sessionfinish(self):
        for child in self.children.values():
            child.stop()


class _Child:
    """One pytest process for all tests of a kind; its reports arrive in a queue."""

    def __init__(self, config, kind: str, nodes: list[str]):
        self.config = config
        self.directory = tempfile.TemporaryDirectory(prefix=f"triton-{kind}-")
        place = Path(self.directory.name)
        (place / "items").write_text(json.dumps(nodes))
        read_end, write_end = os.pipe()
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)  # the same pyfast as here
        if kind == "interpreter":
            environment["TRITON_INTERPRET"] = "1"
        files = sorted({node.split("::")[0] for node in nodes})
        self.log = open(place / "output", "w+")
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-m", "", "--rootdir", config.rootpath,
                *(["-c", config.inipath] if config.inipath else []), "--triton-process", kind,
                "--triton-items", place / "items", "--triton-reports", str(write_end),
                *(config.rootpath / file for file in files),
            ],
            cwd=place, env=environment, pass_fds=(write_end,), stdin=subprocess.DEVNULL, stdout=self.log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        os.close(write_end)  # the child's end closes with the child, however it ends
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.early: dict[str, list] = {}  # reports of tests that this process has not come to yet
        threading.Thread(target=self._read, args=(read_end,), daemon=True).start()

    def _read(self, read_end: int) -> None:
        with open(read_end) as file:
            for line in file:
                self.lines.put(line)
        self.lines.put(None)

    def reports(self, item) -> list:
        """The reports of one test (setup, call, teardown), waiting for them."""
        while not any(report.when == "teardown" for report in self.early.get(item.nodeid, ())):
            try:
                line = self.lines.get(timeout=_TIMEOUT_S)
            except queue.Empty:
                return [self._failure(item, f"no report within {_TIMEOUT_S:.0f} s")]
            if line is None:
                self.lines.put(None)  # for the tests after this one
                return [self._failure(item, f"the process of this test ended with code {self.process.wait()}")]
            report = self.config.hook.pytest_report_from_serializable(config=self.config, data=json.loads(line))
            if isinstance(report.longrepr, list):  # (file, line, reason) of a skip, a list in JSON
                report.longrepr = tuple(report.longrepr)
            self.early.setdefault(report.nodeid, []).append(report)
        return self.early.pop(item.nodeid)

    def _failure(self, item, what: str):
        self.log.flush()
        self.log.seek(0)
        text = f"{what}; it wrote:\n{self.log.read()[-_OUTPUT:]}"
        return pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()
        self.directory.cleanup()
