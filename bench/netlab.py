"""A network on one machine: hosts joined by links of a set rate, so that communication time is a dial.

    sudo python bench/netlab.py --hosts 2 --rate 1gbit -- python examples/my_ranks.py
    sudo python bench/netlab.py --hosts 2 --ranks-per-host 2 --rate 100mbit -- python -m mymodule --steps 20

The command runs once per rank, with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as
torchrun sets them, and one thread unless OMP_NUM_THREADS says otherwise. A host is a network namespace and a process
namespace: ranks of different hosts share no memory. All hosts hang on one switch, and each link is held to the rate in
both directions by a token bucket. No delay is added. The addresses (10.77.0.x) exist in these namespaces only.

Afterwards the bytes that each host sent and received are printed, and everything is removed, also after Ctrl-C. If a
rank fails the others are stopped, and its exit code is this program's. Needs Linux, root, iproute2 (ip, tc).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

KILOBIT, MEGABIT, GIGABIT = 10**3, 10**6, 10**9
UNITS = {"kbit": KILOBIT, "mbit": MEGABIT, "gbit": GIGABIT}
# An offloaded packet of 64 KiB must fit into the bucket; more than a millisecond of rate would be a burst to measure.
LEAST_BURST_BYTES = 70_000
GRACE_SECONDS = 5.0


def parse_rate(text: str) -> int:
    """Bits per second of "100mbit" or "2.5gbit"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a rate such as 100mbit or 1gbit")
    return int(float(match[1]) * UNITS[match[2]])


def _tool(*arguments: str) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


