"""strace makes system calls of a ps-server fail, or kills it in one; no code of ours is changed."""

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
MAX_PUSHES = 300
"""Pushes within which the injected call must happen."""


def reason_without_strace() -> str:
    """Return why strace cannot trace here; empty if it can."""
    if not STRACE:
        return "strace is not installed"
    tried = subprocess.run([STRACE, "-o", os.devnull, "true"], capture_output=True, text=True)
    return f"strace does not work here: {tried.stderr.strip()[-200:]}" if tried.returncode else ""


REASON = reason_without_strace()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


class TracedServer:
    """One shard that syncs its log before each answer, with a fixed port and data directory."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self.address = f"127.0.0.1:{free_ports(1)[0]}"

    def start(self, injection: str = "") -> Program:
        """Start the server under strace with this injection.

        `fsync:error=EIO:when=3` fails the third call of each thread; a leading slash makes a
        pattern.
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
        # -D: strace is a child of the server, not its parent, so that a kill of the server ends
        # both
        quiet = ("-D", "-f", "-qq", "-o", os.devnull, "-e", f"trace={injection.split(':')[0]}")
        return (STRACE, *quiet, "-e", f"inject={injection}")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TracedServer]:
    with programs_in(tmp_path) as programs:
        yield TracedServer(programs)


def push_until_server_exits(client: Client) -> int:
    """Return the number of acknowledged pushes."""
    for acknowledged in range(MAX_PUSHES):
        try:
            count(client)
        except PSError:
            return acknowledged
    raise AssertionError(f"the server outlived {MAX_PUSHES} pushes")


@pytest.mark.parametrize(("call", "when"), [("/pwritev", 15), ("fdatasync", 40)])
def test_a_server_killed_in_a_system_call_recovers_acknowledged_pushes(
    server: TracedServer, call: str, when: int
) -> None:
    first = server.start(f"{call}:signal=SIGKILL:when={when}")
    with counter(server.address, connect_timeout=1.0) as client:
        acknowledged = push_until_server_exits(client)
    assert first.wait() == -signal.SIGKILL
    assert acknowledged > 0

    server.start()

    assert acknowledged <= counted(weights_of(server.address)) <= acknowledged + 1


@pytest.mark.parametrize(
    "trouble", ["fdatasync:error=EIO:when=15..16", "/pwritev:error=ENOSPC:when=15..16"]
)
def test_training_continues_while_log_writes_fail(
    server: TracedServer, tmp_path: Path, trouble: str
) -> None:
    """The next snapshot makes the log complete again."""
    first = server.start(trouble)
    with counter(server.address) as client:
        count(client, 60)
        first.wait_for("log_unwritable")
        first.wait_for("log_writable_again")
        until(lambda: SnapshotDirectory(tmp_path / "data").newest_valid()[0], "the snapshot")
    first.end()

    server.start()

    assert counted(weights_of(server.address)) == 60
