"""Starting the ranks of a run, or joining the ones that torchrun or Slurm started.

On one machine `launch` starts the ranks itself (torch.distributed.elastic's multiprocessing). They meet in a file in
a temporary directory, so nothing listens on a network. The parent only watches: it passes a Ctrl-C on once, ends all
ranks when one dies, and prints one error for all of them.

Signals. The ranks that `launch` starts ignore SIGINT and SIGHUP (a terminal sends them to every process) and stop after
their step on SIGUSR1, which the parent sends; SIGTERM ends them at once, which is how elastic ends the peers of a rank
that died. A joined rank, or a run of one process, has no such parent: SIGINT, SIGTERM and SIGHUP stop it after its
step.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

from pyfast.comm import bootstrap
from pyfast.train import stop as stopping
from pyfast.train.allocator import reuse_large_blocks
from pyfast.train.config import TrainConfig, resolve, with_default_layout
from pyfast.train.errors import ConfigError, RankFailed, TrainingError, as_training_error
from pyfast.train.joined import joined_world

POLL_SECONDS = 0.1
TIMEOUT_SECONDS = 600.0
OUTPUT_GONE = 1  # exit code of a run that lost its standard output


def launch(config: TrainConfig, command: str = "pyfast train") -> int:
    """Train as `config` says and return the exit code: 0 done, 130 stopped by a signal. Raises `TrainingError`.

    `command` is how the user started it, repeated in what is printed at the end.
    Under torchrun or Slurm this process is one rank of the run; otherwise it starts all of them.
    """
    joined = joined_world()
    if not joined:
        config = with_default_layout(config)
    world_size = joined[1] if joined else config.processes
    try:
        _check_ranks(config, joined, world_size)  # an impossible layout is found before anything starts
    except ConfigError as error:
        error.alike = True
        raise
    if not joined:
        preflight(config)
    if joined or world_size == 1:
        return _run_here(config, command, *(joined or (0, 1)))
    return _start_ranks(config, command, world_size)


def _check_ranks(config: TrainConfig, joined: tuple[int, int] | None, world_size: int) -> None:
    if joined and config.train.processes not in (None, world_size):
        raise ConfigError(
            "train.processes",
            config.train.processes,
            f"the launcher this runs under started {world_size} ranks",
            hint="Leave it at null.",
        )
    resolve(config, world_size)


def preflight(config: TrainConfig) -> None:
    """Find what is missing or contradictory while it is still cheap: before processes start. Reads, writes nothing."""
    from pyfast.train.documents import find_sources, standard_library_files
    from pyfast.train.model import transformer_config
    from pyfast.train.resume import find_start
    from pyfast.train.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(config.data.tokenizer, end_token=config.data.end_token)
        find_sources(config.data.path_list() or standard_library_files())
        find_start(config, transformer_config(config, tokenizer), tokenizer)
    except (ValueError, OSError, ImportError) as error:
        raise as_training_error(error) from error


def threads_per_rank(ranks: int) -> int | None:
    """Threads for each of `ranks` ranks of this machine; None where the user's OMP_NUM_THREADS decides."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // ranks, 1)


def _stop_signals() -> list[signal.Signals]:
    """Signals that stop a run after its step; under nohup a hangup is none of them."""
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]


# One process: a joined rank, or a run of one.


def _run_here(config: TrainConfig, command: str, rank: int, world_size: int) -> int:
    def leave() -> None:
        if rank == 0:
            _say_left(config)

    with stopping.on_signals(*_stop_signals(), leave=leave) as stop:
        try:
            if world_size == 1:
                return _train(config, command, rank, world_size, stop)
            _join(rank, world_size)
            code = _train(config, command, rank, world_size, stop)
        except Exception as error:
            first = _first_to_fail()
            bootstrap.shutdown()
            if not first:
                raise SystemExit(1) from None
            if isinstance(error, TrainingError):
                raise
            raise RankFailed(_unexpected(rank, traceback.format_exc())) from None
    _end(code)


