"""Two network namespaces for a server and a worker, connected by a cable with faults.

Needs root, iproute2, veth and tbf; `benchmarks.link.missing()` returns what is missing. The proxy
simulates delay, loss and reordering, because not every kernel has netem.
"""

import os
import re
import subprocess

from benchmarks.link import SlowLink

FAST = 10_000
NAME = re.compile(r"psbench-(\d+)-(?:server|worker)")


class Cable(SlowLink):
    """Two connected namespaces. server, worker: their names; `benchmarks.link.inside` starts
    commands.

    The addresses are benchmarks.link's SERVER_ADDRESS and WORKER_ADDRESS.
    """

    def __init__(self, megabits: int = FAST) -> None:
        super().__init__(megabits)

    def __enter__(self) -> "Cable":
        sweep()
        super().__enter__()
        return self

    def down(self) -> None:
        """Unplug the worker's end; both systems notice it."""
        _run("ip", "-n", self.worker, "link", "set", "veth0", "down")

    def up(self) -> None:
        _run("ip", "-n", self.worker, "link", "set", "veth0", "up")

    def rate(self, megabits: int) -> None:
        """Limit the megabits per second in each direction; also ends `silence`."""
        for end in (self.server, self.worker):
            limit = ("tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "100ms")
            _run("tc", "-n", end, "qdisc", "replace", "dev", "veth0", "root", *limit)

    def silence(self) -> None:
        """Lose every packet without notice, as a distant cut does."""
        for end in (self.server, self.worker):
            _run("tc", "-n", end, "qdisc", "replace", "dev", "veth0", "root", "pfifo", "limit", "0")


def sweep() -> None:
    """Remove namespaces of killed processes."""
    found = subprocess.run(
        ("ip", "netns", "list"), capture_output=True, text=True, timeout=30
    ).stdout
    for match in NAME.finditer(found):
        if not os.path.exists(f"/proc/{match[1]}"):
            _run("ip", "netns", "delete", match[0])


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
