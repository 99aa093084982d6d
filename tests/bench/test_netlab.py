"""bench/netlab.py: ranks of different hosts meet over links of the set rate, and nothing is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

NETLAB = Path(__file__).parents[2] / "bench" / "netlab.py"
RATE_MBIT, SENT_BYTES = 100, 2_000_000
# Rank 1 sends a file's worth to rank 0 over a plain socket; what each sees of the other and the time goes to stdout.
TRANSFER = """
import os, socket, sys, time
count = int(sys.argv[1])
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    with socket.create_server(address) as server:
        connection = server.accept()[0]
        start, received = time.perf_counter(), 0
        while received < count:
            received += len(connection.recv(1 << 20))
        print("seconds", time.perf_counter() - start, "world", os.environ["WORLD_SIZE"])
else:
    while True:
        try:
            connection = socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.02)
    connection.sendall(bytes(count))
    connection.recv(1)
"""


def _network_namespaces_work() -> bool:
    if not (sys.platform == "linux" and os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc", "unshare")))):
        return False
    name = f"probe{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode != 0:
        return False
    link = ["veth0", "type", "veth", "peer", "name", "veth1"]
    made = subprocess.run(["ip", "-n", name, "link", "add", *link], capture_output=True, check=False)
    bucket = ["rate", "1mbit", "burst", "70000", "limit", "256000"]
    shaped = subprocess.run(
        ["tc", "-n", name, "qdisc", "add", "dev", "veth0", "root", "tbf", *bucket], capture_output=True, check=False
    )
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return made.returncode == shaped.returncode == 0


needs_namespaces = pytest.mark.skipif(
    not _network_namespaces_work(), reason="needs Linux, root, ip and tc, and the kernel's veth, bridge and tbf"
)


def _start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(NETLAB), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _namespaces_of(process: subprocess.Popen[str]) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"netlab{process.pid}-")]


@needs_namespaces
def test_a_transfer_takes_what_the_rate_allows() -> None:
    process = _start("--rate", f"{RATE_MBIT}mbit", "--", sys.executable, "-c", TRANSFER, str(SENT_BYTES))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    word = out.split()
    assert word[2:] == ["world", "2"]
    # the first bucket (70 kB) and what the switch holds pass at once; a slow machine can only make it longer
    assert float(word[1]) > 0.8 * SENT_BYTES * 8 / (RATE_MBIT * 1e6)
    sent = {line.split(":")[0]: float(line.split()[3]) for line in err.splitlines() if line.startswith("host")}
    assert sent["host 1"] >= SENT_BYTES / 1e6 > 10 * sent["host 0"]
    assert _namespaces_of(process) == []


@needs_namespaces
def test_a_failing_rank_stops_the_others_and_its_code_is_returned() -> None:
    process = _start("--ranks-per-host", "2", "--", "sh", "-c", 'if [ "$RANK" = 2 ]; then exit 7; fi; exec sleep 600')
    _, err = process.communicate(timeout=60)
    assert process.returncode == 7, err
    assert _namespaces_of(process) == []


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_a_signal(number: signal.Signals) -> None:
    seconds = f"600.{os.getpid()}{int(number)}"
    process = _start("--", "sh", "-c", f"echo started; exec sleep {seconds}")
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert "Traceback" not in err
    assert _namespaces_of(process) == []
    # with the first process of a host's process namespace all of its ranks are gone
    assert _processes_of(seconds) == []


def _processes_of(seconds: str) -> list[str]:
    """Processes that run `sleep seconds`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == f"sleep\0{seconds}\0".encode():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "fast"], "is 'fast', must be a rate such as 100mbit or 1gbit"),
        (["--rate", "0mbit"], "is '0mbit'"),
        (["--hosts", "0"], "--hosts: is 0, must be 1 to 250"),
        (["--ranks-per-host", "0"], "--ranks-per-host: is 0, must be 1 or more"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str) -> None:
    process = _start(*arguments, "--", "true")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert message in err
