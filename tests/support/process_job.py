"""Servers and workers of a job as real processes that tests kill, stop and restart."""

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
from tests.support.proxy import Proxy, advertised
from tests.support.workers import until

ROOT = Path(__file__).parents[2]
MODULES = f"{ROOT}:{ROOT / 'common'}"
"""PYTHONPATH of a script that imports from tests."""

STATUS_TIMEOUT_SECONDS = 5.0
"""Seconds for one request of the job's status."""


def kill(program: Program) -> None:
    """Send SIGKILL and wait for the exit, which frees ports and locks. Can be repeated."""
    program.end()


def stop(program: Program) -> None:
    """Send SIGSTOP and wait until all threads are stopped; a running thread may take a moment."""
    program.send(signal.SIGSTOP)
    tasks = Path(f"/proc/{program.pid}/task")
    until(
        lambda: all(state_of(int(task.name)) == "T" for task in tasks.iterdir()),
        f"a stopped {program.pid}",
    )


def resume(program: Program) -> None:
    """Send SIGCONT."""
    program.send(signal.SIGCONT)


def state_of(pid: int) -> str:
    """Return one letter: R running, S sleeping, T stopped; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def status_of(address: str, connect_timeout: float = STATUS_TIMEOUT_SECONDS) -> dict[str, Any]:
    """Return the status; empty if no server answers."""
    try:
        with Client(address, observe=True, connect_timeout=connect_timeout) as client:
            return client.status()
    except PSError:
        return {}


def wait_for_version(address: str, version: int, seconds: float = LIMIT) -> dict[str, Any]:
    """Return the status when the version is at least `version`; AssertionError on timeout."""

    def status_at_version() -> dict[str, Any]:
        status = status_of(address)
        return status if status.get("version", -1) >= version else {}

    return until(status_at_version, f"version {version}", seconds)


class Servers:
    """All shards of a job; they have the same ports and data directory after each restart.

    flags: arguments of every ps-server.
    proxied: workers reach each shard through a Proxy (`proxies[shard]`, and `stream_proxies[shard]`
        for its stream port), other shards directly.
    fresh: start the command in a new interpreter instead of forking.
    programs: the current process of each shard.
    started: all processes so far.
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
        self.stream_proxies: list[Proxy] = []
        addresses = [f"127.0.0.1:{port}" for port in free_ports(3 * shards)]
        self._binds = addresses[:shards]
        self._monitors, self._stream_binds = addresses[shards : 2 * shards], addresses[2 * shards :]
        self._proxied, self._seed = proxied, seed
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        if self._proxied:
            for proxies, binds in (
                (self.proxies, self._binds),
                (self.stream_proxies, self._stream_binds),
            ):
                for shard, bind in enumerate(binds):
                    proxy = Proxy(bind, seed=self._seed + shard)
                    proxies.append(self._resources.enter_context(proxy))
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
        """Addresses for workers, by shard."""
        return [proxy.address for proxy in self.proxies] or self._binds

    @property
    def address(self) -> str:
        """Addresses for workers, comma-separated, so that any shard may be down when a worker
        starts.
        """
        return ",".join(self.addresses)

    @property
    def binds(self) -> Sequence[str]:
        """Addresses by shard, without proxies."""
        return self._binds

    def kill(self, shard: int) -> None:
        kill(self.programs[shard])

    def start(self, shard: int) -> Program:
        """Restart a killed shard without waiting for it."""
        assert self.programs[shard].process.poll() is not None, f"shard {shard} still runs"
        self.programs[shard] = self._start(shard)
        return self.programs[shard]

    def restart(self, shard: int) -> float:
        """Kill and restart a shard; return the seconds from the start until it is ready."""
        self.kill(shard)
        began = time.monotonic()
        self.start(shard)
        self.wait_ready(shard)
        return time.monotonic() - began

    def is_ready(self, shard: int) -> bool:
        """Return whether /readyz answers 200."""
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
            f"shard {shard} ended with {program.wait()}:\n{program.output}"
        )
        return False

    def _start(self, shard: int) -> Program:
        reached = (
            advertised(self.proxies[shard], self._stream_binds[shard], self.stream_proxies[shard])
            if self.proxies
            else ()
        )
        joined = ("--join", self._binds[0]) if shard else ()
        identity = (
            "--shard",
            f"{shard}/{self._shards}",
            "--bind",
            self._binds[shard],
            *reached,
            *joined,
        )
        command = ("ps-server", *identity, "--metrics-bind", self._monitors[shard], *self._flags)
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
    """Start ps-worker; `command` follows its flags.

    attempt: number of earlier starts of this rank.
    fresh: start the command in a new interpreter instead of forking.
    """
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
