"""A slow link on this machine: two network namespaces, joined by a veth pair whose ends send at
a bounded rate.

Needs root, iproute2 and the kernel's veth and tbf. Nothing is left behind when the `with` ends;
the namespaces go, and the link with them.
"""

import os
import shutil
import subprocess
from contextlib import ExitStack
from types import TracebackType

SERVER_ADDRESS, WORKER_ADDRESS = "10.98.76.1", "10.98.76.2"


def missing() -> str:
    """Why there can be no slow link here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "needs iproute2 (ip and tc)"
    try:
        with SlowLink(100):
            return ""
    except RuntimeError as error:
        return str(error)


class SlowLink:
    """server and worker: names of the namespaces, inside the `with`. RuntimeError where the
    system forbids it.
    """

    def __init__(self, megabits: int) -> None:
        self._megabits = megabits
        self.server, self.worker = (f"psbench-{os.getpid()}-{end}" for end in ("server", "worker"))
        self._resources = ExitStack()

    def __enter__(self) -> "SlowLink":
        try:
            for name in (self.server, self.worker):
                _run("ip", "netns", "add", name)
                self._resources.callback(_run, "ip", "netns", "delete", name)
            veth = ("ip", "link", "add", "veth0", "netns", self.server, "type", "veth")
            _run(*veth, "peer", "name", "veth0", "netns", self.worker)
            self._set_up(self.server, SERVER_ADDRESS)
            self._set_up(self.worker, WORKER_ADDRESS)
        except BaseException:
            self._resources.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._resources.close()

    def _set_up(self, name: str, address: str) -> None:
        _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "veth0")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", name, "link", "set", "veth0", "up")
        # a bucket of 256 KiB holds a few of the largest packets that veth passes on whole
        rate = ("rate", f"{self._megabits}mbit", "burst", "256kb", "latency", "100ms")
        _run("tc", "-n", name, "qdisc", "add", "dev", "veth0", "root", "tbf", *rate)


def inside(name: str) -> tuple[str, ...]:
    """What to put before a command so that it runs in that namespace."""
    return ("ip", "netns", "exec", name)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
