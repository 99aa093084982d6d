"""Starting ranks and ending them: errors said once, killed ranks, Ctrl-C, killed parents, torchrun and Slurm."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pyfast.train import launcher
from pyfast.train.errors import RankFailed
from pyfast.train.metrics import read

MODEL = [
    "--model.layers",
    "1",
    "--model.width",
    "16",
    "--model.heads",
    "2",
    "--model.kv_heads",
    "2",
    "--train.sequence_length",
    "16",
    "--train.micro_batch",
    "2",
    "--train.global_batch",
    "4",
]
FOREVER = "1000000"
PATIENCE = 120.0


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return path


def command(tmp_path: Path, text: Path, *arguments: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "pyfast",
        "train",
        *MODEL,
        "--data.paths",
        str(text),
        "--log.directory",
        str(tmp_path / "run"),
        *arguments,
    ]


def environment(**more: str) -> dict[str, str]:
    """As a user's shell, with this tree importable and one thread a rank."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))}
    paths = [str(Path(launcher.__file__).parents[2]), kept.get("PYTHONPATH", "")]
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", **more}


def plain(text: str) -> str:
    """What was printed, without boxes and line breaks."""
    return " ".join(re.sub(r"[─-╿]", " ", text).split())


class Run:
    """A `pyfast train` in a session of its own, as in a terminal. output: where it prints, None for pipes to us."""

    def __init__(
        self,
        tmp_path: Path,
        text: Path,
        *arguments: str,
        before: tuple[str, ...] = (),
        output: int | None = None,
        **variables: str,
    ):
        self.metrics = tmp_path / "run" / "metrics.jsonl"
        self.process = subprocess.Popen(
            [*before, *command(tmp_path, text, *arguments)],
            env=environment(**variables),
            cwd=tmp_path,  # not the checkout: `python -m` would import its pyfast, not the installed one
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=output or subprocess.PIPE,
            stderr=output or subprocess.PIPE,
            start_new_session=True,
        )

    def wait_for_steps(self, count: int = 2) -> None:
        deadline = time.monotonic() + PATIENCE
        while not (self.metrics.exists() and self.metrics.read_bytes().count(b"\n") >= count):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "no step was taken"
            time.sleep(0.05)

    def ranks(self) -> dict[int, int]:
        """Rank -> process id of the started ranks: the children that run multiprocessing's spawn, in order."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                    spawned = b"spawn_main" in (entry / "cmdline").read_bytes()
                except (OSError, IndexError):
                    continue  # it ended while we looked
                if parent == self.process.pid and spawned:
                    found.append(int(entry.name))
        return dict(enumerate(sorted(found)))

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def gone(pids, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


def test_an_error_that_all_ranks_meet_is_one_paragraph(tmp_path, text):
    code, out, err = Run(tmp_path, text, "--train.sequence_length", "4096").end()
    assert code == 1 and out == ""
    assert plain(err).count("fewer than one row of train.sequence_length 4096") == 1
    assert "Traceback" not in err and err.count("pyfast: ") == 1
    assert not (tmp_path / "run").exists()


def test_an_unexpected_error_is_one_traceback_of_the_rank_that_failed_first(tmp_path, text):
    """Rank 1 meets a bug in a library: its traceback is shown, not what the other rank suffers from its death."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import sys\n"
        "class Find:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pyfast.train.trainer':\n"
        "            import pyfast.train.metrics as m\n"
        "            from pyfast.train.data import Dataset\n"
        "            batch = Dataset.batch\n"
        "            def bug(self, step, index, rank, ranks):\n"
        "                if step == 2 and rank == 1: raise KeyError('a bug on data rank 1')\n"
        "                return batch(self, step, index, rank, ranks)\n"
        "            Dataset.batch = bug\n"
        "sys.meta_path.insert(0, Find())\n"
    )
    path = os.pathsep.join([str(broken), environment()["PYTHONPATH"]])
    code, _, err = Run(tmp_path, text, "--parallel.tensor", "1", "--parallel.data", "2", PYTHONPATH=path).end()
    assert code == 1
    assert err.count("Traceback") == 1
    assert "Rank 1 failed first" in err and "KeyError: 'a bug on data rank 1'" in err


def test_a_killed_rank_ends_the_run_at_once_and_is_named(tmp_path, text):
    run = Run(tmp_path, text, "--train.steps", FOREVER, "--checkpoint.every", "null")
    run.wait_for_steps()
    ranks = run.ranks()
    assert len(ranks) == 2
    killed_at = time.monotonic()
    os.kill(ranks[1], signal.SIGKILL)
    code, _, err = run.end()
    assert time.monotonic() - killed_at < 10
    assert code == 1 and "Traceback" not in err
    assert "Rank 1 was killed by SIGKILL" in plain(err)
    assert gone(ranks.values())


