"""Servers and workers as real processes, forked from a process that has imported their modules.

A process starts in milliseconds, so a test can kill and restart dozens of them.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.fork_server import CONTEXT
from tests.support.ports import free_ports
from tests.support.protection import protect_this_process, protection_of

POLL_SECONDS = 0.02
"""Seconds between two checks of a condition."""

Script = Callable[..., None]


def serve(arguments: Sequence[str], log: Path) -> None:
    """Run a server process."""
    from psserver import cli

    _redirect_output(log)
    sys.exit(cli.main(arguments))


def work(
    script: Script, address: str, rank: int | None, attempt: int, options: dict[str, Any], log: Path
) -> None:
    """Run a worker process."""
    from pscommon.telemetry import logs

    _redirect_output(log)
    os.environ |= {"PS_WORKER_ATTEMPT": str(attempt), "OMP_NUM_THREADS": "1"}
    os.environ |= protection_of("ps-worker")
    protect_this_process()  # a script may ask servers before it makes a client
    logs.set_up("info", "text")
    script(address, rank, **options)


def _redirect_output(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


@dataclass
class JobProcess:
    """One start of a server or worker. name: w1 or s0."""

    name: str
    attempt: int
    process: ForkServerProcess
    log: Path

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""
        return self.process.exitcode

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Send SIGKILL and wait for the exit. Can be repeated."""
        self.process.kill()
        self.process.join()


class ForkedJob:
    """Servers, with constant ports and data, and workers of a job; __enter__ starts none of them.

    flags: arguments of every server.
    script(address, rank, **options): function that a worker runs.
    body: function that a server process runs.
    """

    body = staticmethod(serve)

    def __init__(
        self, folder: Path, shards: int, flags: Sequence[object], script: Script, **options: Any
    ) -> None:
        self.folder = folder
        self.processes: dict[str, JobProcess] = {}
        self.all: list[JobProcess] = []
        self._flags = [str(flag) for flag in flags]
        self._script, self._options = script, options
        self._shards = shards
        self._binds = [f"127.0.0.1:{port}" for port in free_ports(shards)]
        self._shard_counts = [shards] * shards  # number of shards in each server's command

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.all:
            if process.exit_code is None:
                process.kill()

    @property
    def address(self) -> str:
        return ",".join(self._binds)

    @property
    def running_names(self) -> list[str]:
        """Names of the running processes."""
        return [name for name, process in self.processes.items() if process.exit_code is None]

    def start(self, *names: str) -> None:
        """Start these processes; a restarted process has the next attempt number."""
        for name in names:
            attempt = self.processes[name].attempt + 1 if name in self.processes else 0
            log, number = self.folder / f"{name}.{attempt}.log", int(name[1:])
            target, arguments = (
                (
                    self.body,
                    (self._standby(number) if name.startswith("b") else self._server(number), log),
                )
                if name.startswith(("s", "b"))
                else (work, (self._script, self.address, number, attempt, self._options, log))
            )
            process = CONTEXT.Process(target=target, args=arguments, name=name, daemon=True)
            process.start()
            self.processes[name] = JobProcess(name, attempt, process, log)
            self.all.append(self.processes[name])

    def add_servers(self, shards: int) -> None:
        """Start servers for a reshard to this number; running servers are unchanged."""
        first = len(self._binds)
        self._binds += [f"127.0.0.1:{port}" for port in free_ports(shards - first)]
        self._shard_counts += [shards] * (shards - first)
        self.start(*(f"s{shard}" for shard in range(first, shards)))

    def start_all(self, workers: int) -> None:
        self.start(
            *(f"s{shard}" for shard in range(self._shards)),
            *(f"w{rank}" for rank in range(workers)),
        )

    def stop(self) -> None:
        """Send SIGTERM to the servers, which write a last snapshot, and wait for them."""
        for name in [name for name in self.running_names if name.startswith("s")]:
            self.processes[name].send(signal.SIGTERM)
        for name in [name for name in self.processes if name.startswith("s")]:
            self.processes[name].process.join(60)

    def _server(self, shard: int) -> list[str]:
        joined = ["--join", self._binds[0]] if shard else []
        data = ["--data-dir", str(self.folder / "data")]
        return [
            "--shard",
            f"{shard}/{self._shard_counts[shard]}",
            "--bind",
            self._binds[shard],
            *joined,
            *data,
            *self._flags,
        ]

    def _standby(self, shard: int) -> list[str]:
        raise NotImplementedError("this job has no standbys")

    def all_logs(self) -> str:
        """Return the output of all processes."""
        return "\n".join(
            f"--- {process.name}.{process.attempt}\n{process.log.read_text()}"
            for process in self.all
        )

    def supervise(
        self, until: Callable[[], bool], seconds: float, each: Callable[[], None] = lambda: None
    ) -> None:
        """Restart killed processes until the condition holds.

        AssertionError on timeout or if a process exits for another reason.
        """
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline, (
                f"after {seconds:.0f} s: not done\n{self.all_logs()}"
            )
            each()
            for name, process in list(self.processes.items()):
                if process.exit_code not in (None, 0):
                    assert process.exit_code == -signal.SIGKILL, (
                        f"{name} ended with {process.exit_code}\n{self.all_logs()}"
                    )
                    self.start(name)
            connection.wait(
                [
                    process.process.sentinel
                    for process in self.processes.values()
                    if process.exit_code is None
                ],
                POLL_SECONDS,
            )

    def workers_done(self) -> bool:
        return all(
            process.exit_code == 0
            for name, process in self.processes.items()
            if name.startswith("w")
        )
