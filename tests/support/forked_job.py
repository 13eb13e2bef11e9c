"""Servers and workers as real processes that start in a moment, forked from one that has
imported all they need.

So a run can have dozens of kills in the time in which a fresh interpreter would import torch
once.
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

LOOK = 0.02
"""Seconds between two looks at what should become true."""

Script = Callable[..., None]


def serve(arguments: Sequence[str], log: Path) -> None:
    """Body of a server's process."""
    from psserver import cli

    _speak_into(log)
    sys.exit(cli.main(arguments))


def work(
    script: Script, address: str, rank: int | None, attempt: int, options: dict[str, Any], log: Path
) -> None:
    """Body of a worker's process."""
    from pscommon.telemetry import logs

    _speak_into(log)
    os.environ |= {"PS_WORKER_ATTEMPT": str(attempt), "OMP_NUM_THREADS": "1"}
    logs.set_up("info", "text")
    script(address, rank, **options)


def _speak_into(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


@dataclass
class Life:
    """One process, from its start to its end. name: w1 or s0."""

    name: str
    attempt: int
    process: ForkServerProcess
    log: Path

    @property
    def ended(self) -> int | None:
        """Its exit code, negative for a signal; None: it runs."""
        return self.process.exitcode

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """kill -9, and waits until it is gone. Harmless to repeat."""
        self.process.kill()
        self.process.join()


class ForkedJob:
    """A job's servers, which keep their ports and data, and its workers. Inside the `with`
    nothing is started yet.

    flags: of every server. script(address, rank, **options): what a worker does. body: of a
    server's process.
    """

    body = staticmethod(serve)

    def __init__(
        self, folder: Path, shards: int, flags: Sequence[object], script: Script, **options: Any
    ) -> None:
        self.folder = folder
        self.lives: dict[str, Life] = {}
        self.all: list[Life] = []
        self._flags = [str(flag) for flag in flags]
        self._script, self._options = script, options
        self._shards = shards
        self._binds = [f"127.0.0.1:{port}" for port in free_ports(shards)]
        self._of = [shards] * shards  # what each server's command line says

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for life in self.all:
            if life.ended is None:
                life.kill()

    @property
    def address(self) -> str:
        return ",".join(self._binds)

    @property
    def names(self) -> list[str]:
        """Of whoever runs."""
        return [name for name, life in self.lives.items() if life.ended is None]

    def start(self, *names: str) -> None:
        """Starts them; who died is started again, one attempt later."""
        for name in names:
            attempt = self.lives[name].attempt + 1 if name in self.lives else 0
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
            self.lives[name] = Life(name, attempt, process, log)
            self.all.append(self.lives[name])

    def add_servers(self, shards: int) -> None:
        """Servers start that make it so many, once ps-ctl reshard says so. Those before keep
        their command lines.
        """
        first = len(self._binds)
        self._binds += [f"127.0.0.1:{port}" for port in free_ports(shards - first)]
        self._of += [shards] * (shards - first)
        self.start(*(f"s{shard}" for shard in range(first, shards)))

    def start_all(self, workers: int) -> None:
        self.start(
            *(f"s{shard}" for shard in range(self._shards)),
            *(f"w{rank}" for rank in range(workers)),
        )

    def stop(self) -> None:
        """Ends the servers as an operator would, with a last snapshot."""
        for name in [name for name in self.names if name.startswith("s")]:
            self.lives[name].send(signal.SIGTERM)
        for name in [name for name in self.lives if name.startswith("s")]:
            self.lives[name].process.join(60)

    def _server(self, shard: int) -> list[str]:
        joined = ["--join", self._binds[0]] if shard else []
        data = ["--data-dir", str(self.folder / "data")]
        return [
            "--shard",
            f"{shard}/{self._of[shard]}",
            "--bind",
            self._binds[shard],
            *joined,
            *data,
            *self._flags,
        ]

    def _standby(self, shard: int) -> list[str]:
        raise NotImplementedError("this job has no standbys")

    def said(self) -> str:
        """All that anybody has written, by process."""
        return "\n".join(
            f"--- {life.name}.{life.attempt}\n{life.log.read_text()}" for life in self.all
        )

    def tend(
        self, until: Callable[[], bool], seconds: float, each: Callable[[], None] = lambda: None
    ) -> None:
        """Starts again what was killed, until the condition holds. AssertionError if that takes
        too long, or if one ends for another reason."""
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline, f"after {seconds:.0f} s: not done\n{self.said()}"
            each()
            for name, life in list(self.lives.items()):
                if life.ended not in (None, 0):
                    assert life.ended == -signal.SIGKILL, (
                        f"{name} ended with {life.ended}\n{self.said()}"
                    )
                    self.start(name)
            connection.wait(
                [life.process.sentinel for life in self.lives.values() if life.ended is None], LOOK
            )

    def workers_done(self) -> bool:
        return all(life.ended == 0 for name, life in self.lives.items() if name.startswith("w"))
