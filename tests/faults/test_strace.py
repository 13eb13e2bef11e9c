"""The kernel refuses a ps-server a system call, or kills it in one: by strace, which knows
nothing of our code.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pscommon.core.errors import PSError
from pscommon.snapshot import SnapshotDirectory
from psworker import Client
from tests.support.ports import free_ports
from tests.support.programs import BIN, Program, Programs, programs_in
from tests.support.workers import count, counted, counter, until, weights_of

STRACE = shutil.which("strace") or ""
MOST = 300
"""Pushes in which the call that is waited for has to come."""


def unusable() -> str:
    """Why there is no strace here that may trace."""
    if not STRACE:
        return "strace is not installed"
    tried = subprocess.run([STRACE, "-o", os.devnull, "true"], capture_output=True, text=True)
    return f"strace does not work here: {tried.stderr.strip()[-200:]}" if tried.returncode else ""


REASON = unusable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


class Server:
    """One shard whose log is synced before each answer; always at the same port, with the same
    data.
    """

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self.address = f"127.0.0.1:{free_ports(1)[0]}"

    def start(self, injection: str = "") -> Program:
        """injection: of strace, such as "fsync:error=EIO:when=3", the third of each thread;
        "/fsync" is a pattern.
        """
        flags = (
            "--shard",
            "0/1",
            "--bind",
            self.address,
            "--data-dir",
            "data",
            "--snapshot-every",
            "1h",
        )
        logged = ("--durability", "log", "--log-fsync", "always", "--lease", "30s")
        server = self._programs.start(*self._traced(injection), BIN / "ps-server", *flags, *logged)
        server.wait_for("listening")
        return server

    @staticmethod
    def _traced(injection: str) -> tuple[str, ...]:
        if not injection:
            return ()
        # -D: strace is the child of the server and not its parent, so that who kills the server
        # ends both
        quiet = ("-D", "-f", "-qq", "-o", os.devnull, "-e", f"trace={injection.split(':')[0]}")
        return (STRACE, *quiet, "-e", f"inject={injection}")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with programs_in(tmp_path) as programs:
        yield Server(programs)


def pushes_until_it_dies(client: Client) -> int:
    """How many were acknowledged."""
    for acknowledged in range(MOST):
        try:
            count(client)
        except PSError:
            return acknowledged
    raise AssertionError(f"the server outlived {MOST} pushes")


@pytest.mark.parametrize(("call", "when"), [("/pwritev", 15), ("fdatasync", 40)])
def test_killed_in_a_system_call_it_has_what_it_acknowledged(
    server: Server, call: str, when: int
) -> None:
    first = server.start(f"{call}:signal=SIGKILL:when={when}")
    with counter(server.address, connect_timeout=1.0) as client:
        acknowledged = pushes_until_it_dies(client)
    assert first.wait() == -signal.SIGKILL
    assert acknowledged > 0

    server.start()

    assert acknowledged <= counted(weights_of(server.address)) <= acknowledged + 1


@pytest.mark.parametrize(
    "trouble", ["fdatasync:error=EIO:when=15..16", "/pwritev:error=ENOSPC:when=15..16"]
)
def test_a_refused_system_call_is_told_and_mended_while_training_goes_on(
    server: Server, tmp_path: Path, trouble: str
) -> None:
    """The log is whole again with the snapshot that mends it."""
    first = server.start(trouble)
    with counter(server.address) as client:
        count(client, 60)
        first.wait_for("log_unwritable")
        first.wait_for("log_writable_again")
        until(lambda: SnapshotDirectory(tmp_path / "data").newest_valid()[0], "the snapshot")
    first.end()

    server.start()

    assert counted(weights_of(server.address)) == 60