def _end(code: int) -> None:
    """End a rank of several without the interpreter's shutdown and without destroying the process groups.

    gloo's threads are still at work then: they may wait for peers that will never answer, and now and then their
    teardown aborts the process after a run in which nothing failed.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                stream.flush()
            except OSError:
                pass  # closed, and what it held was said elsewhere or is lost with the reader
    os._exit(code)


def _join(rank: int, world_size: int) -> None:
    """Meet the ranks that torchrun or Slurm started."""
    environment = os.environ
    if "RANK" in environment:
        bootstrap.initialize_from_environment(timeout_s=TIMEOUT_SECONDS)
        return
    if environment.get("SLURM_NNODES", environment.get("SLURM_JOB_NUM_NODES", "1")) == "1":
        name = f"pyfast-slurm-{environment.get('SLURM_JOB_ID', '0')}-{environment.get('SLURM_STEP_ID', '0')}"
        name += f"-{environment.get('SLURM_RESTART_COUNT', '0')}"  # a killed run leaves its file behind
        store = dist.FileStore(os.path.join(tempfile.gettempdir(), name), world_size)
        bootstrap.initialize(rank=rank, world_size=world_size, store=store, timeout_s=TIMEOUT_SECONDS)
        return
    if "MASTER_ADDR" not in environment:
        environment["MASTER_ADDR"] = _first_slurm_host()
    environment.setdefault("MASTER_PORT", str(20000 + int(environment.get("SLURM_JOB_ID", "0")) % 20000))
    bootstrap.initialize_from_environment(timeout_s=TIMEOUT_SECONDS)


def _first_slurm_host() -> str:
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    try:
        return subprocess.run(
            ["scontrol", "show", "hostnames", nodes], check=True, capture_output=True, text=True
        ).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise TrainingError(
            f"Slurm gave this job several nodes ({nodes!r}), but the first one's name could not be "
            f"found: {error}. Export MASTER_ADDR=<host of rank 0> in the job script."
        ) from error


def _first_to_fail() -> bool:
    """Whether this rank is the first to report an error; the others then only follow."""
    store = bootstrap.world_store()
    if store is None:
        return True
    try:
        return store.add("pyfast/failed", 1) == 1
    except RuntimeError:  # the store went down with its rank: better said twice than not at all
        return True


# Several processes on this machine.


def _start_ranks(config: TrainConfig, command: str, world_size: int) -> int:
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.CRITICAL)
    stop_signals = _stop_signals()
    with tempfile.TemporaryDirectory(prefix="pyfast-") as directory, _inherited_ignore(signal.SIGINT, signal.SIGHUP):
        ranks = range(world_size)
        threads = threads_per_rank(world_size)
        with _elastic_handles("SIGQUIT"):
            context = start_processes(
                name="pyfast",
                entrypoint=_rank_main,
                args={rank: (config, command, rank, world_size, directory, os.getpid(), threads) for rank in ranks},
                envs={rank: {} for rank in ranks},
                logs_specs=DefaultLogsSpecs(log_dir=directory),
                start_method="spawn",
            )

        def leave() -> None:
            _kill(context)
            _say_left(config)
            shutil.rmtree(directory, ignore_errors=True)

        try:
            with stopping.on_signals(*stop_signals, leave=leave) as stop:
                return _watch(context, stop, Path(directory))
        finally:
            context.close(signal.SIGKILL)
            _show_cursor()


def _watch(context: Any, stop: stopping.Stop, directory: Path) -> int:
    """Wait for the ranks; pass a stop on once; turn the first failure into one error."""
    told = False
    while (result := context.wait(timeout=POLL_SECONDS, period=POLL_SECONDS / 2)) is None:
        if stop.requested and not told:
            told = True
            _say("\nStopping after this step. Ctrl-C again leaves at once, without a checkpoint.")
            for pid in context.pids().values():
                _send(pid, signal.SIGUSR1)
    if not result.is_failed():
        ended = result.return_values.values()  # only rank 0 knows that its output is gone
        return OUTPUT_GONE if OUTPUT_GONE in ended else max(ended)
    codes = {rank: process.exitcode for rank, process in enumerate(context._pc.processes)}
    if told and not list(directory.glob("error-*.json")) and -signal.SIGUSR1 in codes.values():
        _say("Stopped before the first step: nothing to save.")
        return stopping.EXIT_CODE
    raise _root_cause(codes, _reports(directory))


def _root_cause(codes: dict[int, int | None], reports: list[dict]) -> TrainingError:
    """The error of the rank that failed first; what its peers met afterwards follows from it."""
    # SIGTERM is how elastic ends the peers of a rank that failed.
    dead = [(rank, code) for rank, code in codes.items() if code is not None and code < 0 and code != -signal.SIGTERM]
    if dead:
        rank, code = dead[0]
        why = "out of memory is a usual cause" if code == -signal.SIGKILL else "a crash in native code is a usual cause"
        return RankFailed(
            f"Rank {rank} was killed by {signal.Signals(-code).name} ({why}); the other ranks were ended. "
            "Start the same command again to go on from the last checkpoint."
        )
    if reports:
        first = min(reports, key=lambda report: report["time"])
        error = RankFailed(first["message"] if first["expected"] else _unexpected(first["rank"], first["traceback"]))
        error.exit_code = first["exit_code"]
        return error
    return RankFailed(f"A rank ended early and left no report; exit codes by rank: {codes}.")


def _rank_main(
    config: TrainConfig, command: str, rank: int, world_size: int, directory: str, parent: int, threads: int | None
) -> int:
    """What each started process runs. A failure is reported in a file: the parent prints one of them."""
    _die_with_parent(parent)
    try:
        with stopping.on_signals(signal.SIGUSR1) as stop:
            if threads is not None:
                torch.set_num_threads(threads)
            store = dist.FileStore(os.path.join(directory, "store"), world_size)
            bootstrap.initialize(rank=rank, world_size=world_size, store=store, timeout_s=TIMEOUT_SECONDS)
            code = _train(config, command, rank, world_size, stop)
            atexit.register(_end, 0)  # once elastic has taken the code
            return code
    except Exception as error:
        try:
            _report(directory, rank, error)
        except OSError as full:  # such as a full disk: say it here, the parent will find no report
            _say(f"pyfast: rank {rank}: {error} (and there was no room to report it: {full})")
        _end(1)


def _train(config: TrainConfig, command: str, rank: int, world_size: int, stop: stopping.Stop) -> int:
    """What every rank does once it has joined."""
    from pyfast.train.trainer import FINISHED, STOPPED, Trainer  # a rank's imports: the parent needs no model

    reuse_large_blocks()
    reporter = _reporter(command) if rank == 0 else None
    trainer = Trainer(config, rank=rank, world_size=world_size, stop=stop, display=reporter)
    result = trainer.fit()
    code = stopping.EXIT_CODE if result.status == STOPPED else 0
    sample = None
    if result.status == FINISHED:
        from pyfast.train.report import sample_text

        sample = sample_text(trainer, result)
    if reporter is not None:
        reporter.end(trainer, result, sample)
        if reporter.broken is not None:
            code = _leave_without_screen(reporter.broken, result)
    # a rank that left earlier would fail those still at work
    trainer.mesh.group("world").barrier(name="end of the run")
    return code


def _leave_without_screen(why: str, result: Any) -> int:
    """Say on what may be left, standard error, where the run stands."""
    sys.stdout = None  # or the interpreter flushes it again at its end, and fails again
    _say(f"pyfast: {why} {result.step} steps are done, checkpoint: {result.checkpoint}")
    return OUTPUT_GONE


def _say(text: str) -> None:
    """Print on standard error. It may be a terminal that was closed, which must not keep the run from saving."""
    if sys.stderr is None:
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = None


def _say_left(config: TrainConfig) -> None:
    """The last words at a second Ctrl-C."""
    from pyfast.train.resume import where_it_stands

    # From a signal handler, which may have come in the middle of a print: straight to the descriptor.
    try:
        os.write(2, f"\nLeft without saving: {where_it_stands(config.checkpoint_directory)}.\n".encode())
    except OSError:
        pass  # the terminal was closed: there is nobody to tell


def _reporter(command: str) -> Any:
    from pyfast.train.display import Display
    from pyfast.train.report import Reporter

    return Reporter(Display(), command)


def _report(directory: str, rank: int, error: Exception) -> None:
    report = {
        "rank": rank,
        "time": time.time(),
        "expected": isinstance(error, TrainingError),
        "message": str(error),
        "traceback": traceback.format_exc(),
        "exit_code": getattr(error, "exit_code", 1),
    }
    path = Path(directory) / f"error-{rank}.json"
    path.with_suffix(".new").write_text(json.dumps(report), encoding="utf-8")
    path.with_suffix(".new").rename(path)


def _reports(directory: Path) -> list[dict]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in directory.glob("error-*.json")]


def _unexpected(rank: int, text: str) -> str:
    return f"Rank {rank} failed first, with an error pyfast did not expect:\n{text.rstrip()}"


def _die_with_parent(parent: int) -> None:
    """End this process when its parent is gone, however the parent ended."""
    if sys.platform.startswith("linux"):
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it went before we asked
        os._exit(1)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


@contextmanager
def _inherited_ignore(*numbers: signal.Signals) -> Iterator[None]:
    """Ignore signals here and, from their first instruction on, in the processes started meanwhile."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _elastic_handles(names: str) -> Iterator[None]:
    """Let elastic install its handlers for these signals only.

    It would take SIGINT and SIGTERM before it starts the processes, and a handled signal is not inherited as ignored.
    """
    variable = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    before = os.environ.get(variable)
    os.environ[variable] = names
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def _kill(context: Any) -> None:
    for pid in context.pids().values():
        _send(pid, signal.SIGKILL)


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it ended in the meantime, which is what the signal is for


def _show_cursor() -> None:
    """A rank that was killed could not put back the cursor that its progress bar hides."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and stream.isatty():
            try:
                stream.write("\x1b[?25h")
                stream.flush()
            except OSError:
                pass  # the terminal was closed: it has no cursor any more
