"""Servers that end themselves at their n-th operation on the disk, as kill -9 at that very
moment would.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.disk_operations import Operation, Operations
from tests.support.forked_job import CONTEXT, Life, serve
from tests.support.ports import free_ports

KILLED = 137


def die(operation: Operation, real: Callable[[], Any], arguments: Sequence[Any]) -> Any:
    """Nothing is flushed, nobody is told."""
    os._exit(KILLED)


def serve_until_crash(arguments: Sequence[str], log: Path, at: int) -> None:
    """Body of a server's process that ends at operation `at`; 0: it does not."""
    Operations(at, at, die).install(setattr)
    serve(arguments, log)


class CrashingServers:
    """Two shards on their own ports, which keep their data in `folder`. flags: of both."""

    def __init__(self, folder: Path, *flags: object) -> None:
        self.folder = folder
        self.lives: list[Life] = []
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
        """kill -9 of whoever runs."""
        for life in self.lives:
            life.kill()

    def start(self, shard: int, at: int = 0) -> Life:
        """A server's next life, up to operation `at` of it."""
        joined = ["--join", self._binds[0]] if shard else []
        place = [
            "--shard",
            f"{shard}/2",
            "--bind",
            self._binds[shard],
            "--data-dir",
            str(self.folder / "data"),
        ]
        log = self.folder / f"s{shard}.{len(self.lives)}.log"
        process = CONTEXT.Process(
            target=serve_until_crash, args=([*place, *joined, *self._flags], log, at), daemon=True
        )
        process.start()
        self.lives.append(Life(f"s{shard}", len(self.lives), process, log))
        return self.lives[-1]

    def said(self) -> str:
        return "\n".join(
            f"--- {life.name}.{life.attempt}\n{life.log.read_text()}" for life in self.lives
        )