class Lab:
    """Hosts, a switch, and shaped links between them; a context manager that removes them."""

    def __init__(self, hosts: int, rate: int) -> None:
        self.hosts = [f"netlab{os.getpid()}-{i}" for i in range(hosts)]
        self._switch = f"netlab{os.getpid()}-switch"
        self._rate = rate

    def __enter__(self) -> Lab:
        try:
            self._build()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _build(self) -> None:
        _tool("ip", "netns", "add", self._switch)
        _tool("ip", "-n", self._switch, "link", "add", "bridge0", "type", "bridge")
        _tool("ip", "-n", self._switch, "link", "set", "bridge0", "up")
        for i, host in enumerate(self.hosts):
            port = f"port{i}"
            _tool("ip", "netns", "add", host)
            _tool("ip", "-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
            _tool("ip", "-n", self._switch, "link", "set", port, "master", "bridge0", "up")
            _tool("ip", "-n", host, "addr", "add", f"{address(i)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _tool("ip", "-n", host, "link", "set", device, "up")
            self._shape(host, "eth0")
            self._shape(self._switch, port)

    def _shape(self, namespace: str, device: str) -> None:
        bytes_per_ms = self._rate // 8000
        burst, queue = max(LEAST_BURST_BYTES, bytes_per_ms), max(256_000, 32 * bytes_per_ms)
        bucket = ("rate", f"{self._rate}bit", "burst", str(burst), "limit", str(queue))
        _tool("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *bucket)

    def traffic(self) -> list[tuple[int, int]]:
        """(bytes sent, bytes received) of each host so far, with headers."""
        counters = []
        for host in self.hosts:
            paths = [f"/sys/class/net/eth0/statistics/{way}_bytes" for way in ("tx", "rx")]
            sent, received = _tool("ip", "netns", "exec", host, "cat", *paths).split()
            counters.append((int(sent), int(received)))
        return counters

    def remove(self) -> None:
        """Remove what was made, as far as it was made."""
        existing = {line.split()[0] for line in _tool("ip", "netns", "list").splitlines() if line}
        for namespace in (*self.hosts, self._switch):
            if namespace in existing:
                _tool("ip", "netns", "delete", namespace)


def address(host: int) -> str:
    """The address of a host, by its number."""
    return f"10.77.0.{host + 1}"


def start_host(lab: Lab, host: int, ranks_per_host: int, port: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start this program's `--ranks-of-host` part in the host's namespaces; its ranks end when it ends."""
    environment = {
        **os.environ,
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(len(lab.hosts) * ranks_per_host),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    isolate = ("ip", "netns", "exec", lab.hosts[host], "unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    own = (sys.executable, os.path.abspath(__file__), "--ranks-of-host", str(host), "--ranks-per-host")
    # `unshare` itself ignores signals: they go to its group, which has a session of its own
    everything = [*isolate, *own, str(ranks_per_host), "--", *command]
    return subprocess.Popen(everything, env=environment, start_new_session=True)


class Asked:
    """Whether a signal asked this program to stop. It is looked at while waiting: an exception out of a handler could
    be raised, and lost, in a destructor, or end the removal of what was made."""

    def __init__(self) -> None:
        self.number = 0
        for number in (signal.SIGTERM, signal.SIGINT):  # shells ignore the latter in what they start behind themselves
            signal.signal(number, self._remember)

    def _remember(self, number: int, _: object) -> None:
        self.number = number


def run_ranks(host: int, count: int, command: Sequence[str], asked: Asked) -> int:
    """Run the ranks of one host; the exit code of the first that failed."""
    ranks = []
    for local in range(count):
        environment = {**os.environ, "RANK": str(host * count + local), "LOCAL_RANK": str(local)}
        ranks.append(subprocess.Popen(command, env=environment, start_new_session=True))
    return wait_for(ranks, asked)


def wait_for(processes: list[subprocess.Popen[bytes]], asked: Asked) -> int:
    """0 when all ended well; when one fails the others are stopped, and its exit code is returned. After a signal all
    are stopped."""
    try:
        while not asked.number:
            codes = [process.poll() for process in processes]
            failed = [code for code in codes if code]
            if failed:
                return failed[0] if failed[0] > 0 else 128 - failed[0]
            if None not in codes:
                return 0
            time.sleep(0.02)
        return 128 + asked.number
    finally:
        stop(processes)


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """End what still runs, with its group: asked first, killed after a grace period."""
    deadline = time.monotonic() + GRACE_SECONDS
    while running := [process for process in processes if process.poll() is None]:
        late = time.monotonic() > deadline
        for process in running:
            # asked again and again: the first process of a host hears nothing before it listens
            os.killpg(process.pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="how many, 1 to 250 (default: 2)")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="processes on each (default: 1)")
    parser.add_argument("--rate", type=parse_rate, default="1gbit", help="of each link and direction (default: 1gbit)")
    parser.add_argument("--port", type=int, default=29500, help="where rank 0 listens, in its host (default: 29500)")
    parser.add_argument("--ranks-of-host", type=int, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="+", help="after --: what every rank runs")
    arguments = parser.parse_args()
    if not 1 <= arguments.hosts <= 250:
        parser.error(f"--hosts: is {arguments.hosts}, must be 1 to 250")
    if arguments.ranks_per_host < 1:
        parser.error(f"--ranks-per-host: is {arguments.ranks_per_host}, must be 1 or more")
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        parser.error(f"not found: {', '.join(missing)} (Debian: apt install iproute2 util-linux)")
    if os.geteuid() != 0:
        parser.error("network namespaces need root: start it with sudo")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    asked = Asked()
    if arguments.ranks_of_host is not None:
        return run_ranks(arguments.ranks_of_host, arguments.ranks_per_host, arguments.command, asked)
    with Lab(arguments.hosts, arguments.rate) as lab:
        count, command = arguments.ranks_per_host, arguments.command
        code = wait_for([start_host(lab, i, count, arguments.port, command) for i in range(arguments.hosts)], asked)
        for host, (sent, received) in enumerate(lab.traffic()):
            print(f"host {host}: sent {sent / 1e6:.2f} MB, received {received / 1e6:.2f} MB", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
