"""One run at a time in a directory."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from pyfast.train import lock as locking
from pyfast.train.errors import ConfigError, TrainingError
from pyfast.train.lock import RunLock


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(locking, "PATIENCE_SECONDS", 0.1)


def test_the_second_is_refused_by_name_until_the_first_lets_go(tmp_path):
    first, second = RunLock({"log.directory": tmp_path}), RunLock({"log.directory": tmp_path})
    first.take_existing()
    with pytest.raises(TrainingError, match=rf"process {os.getpid()} .*{tmp_path.name}.*--log.directory"):
        second.take_existing()
    first.release()
    RunLock({"log.directory": tmp_path}).take_existing()


def test_any_directory_in_common_counts(tmp_path):
    first = RunLock({"log.directory": tmp_path / "a", "checkpoint.directory": tmp_path / "saved"})
    first.take()
    second = RunLock({"log.directory": tmp_path / "b", "checkpoint.directory": tmp_path / "saved"})
    with pytest.raises(TrainingError, match="saved"):
        second.take()
    first.release()
    second.release()


def test_nothing_is_made_before_the_run_writes(tmp_path):
    lock = RunLock({"log.directory": tmp_path / "a"})
    lock.take_existing()
    assert not (tmp_path / "a").exists()
    lock.take()
    assert (tmp_path / "a").is_dir()
    lock.release()


def test_one_directory_under_two_keys_is_locked_once(tmp_path):
    lock = RunLock({"log.directory": tmp_path, "checkpoint.directory": tmp_path / "." / "x" / ".."})
    (tmp_path / "x").mkdir()
    lock.take_existing()
    lock.release()


def test_a_run_that_appears_between_looking_and_writing_is_seen(tmp_path):
    lock = RunLock({"log.directory": tmp_path / "a"})
    lock.take_existing()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(TrainingError, match="Another run wrote to"):
        lock.take()
    lock.release()


def test_the_lock_dies_with_its_process(tmp_path):
    program = (
        "import sys, time\nfrom pyfast.train.lock import RunLock\n"
        f"lock = RunLock({{'log.directory': {str(tmp_path)!r}}})\nlock.take_existing()\nprint('held', flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(TrainingError, match=f"process {holder.pid} "):
            RunLock({"log.directory": tmp_path}).take_existing()
        holder.kill()
    time.sleep(0.01)
    lock = RunLock({"log.directory": tmp_path})
    lock.take_existing()
    lock.release()


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_what_is_no_directory_is_named_with_its_key(tmp_path, name):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ConfigError, match="checkpoint.directory.*file.*cannot be written to"):
        lock = RunLock({"checkpoint.directory": tmp_path / name})
        lock.take_existing()
        lock.take()
    assert (tmp_path / "file").read_text() == "precious"