def test_ctrl_c_saves_a_checkpoint_and_the_same_command_goes_on_to_the_end(tmp_path, text):
    run = Run(tmp_path, text, "--train.steps", FOREVER, "--checkpoint.every", "null")
    run.wait_for_steps()
    os.killpg(run.process.pid, signal.SIGINT)  # a terminal sends it to every process
    code, out, err = run.end()
    assert code == 130, err
    assert "Traceback" not in err and "stopped before the end" in out
    done = len(read(run.metrics))
    assert (tmp_path / "run" / "checkpoints" / f"step-{done:08d}").is_dir()
    assert f"# goes on from step {done}" in out

    code, out, err = Run(tmp_path, text, "--train.steps", str(done + 2)).end()
    assert (code, err) == (0, "")
    assert [line["step"] for line in read(run.metrics)] == list(range(1, done + 3))
    said = plain(out)
    assert f"{done} of {done + 2} steps are done" in said
    assert said.count(f"step {done + 2}/{done + 2} loss") == 1 and said.count("Next:") == 1  # one rank prints
    assert "rank 0 (tp 0): heads 0, kv heads 0, ffn 0-31, vocabulary 0-128" in said
    assert "rank 1 (tp 1): heads 1, kv heads 1, ffn 32-63, vocabulary 129-256" in said


@pytest.mark.parametrize(
    "every, said",
    [
        ("null", "there is no checkpoint yet, so the same command starts anew"),
        ("2", "the same command goes on from step"),
    ],
)
def test_a_second_ctrl_c_leaves_at_once_and_says_where_it_stands(tmp_path, text, every, said):
    run = Run(tmp_path, text, "--train.steps", FOREVER, "--checkpoint.every", every)
    run.wait_for_steps(6)
    ranks = run.ranks()
    for pid in ranks.values():
        os.kill(pid, signal.SIGSTOP)  # a step that does not end
    os.kill(run.process.pid, signal.SIGINT)  # as `kill -INT` does: to one process
    time.sleep(1.0)
    assert run.process.poll() is None
    os.kill(run.process.pid, signal.SIGINT)
    code, _, err = run.end()
    assert code == 130
    assert gone(ranks.values())
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert bool(kept) == (every != "null")
    assert f"Left without saving: {said}" in err
    if kept:
        assert f"from step {int(kept[-1].removeprefix('step-'))}." in err


def test_one_process_that_is_left_at_once_says_so_too(tmp_path, text):
    """In the middle of a step that does not end."""
    stuck = tmp_path / "stuck"
    stuck.mkdir()
    (stuck / "sitecustomize.py").write_text(
        "import sys\n"
        "class Find:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pyfast.train.trainer':\n"
        "            from pyfast.train.data import Dataset\n"
        "            batch = Dataset.batch\n"
        "            def wait(self, step, index, rank, ranks):\n"
        "                import time\n"
        "                if step == 3: time.sleep(600)\n"
        "                return batch(self, step, index, rank, ranks)\n"
        "            Dataset.batch = wait\n"
        "sys.meta_path.insert(0, Find())\n"
    )
    path = os.pathsep.join([str(stuck), environment()["PYTHONPATH"]])
    run = Run(tmp_path, text, "--parallel.tensor", "1", "--checkpoint.every", "2", PYTHONPATH=path)
    run.wait_for_steps(3)
    os.kill(run.process.pid, signal.SIGINT)
    time.sleep(1.0)
    os.kill(run.process.pid, signal.SIGINT)
    code, _, err = run.end()
    assert code == 130 and "Left without saving: the same command goes on from step 2." in err


def test_ranks_do_not_outlive_a_killed_parent(tmp_path, text):
    run = Run(tmp_path, text, "--train.steps", FOREVER, "--checkpoint.every", "null")
    run.wait_for_steps()
    ranks = run.ranks()
    assert len(ranks) == 2
    run.process.kill()
    assert gone(ranks.values())
    run.end()


