"""Run a function on several gloo ranks, each a process; a rank that fails, dies or hangs is one readable error.

    def all_reduce_of_ones(rank, world_size, length):                # a module-level function of the test file
        mesh = ParallelMesh.create(ParallelConfig(tensor=world_size), rank=rank, world_size=world_size, checked=True)
        x = torch.ones(length)
        mesh.group("tp").all_reduce(x, name="ones")
        return x                                                     # tensors and plain data travel back

    def test_all_reduce(ranks):                                      # the session's pool, see tests/conftest.py
        for x in ranks.run(all_reduce_of_ones, 2, 5):
            assert torch.equal(x, torch.full((5,), 2.0))

`ranks.run` keeps the processes up between tests (starting one costs 2-4 s of importing torch) but gives every call a
new default process group. `run_ranks` does the same in new processes, for tests that change a process for good.
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

# Once a rank has failed, the others get this long to fail by themselves: what they say helps.
_GRACE_S = 3.0
_DUMP_S = 0.5
_LEAVE_S = 1.0
# Importing torch takes 2-4 s, on a loaded machine many times that; it does not count towards a call's timeout.
_START_S = 120.0


class RanksFailed(AssertionError):
    """At least one rank raised, died or hung; the message says which, where, and what the others were doing."""


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60, dying: Sequence[int] = ()
) -> list[Any]:
    """`RankPool.run` in processes of its own, gone afterwards."""
    with RankPool() as pool:
        return pool.run(function, world_size, *args, timeout=timeout, dying=dying)


class RankPool:
    """Processes that stay up between calls, as many as the largest call needed; started when first used.

    After a failure all are killed, and the next call starts new ones.
    """

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="pyfast-ranks-")
        self._workers: list[_Worker] = []
        self._calls = 0

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 60,
        dying: Sequence[int] = (),
    ) -> list[Any]:
        """Call `function(rank, world_size, *args)` on every rank; returns the ranks' values in rank order.

        In the ranks torch has one thread, `torch.empty` is filled with NaN, and torch.distributed is initialized
        (gloo on loopback, met through a file; a collective gives up after half of `timeout`), unless `world_size` is 1.

        Args:
            function: module-level function of a file. It is loaded by path in the ranks, so the file need not be
                importable; it is imported there, so keep its imports light.
            args: tensors and plain data (pickled by value; no classes of test files).
            timeout: seconds until a rank that has not answered counts as hung, once all have started.
            dying: ranks that are expected to die without a word; their value is None. The pool is new afterwards.

        Raises:
            RanksFailed: a rank raised (its traceback), died (its exit code) or hung (where it was waiting).
        """
        while len(self._workers) < world_size:
            self._workers.append(_Worker(Path(self._directory.name), len(self._workers)))
        for worker in self._workers[:world_size]:
            worker.wait_until_started()
        self._calls += 1
        job = _Job(
            path=os.path.abspath(function.__code__.co_filename),
            function=function.__qualname__,
            args=args,
            world_size=world_size,
            store=os.path.join(self._directory.name, f"store-{self._calls}"),
            timeout=timeout,
        )
        workers = self._workers[:world_size]
        for rank, worker in enumerate(workers):
            worker.send((rank, job))
        answers = _collect(workers, timeout, dying)
        allowed = {(rank, "died") for rank in dying} | {(rank, "value") for rank in range(world_size)}
        failed = {rank for rank, answer in enumerate(answers) if (rank, answer.kind) not in allowed}
        if not failed and not dying:
            return [answer.value for answer in answers]
        message = _describe(job, workers, answers, failed) if failed else ""
        self._kill()
        if failed:
            raise RanksFailed(message)
        return [answer.value if answer.kind == "value" else None for answer in answers]

    def close(self) -> None:
        """End all processes and remove the pool's files."""
        self._kill()
        self._directory.cleanup()

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Job:
    path: str
    function: str
    args: tuple[Any, ...]
    world_size: int
    store: str
    timeout: float


