"""A network of its own for a server and a worker: two namespaces, a cable between them, and what
can happen to it.

Needs root, iproute2, veth and tbf: `benchmarks.link.missing()` says why not. Delay, loss and
reordering are the proxy's: netem is not in every kernel.
"""

import os
import re
import subprocess

from benchmarks.link import SlowLink

FAST = 10_000
NAME = re.compile(r"psbench-(\d+)-(?:server|worker)")


class Cable(SlowLink):
    """server, worker: names of the namespaces, inside the `with`; start commands in one with
    `benchmarks.link.inside`.

    They reach each other at benchmarks.link's SERVER_ADDRESS and WORKER_ADDRESS.
    """

    def __init__(self, megabits: int = FAST) -> None:
        super().__init__(megabits)

    def __enter__(self) -> "Cable":
        sweep()
        super().__enter__()
        return self

    def down(self) -> None:
        """The worker's end is unplugged, and both systems know it."""
        _run("ip", "-n", self.worker, "link", "set", "veth0", "down")

    def up(self) -> None:
        _run("ip", "-n", self.worker, "link", "set", "veth0", "up")

    def rate(self, megabits: int) -> None:
        """What passes in a second, each way; also the end of `silence`."""
        for end in (self.server, self.worker):
            limit = ("tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "100ms")
            _run("tc", "-n", end, "qdisc", "replace", "dev", "veth0", "root", *limit)

    def silence(self) -> None:
        """Every packet is lost on the way, and nobody is told: a cut somewhere far away."""
        for end in (self.server, self.worker):
            _run("tc", "-n", end, "qdisc", "replace", "dev", "veth0", "root", "pfifo", "limit", "0")


def sweep() -> None:
    """Removes namespaces whose makers were killed."""
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
