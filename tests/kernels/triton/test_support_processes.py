"""Tests that need a process of their own get one, and each is reported as it ended there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

TESTS = Path(__file__).parents[2]
CONFTEST = """
from support.triton_processes import pytest_addoption, pytest_collection_modifyitems, pytest_configure
"""
CASES = """
import os, pytest

@pytest.mark.triton_interpreter
@pytest.mark.parametrize("x", [1, 2])
def test_interpreter(x):
    assert os.environ["TRITON_INTERPRET"] == "1" and x == 1

@pytest.mark.triton_compile
def test_compile():
    assert "TRITON_INTERPRET" not in os.environ

def test_neither(request):
    assert request.config.getoption("--triton-process") is None

@pytest.mark.triton_interpreter
def test_the_process_dies():
    print("last words", flush=True)
    os._exit(7)

@pytest.mark.triton_interpreter
def test_after_it_died():
    pass

@pytest.mark.triton_compile
def test_skipped():
    pytest.skip("of its own will")
"""


def test_every_test_is_reported_from_the_process_it_needs(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    (tmp_path / "test_cases.py").write_text(CASES)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "-s", "--rootdir", tmp_path, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)
    said = done.stdout
    for line in [
        "PASSED test_cases.py::test_interpreter[1]",
        "FAILED test_cases.py::test_interpreter[2] - AssertionError",
        "PASSED test_cases.py::test_compile",
        "PASSED test_cases.py::test_neither",
        "FAILED test_cases.py::test_the_process_dies",
        "FAILED test_cases.py::test_after_it_died",
        "of its own will",
        "the process of this test ended with code 7",
        "3 failed, 3 passed, 1 skipped",
    ]:
        assert line in said, said + done.stderr


def test_the_wrong_environment_is_refused(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "pytest", "--triton-process", "interpreter", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment)
    assert done.returncode != 0 and "needs TRITON_INTERPRET=1" in done.stderr + done.stdout
