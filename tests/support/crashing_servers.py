"""Servers that crash at their n-th disk operation, as kill -9 at that moment would."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.disk_operations import Operation, Operations
from tests.support.forked_job import CONTEXT, JobProcess, serve
from tests.support.ports import free_ports

KILLED = 137


def crash(operation: Operation, real: Callable[[], Any], arguments: Sequence[Any]) -> Any:
    """Exit without flushing or notifying any process."""
    os._exit(KILLED)


def serve_until_crash(arguments: Sequence[str], log: Path, at: int) -> None:
    """Run a server process that crashes at operation `at`; 0 means never."""
    Operations(at, at, crash).install(setattr)
    serve(arguments, log)


class CrashingServers:
    """Two shards with constant ports and their data in `folder`. flags: arguments of both."""

    def __init__(self, folder: Path, *flags: object) -> None:
        self.folder = folder
        self.processes: list[JobProcess] = []
        self._flags = [str(flag) for flag in flags]
        self._binds = [f"127.0.0.1:{port}" for port in free_ports(2)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    @property
    def address(self) -> str:
        return ",".join(self._binds)

    def kill(self) -> None:
        """Kill all running servers."""
        for process in self.processes:
            process.kill()

    def start(self, shard: int, at: int = 0) -> JobProcess:
        """Start a server that crashes at operation `at`; 0 means never."""
        joined = ["--join", self._binds[0]] if shard else []
        identity = [
            "--shard",
            f"{shard}/2",
            "--bind",
            self._binds[shard],
            "--data-dir",
            str(self.folder / "data"),
        ]
        log = self.folder / f"s{shard}.{len(self.processes)}.log"
        process = CONTEXT.Process(
            target=serve_until_crash,
            args=([*identity, *joined, *self._flags], log, at),
            daemon=True,
        )
        process.start()
        self.processes.append(JobProcess(f"s{shard}", len(self.processes), process, log))
        return self.processes[-1]

    def all_logs(self) -> str:
        return "\n".join(
            f"--- {process.name}.{process.attempt}\n{process.log.read_text()}"
            for process in self.processes
        )
