"""Servers and workers of a job as real processes, to be killed, stopped and started again at
will.
"""

import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pscommon.core.errors import PSError
from psworker import Client
from tests.support.metrics_scrape import get
from tests.support.ports import free_ports
from tests.support.programs import LIMIT, Program, Programs
from tests.support.proxy import Proxy
from tests.support.workers import until

ROOT = Path(__file__).parents[2]
MODULES = f"{ROOT}:{ROOT / 'common'}"
"""PYTHONPATH of a script that imports from tests."""

PATIENCE = 5.0
"""Seconds for one look at the job's status."""


def kill(program: Program) -> None:
    """kill -9, and waits until the process is gone: its ports and locks are free. Harmless to
    repeat.
    """
    program.end()


def stop(program: Program) -> None:
    """SIGSTOP, and waits until all its threads stand still: one that is on a processor may go on
    for a moment.
    """
    program.send(signal.SIGSTOP)
    tasks = Path(f"/proc/{program.pid}/task")
    until(
        lambda: all(state_of(int(task.name)) == "T" for task in tasks.iterdir()),
        f"a stopped {program.pid}",
    )


def go_on(program: Program) -> None:
    """SIGCONT."""
    program.send(signal.SIGCONT)


def state_of(pid: int) -> str:
    """One letter: R running, S sleeping, T stopped ...; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def status_of(address: str, patience: float = PATIENCE) -> dict[str, Any]:
    """As GetStatus; empty while nobody answers."""
    try:
        with Client(address, observe=True, connect_timeout=patience) as client:
            return client.status()
    except PSError:
        return {}


def reached(address: str, version: int, seconds: float = LIMIT) -> dict[str, Any]:
    """The job's status as soon as its version is at least this one. AssertionError if it does
    not get there in time.
    """

    def look() -> dict[str, Any]:
        status = status_of(address)
        return status if status.get("version", -1) >= version else {}

    return until(look, f"version {version}", seconds)


class Servers:
    """All shards of a job. They keep their ports and data directory, however often they are
    started again.

    flags: of every ps-server. proxied: workers reach each shard through a Proxy
    (`proxies[shard]`), other shards reach it directly. fresh: by the command, not forked.
    programs: the newest process of each shard; started: all that there ever were.
    """

    def __init__(
        self,
        programs: Programs,
        shards: int = 1,
        *flags: object,
        data_dir: Path | None = None,
        proxied: bool = False,
        seed: int = 0,
        fresh: bool = False,
    ) -> None:
        self.programs: list[Program] = []
        self.started: list[Program] = []
        self.proxies: list[Proxy] = []
        self._starter = programs.start if fresh else programs.fork
        self._flags = (*flags, *(("--data-dir", data_dir) if data_dir is not None else ()))
        self._shards = shards
        ports = free_ports(2 * shards)
        self._binds = [f"127.0.0.1:{port}" for port in ports[:shards]]
        self._monitors = [f"127.0.0.1:{port}" for port in ports[shards:]]
        self._proxied, self._seed = proxied, seed
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        if self._proxied:
            for shard, bind in enumerate(self._binds):
                self.proxies.append(
                    self._resources.enter_context(Proxy(bind, seed=self._seed + shard))
                )
        self._resources.callback(lambda: [kill(program) for program in self.programs])
        self.programs = [self._start(shard) for shard in range(self._shards)]
        for program in self.programs:
            program.wait_for("listening")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._resources.close()

    @property
    def addresses(self) -> Sequence[str]:
        """For workers, by shard."""
        return [proxy.address for proxy in self.proxies] or self._binds

    @property
    def address(self) -> str:
        """For workers: all of them, so that any shard may be down when one comes."""
        return ",".join(self.addresses)

    @property
    def binds(self) -> Sequence[str]:
        """By shard, past the proxies."""
        return self._binds

    def kill(self, shard: int) -> None:
        kill(self.programs[shard])

    def start(self, shard: int) -> Program:
        """The process of a shard that was killed, again; returns at once."""
        assert self.programs[shard].process.poll() is not None, f"shard {shard} still runs"
        self.programs[shard] = self._start(shard)
        return self.programs[shard]

    def restart(self, shard: int) -> float:
        """Kills the shard and starts it again; the seconds from the start until workers can
        train on it.
        """
        self.kill(shard)
        began = time.monotonic()
        self.start(shard)
        self.wait_ready(shard)
        return time.monotonic() - began

    def is_ready(self, shard: int) -> bool:
        """By its /readyz."""
        try:
            return get(self._monitors[shard], "/readyz").status == 200
        except OSError:
            return False

    def wait_ready(self, shard: int, seconds: float = LIMIT) -> None:
        until(
            lambda: self.is_ready(shard) or self._check(shard), f"shard {shard} is ready", seconds
        )

    def _check(self, shard: int) -> bool:
        program = self.programs[shard]
        assert program.process.poll() is None, (
            f"shard {shard} ended with {program.wait()}:\n{program.said}"
        )
        return False

    def _start(self, shard: int) -> Program:
        advertised = ("--advertise", self.proxies[shard].address) if self.proxies else ()
        joined = ("--join", self._binds[0]) if shard else ()
        place = (
            "--shard",
            f"{shard}/{self._shards}",
            "--bind",
            self._binds[shard],
            *advertised,
            *joined,
        )
        command = ("ps-server", *place, "--metrics-bind", self._monitors[shard], *self._flags)
        self.started.append(self._starter(*command, PYTHONPATH=MODULES))
        return self.started[-1]


def worker(
    programs: Programs,
    servers: Servers,
    rank: int,
    *command: object,
    attempt: int = 0,
    fresh: bool = False,
    **environment: object,
) -> Program:
    """ps-worker with a script: `command` is what follows its flags. attempt: how often this rank
    was started before; fresh: by the command, not forked."""
    start = programs.start if fresh else programs.fork
    return start(
        "ps-worker",
        "--ps",
        servers.address,
        "--worker-rank",
        rank,
        "--device",
        "cpu",
        *command,
        **{"PYTHONPATH": MODULES, "PS_WORKER_ATTEMPT": attempt, **environment},
    )