@dataclass(frozen=True)
class _Answer:
    kind: str  # "value", "raised", "died", "hung"
    value: Any = None
    order: float = 0.0


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, directory: Path, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.stacks = directory / f"stacks-{number}-{time.monotonic_ns()}"
        self.process = context.Process(target=_serve, args=(theirs, str(self.stacks)), daemon=True)
        self.process.start()
        self.started = False
        theirs.close()

    def wait_until_started(self) -> None:
        """Return when it has imported torch and takes jobs; RanksFailed if it never does."""
        if self.started:
            return
        if not self.pipe.poll(_START_S):
            raise RanksFailed(f"a rank did not start within {_START_S:g} s; it is in\n{self.dump()}")
        try:
            self.pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise RanksFailed(f"a rank died while it started: exit code {self.process.exitcode}") from None
        self.started = True

    def send(self, message: Any) -> None:
        # bytes, not `send`: torch's reducers would pass shared-memory handles that die with the process
        try:
            self.pipe.send_bytes(pickle.dumps(message))
        except BrokenPipeError:
            return  # it died between calls; _collect reports it

    def receive(self) -> _Answer:
        try:
            return _Answer(*pickle.loads(self.pipe.recv_bytes()), order=time.monotonic())
        except (EOFError, ConnectionResetError):
            self.process.join()
            return _Answer("died", self.process.exitcode, time.monotonic())

    def dump(self) -> str:
        """Where its threads are now."""
        start = self.stacks.stat().st_size if self.stacks.exists() else 0
        try:
            os.kill(self.process.pid, signal.SIGUSR1)
        except ProcessLookupError:
            return "(it has just ended)"
        time.sleep(_DUMP_S)
        return self.stacks.read_text()[start:] if self.stacks.exists() else "(still starting)"


def _collect(workers: list[_Worker], timeout: float, dying: Sequence[int]) -> list[_Answer]:
    answers: dict[int, _Answer] = {}
    deadline = time.monotonic() + timeout
    while len(answers) < len(workers):
        pending = {worker.pipe: rank for rank, worker in enumerate(workers) if rank not in answers}
        ready = multiprocessing.connection.wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = pending[pipe]
            answers[rank] = workers[rank].receive()
            if answers[rank].kind != "value" and rank not in dying:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    return [answers.get(rank, _Answer("hung", order=float("inf"))) for rank in range(len(workers))]


def _describe(job: _Job, workers: list[_Worker], answers: list[_Answer], failed: set[int]) -> str:
    lines = [f"{job.function} on {job.world_size} ranks: rank(s) {sorted(failed)} failed, the first one first"]
    for rank in sorted(failed, key=lambda rank: answers[rank].order):
        answer = answers[rank]
        if answer.kind == "raised":
            lines.append(f"--- rank {rank} raised\n{answer.value}")
        elif answer.kind == "died":
            code = answer.value
            how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
            lines.append(f"--- rank {rank} died: {how}")
        else:
            lines.append(f"--- rank {rank} hung, waiting in\n{workers[rank].dump()}")
    return "\n".join(lines)


# --- in the ranks ---------------------------------------------------------------------------------------------------


def _serve(pipe: multiprocessing.connection.Connection, stacks: str) -> None:
    """A rank: takes jobs until the parent closes the pipe."""
    stacks_file = open(stacks, "w")  # noqa: SIM115  open as long as the process: the signal handler writes into it
    faulthandler.register(signal.SIGUSR1, file=stacks_file, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    modules: dict[str, ModuleType] = {}
    pipe.send_bytes(b"started")
    while True:
        try:
            rank, job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(pickle.dumps(_answer(rank, job, modules)))


def _answer(rank: int, job: _Job, modules: dict[str, ModuleType]) -> tuple[str, Any]:
    import torch.distributed as dist

    from pyfast.comm import bootstrap

    store = dist.FileStore(job.store, job.world_size) if job.world_size > 1 else None
    try:
        bootstrap.initialize(rank=rank, world_size=job.world_size, store=store, timeout_s=job.timeout / 2)
        function = _load(job.path, modules)
        for name in job.function.split("."):
            function = getattr(function, name)
        value = function(rank, job.world_size, *job.args)
        pickle.dumps(value)  # here, where the traceback can name the function's rank
        return "value", value
    except BaseException:  # noqa: BLE001  whatever it was, SystemExit included, the parent reports it
        return "raised", traceback.format_exc()
    finally:
        if store is not None:
            _leave_together(store, job.world_size)
        bootstrap.shutdown()


def _leave_together(store: Any, world_size: int) -> None:
    """Wait a moment for the other ranks: one that closes its connections at once fails those that still make theirs."""
    store.add("leaving", 1)
    deadline = time.monotonic() + _LEAVE_S
    while store.add("leaving", 0) < world_size and time.monotonic() < deadline:
        time.sleep(0.002)


def _load(path: str, modules: dict[str, ModuleType]) -> ModuleType:
    if path not in modules:
        name = f"ranks_{Path(path).stem}_{hashlib.sha256(path.encode()).hexdigest()[:8]}"
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        modules[path] = module
    return modules[path]
