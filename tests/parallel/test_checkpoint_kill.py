"""kill -9 at any moment of a save: the checkpoints before it load, the half-written one is never taken for one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyfast

# In a process of its own, which forks a child for each moment. Audit events come just before each call of the
# operating system that makes, opens, renames or removes something; the child kills itself at the n-th of them.
SCRIPT = """
import os, pathlib, shutil, signal, sys, time
import torch
from pyfast.parallel import ParallelMesh
from pyfast.parallel.checkpoint import CheckpointState, latest, load, save

torch.set_num_threads(1)
ROOT, MESH = pathlib.Path(sys.argv[1]), ParallelMesh.single()

EVENTS = "open os.mkdir os.rename os.remove os.rmdir os.chmod os.scandir shutil.rmtree".split()

def state(fill, size=1000):
    weight = torch.full((size,), float(fill))
    return CheckpointState({"w": weight}, {"m": {"w": -weight}}, {"fill": fill})

def fork(action):
    child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(0)
    return child

def check(directory, allowed, size=1000):
    found = state(0, size)
    step = load(directory, found, MESH).step
    assert step in allowed, (step, allowed)
    assert found.scalars == {"fill": step} and found.model_parameters["w"].eq(step).all()
    assert found.optimizer_state["m"]["w"].eq(-step).all()
    for path in directory.glob("step-*"):  # those that were being removed too are whole or gone
        load(path, state(0, size), MESH)
    save(directory, 5, state(5, size), MESH, keep_last=2)
    assert not [name for name in os.listdir(directory) if name.startswith(".")], os.listdir(directory)
    assert latest(directory).name == "step-00000005"
    return step

def save_until_event(directory, number):
    count = 0
    def hook(event, arguments):
        nonlocal count
        if event in EVENTS:
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    save(directory, 3, state(3), MESH, keep_last=1)

steps, number = [], 0
while True:
    number += 1
    directory = ROOT / f"event-{number}"
    save(directory, 1, state(1), MESH)
    save(directory, 2, state(2), MESH)
    _, status = os.waitpid(fork(lambda: save_until_event(directory, number)), 0)
    killed = os.WIFSIGNALED(status)
    steps.append(check(directory, {2, 3}))
    if not killed:
        break
    shutil.rmtree(directory)
assert steps == sorted(steps) and set(steps) == {2, 3}, steps
print("events", number - 1, "before the rename", steps.count(2))

size, seen = 8_000_000, 0
for milliseconds in (0, 5, 20, 50):
    directory = ROOT / f"after-{milliseconds}"
    save(directory, 2, state(2, size), MESH)
    child = fork(lambda: save(directory, 3, state(3, size), MESH))
    while not [name for name in os.listdir(directory) if name.startswith(".")]:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the save ended before it was seen"
    time.sleep(milliseconds / 1000)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    seen += any(name.startswith(".") for name in os.listdir(directory))
    check(directory, {2, 3}, size)
    shutil.rmtree(directory)
assert seen > 0, "no save was hit half way"
print("half-written", seen)
"""


def test_kill_at_every_moment_of_a_save(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(pyfast.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "half-written" in done.stdout