def test_ranks_of_torchrun_join_and_only_one_prints(tmp_path, text):
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = subprocess.run(
        started + command(tmp_path, text, "--train.steps", "2")[2:],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 1/2") == 1
    assert len(read(tmp_path / "run" / "metrics.jsonl")) == 2


def test_tasks_of_slurm_join_and_an_error_is_said_once(tmp_path, text):
    def start(*arguments: str, step: str) -> list[tuple[int, str, str]]:
        tasks = []
        for task in range(2):
            variables = environment(
                SLURM_PROCID=str(task),
                SLURM_NTASKS="2",
                SLURM_JOB_ID=str(os.getpid()),
                SLURM_STEP_ID=step,
                SLURM_NNODES="1",
                TMPDIR=str(tmp_path),
            )
            tasks.append(
                subprocess.Popen(
                    command(tmp_path, text, *arguments),
                    env=variables,
                    cwd=tmp_path,
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
        return [(*task.communicate(timeout=PATIENCE), task.returncode) for task in tasks]

    answers = start("--train.steps", "2", step="0")
    assert [code for _, _, code in answers] == [0, 0], answers
    assert "".join(out for out, _, _ in answers).count("step 1/2") == 1
    answers = start("--model.qk_norm", "true", step="1")
    assert all(code != 0 for _, _, code in answers)
    said = plain("".join(err for _, err, _ in answers))
    assert said.count("a checkpoint of another model") == 1 and "Traceback" not in said


def test_threads_are_shared_out_unless_the_user_decided(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert launcher.threads_per_rank(1) == cores
    assert launcher.threads_per_rank(cores * 4) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launcher.threads_per_rank(1) is None


@pytest.mark.parametrize(
    "codes, reports, expected",
    [
        ({0: -15, 1: -9}, [], "Rank 1 was killed by SIGKILL"),
        (
            {0: 1, 1: -9},
            [{"rank": 0, "time": 1.0, "expected": False, "message": "", "traceback": "lost", "exit_code": 1}],
            "Rank 1 was killed by SIGKILL",
        ),
        ({0: -11, 1: -15}, [], "Rank 0 was killed by SIGSEGV"),
        (
            {0: 1, 1: 1},
            [
                {"rank": 0, "time": 2.0, "expected": False, "message": "", "traceback": "late", "exit_code": 1},
                {"rank": 1, "time": 1.0, "expected": False, "message": "", "traceback": "early", "exit_code": 1},
            ],
            "Rank 1 failed first.*early",
        ),
        (
            {0: 1, 1: -15},
            [{"rank": 0, "time": 2.0, "expected": True, "message": "no text", "traceback": "", "exit_code": 1}],
            "^no text$",
        ),
        ({0: 3, 1: -15}, [], "ended early and left no report"),
    ],
)
def test_the_cause_is_the_rank_that_failed_first(codes, reports, expected):
    error = launcher._root_cause(codes, reports)
    assert isinstance(error, RankFailed)
    assert re.search(expected, str(error), re.DOTALL)


def test_a_hangup_saves_like_ctrl_c_although_the_terminal_is_gone(tmp_path, text):
    """Closing a terminal sends SIGHUP to every process of the run, and nothing can be printed any more."""
    reader, writer = os.pipe()
    run = Run(tmp_path, text, "--train.steps", FOREVER, "--checkpoint.every", "1000000", output=writer)
    os.close(writer)
    run.wait_for_steps()
    os.close(reader)
    os.killpg(run.process.pid, signal.SIGHUP)
    assert run.process.wait(timeout=PATIENCE) in (launcher.OUTPUT_GONE, 130)
    steps = len(read(run.metrics))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == [f"step-{steps:08d}"]


def test_the_first_signal_never_leaves_at_once_even_if_a_stop_is_under_way():
    """The screen was gone first, which stops the run; the hangup that comes with it must not cost the checkpoint."""
    from pyfast.train import stop as stopping

    with stopping.on_signals(signal.SIGUSR1, leave=lambda: pytest.fail("left at the first signal")) as stop:
        stop.requested = True
        signal.raise_signal(signal.SIGUSR1)
    assert stop.requested


def test_under_nohup_a_hangup_changes_nothing(tmp_path, text):
    run = Run(tmp_path, text, "--train.steps", FOREVER, before=("nohup",))
    run.wait_for_steps()
    os.killpg(run.process.pid, signal.SIGHUP)
    run.wait_for_steps(len(read(run.metrics)) + 3)
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 130


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_closed_pipe_saves_and_says_so(tmp_path, text, ranks):
    """`pyfast train | head -2`"""
    run = Run(tmp_path, text, "--train.steps", FOREVER, "--log.every", "1", "--parallel.tensor", ranks)
    assert "pyfast train" in run.process.stdout.readline()
    run.process.stdout.close()
    err = run.process.stderr.read()
    assert run.process.wait(timeout=PATIENCE) == launcher.OUTPUT_GONE
    assert "Standard output is gone" in err and "Traceback" not in err and "Exception ignored" not in err
    steps = len(read(run.metrics))
    assert f"checkpoint: {tmp_path / 'run' / 'checkpoints' / f'step-{steps:08d}'}" in err


def test_without_standard_streams_it_trains(tmp_path, text):
    shell = " ".join(command(tmp_path, text, "--train.steps", "2")) + " <&- >&- 2>&-"
    done = subprocess.run(["sh", "-c", shell], env=environment(), timeout=PATIENCE, cwd=tmp_path)
    assert done.returncode == 0
    assert len(read(tmp_path / "run" / "metrics.jsonl")) == 2


def test_a_second_run_in_the_same_directory_is_refused(tmp_path, text):
    first = Run(tmp_path, text, "--train.steps", FOREVER)
    first.wait_for_steps()
    code, out, err = Run(tmp_path, text, "--train.steps", FOREVER).end()
    assert code == 1 and out == "" and "Another run (process" in plain(err) and err.count("pyfast: ") == 1
    first.process.kill()  # the lock goes with it
    first.process.communicate()
    code, _, err = Run(tmp_path, text, "--train.steps", "1").end()
    assert code == 0, err
