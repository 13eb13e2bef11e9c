"""Servers and workers of one job: crashed processes are restarted, injected faults are ended."""

import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Self

from pscommon.core.exit_codes import ExitCode
from tests.chaos.gauges import Gauges
from tests.chaos.job import STOP
from tests.chaos.schedule import Fault
from tests.support.process_job import Servers, kill, resume, state_of, worker
from tests.support.programs import Program, Programs, programs_in
from tests.support.proxy import Proxy
from tests.support.small_disk import SmallDisk, missing

DISK = 256 << 20
SLOW = 400_000
LATENCY = 0.01
CONNECT_SECONDS = 30
AGAIN = (ExitCode.UNREACHABLE, ExitCode.TAKEN)
"""Exit codes after which an operator restarts a process."""


@dataclass(frozen=True)
class SoakJob:
    """One job of the soak test. job: choice of tests.chaos.job; flags: arguments of every
    server.
    """

    job: str
    policy: str
    flags: tuple[str, ...]
    shards: int = 2
    workers: int = 2
    faults: str = "*=0:0%:0%"
    epochs: int = 4
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.job}-{self.policy}"

    @property
    def has_end(self) -> bool:
        """Whether the script ends when the stop file exists."""
        return self.job == "counter"


@dataclass
class EndedFault:
    """A fault that has ended.

    ready: seconds until a killed server was ready, 0 if none was killed.
    """

    kind: str
    began: float
    ended: float
    ready: float = 0.0


@dataclass
class Cluster:
    """Running servers and workers of a job. died: unexpected exits."""

    soak_job: SoakJob
    folder: Path
    ended_faults: list[EndedFault] = field(default_factory=list)
    died: list[str] = field(default_factory=list)
    leaders: list[Program] = field(default_factory=list)
    gauges: Gauges = field(default_factory=Gauges)

    def __enter__(self) -> Self:
        self._resources = ExitStack()
        self.journals = self.folder / "journals"
        self.journals.mkdir(parents=True)
        self.data = self.folder / "data"
        self.disk: SmallDisk | None = None
        try:
            self._begin()
        except BaseException:
            self._resources.close()
            raise
        return self

    def _begin(self) -> None:
        enter = self._resources.enter_context
        if not missing(self.folder):
            self.disk = enter(SmallDisk(self.data, DISK))
        self._programs: Programs = enter(programs_in(self.folder))
        soak_job = self.soak_job
        flags = (
            "--policy",
            soak_job.policy,
            "--min-workers",
            soak_job.workers,
            *soak_job.flags,
        )
        self.servers = enter(
            Servers(
                self._programs,
                soak_job.shards,
                *flags,
                data_dir=self.data,
                proxied=True,
                seed=soak_job.seed,
                fresh=True,
            )
        )
        self.leaders.append(self.servers.programs[0])
        self._started: list[Program] = []
        self._attempts = [0] * soak_job.workers
        self.workers = [self._worker(rank) for rank in range(soak_job.workers)]
        self._restarted: dict[int, EndedFault] = {}
        self._stopped: set[int] = set()
        self.stopped_at = inf  # monotonic time of ps-ctl stop

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.write_logs()
        self._resources.close()

    def write_logs(self) -> None:
        """Write the output of every process beside the journals."""
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        for number, program in enumerate([*self.servers.started, *self._started]):
            name = Path(program.command[0]).name
            (logs / f"{number:03d}-{name}-{program.pid}.log").write_text(
                f"{program}\n{program.output}"
            )

    # ---- faults ----------------------------------------------------------------------------------

    def begin_fault(self, fault: Fault) -> None:
        """Begin a fault."""
        if fault.kind.startswith("kill"):
            kill(self._target(fault))
        elif fault.kind.startswith("stop"):
            self._stopped.add(self._target(fault).pid)
            self._target(fault).send(signal.SIGSTOP)
        elif fault.kind == "full disk":
            if self.disk is not None:
                self.disk.fill()
        else:
            self._begin_network_fault(fault)

    def _begin_network_fault(self, fault: Fault) -> None:
        for proxy in self._proxies(fault.target):
            if fault.kind == "cut":
                proxy.refuse()
                proxy.cut()
            elif fault.kind == "reset":
                proxy.reset()
            elif fault.kind == "half-open":
                proxy.half_open()
            else:
                proxy.rate(SLOW)
                proxy.latency(LATENCY, LATENCY)

    def _proxies(self, shard: int) -> tuple[Proxy, Proxy]:
        return self.servers.proxies[shard], self.servers.stream_proxies[shard]

    def end_fault(self, fault: Fault, began: float) -> None:
        """End a fault; `restart_crashed` finds killed processes."""
        if fault.kind.startswith("stop"):
            for program in [*self.servers.programs, *self.workers]:
                if program.pid in self._stopped and state_of(program.pid) == "T":
                    resume(program)
            self._stopped.clear()
        elif fault.kind == "full disk" and self.disk is not None:
            self.disk.free()
        elif not fault.kind.startswith("kill"):
            for proxy in self._proxies(fault.target):
                proxy.heal()
        self.ended_faults.append(EndedFault(fault.kind, began, time.monotonic()))
        if fault.kind == "kill server":
            self._restarted[fault.target] = self.ended_faults[-1]

    def end_all_faults(self) -> None:
        """End all remaining faults."""
        for program in [*self.servers.programs, *self.workers]:
            if state_of(program.pid) == "T":
                resume(program)
        if self.disk is not None:
            self.disk.free()
        for proxy in (*self.servers.proxies, *self.servers.stream_proxies):
            proxy.heal()

    def _target(self, fault: Fault) -> Program:
        return (self.workers if fault.kind.endswith("worker") else self.servers.programs)[
            fault.target
        ]

    # ---- life ------------------------------------------------------------------------------------

    def restart_crashed(self) -> None:
        """Restart crashed processes and note which servers are ready. Called several times a
        second.
        """
        for shard, program in enumerate(self.servers.programs):
            if self._needs_restart(f"server {shard}", program):
                self._restart_server(shard)
        for rank, program in enumerate(self.workers):
            if self._needs_restart(f"worker {rank}", program):
                self._attempts[rank] += 1
                self.workers[rank] = self._worker(rank)
        for shard, ended_fault in list(self._restarted.items()):
            if not self._stopped and self.servers.is_ready(shard):
                ended_fault.ready = time.monotonic() - ended_fault.ended
                del self._restarted[shard]

    def measure(self) -> None:
        """Sample all running processes."""
        for shard, program in enumerate(self.servers.programs):
            self.gauges.take(f"server {shard}", program.pid)
        for rank, program in enumerate(self.workers):
            self.gauges.take(f"worker {rank}", program.pid)

    @property
    def done(self) -> bool:
        """Whether all workers have finished; workers of a stopped job may lose the servers
        first.
        """
        expected_codes = (0, *AGAIN) if self.stopped_at < inf else (0,)
        return all(program.process.poll() in expected_codes for program in self.workers)

    def request_end(self) -> None:
        """Ask the scripts to end, or stop the job if they cannot be asked."""
        if self.soak_job.has_end:
            (self.journals / STOP).touch()
        else:
            self.stop_job()

    def stop_job(self) -> int:
        """Run ps-ctl stop and return its exit code. Processes that exit then are not restarted."""
        self.stopped_at = min(self.stopped_at, time.monotonic())
        return self._programs.run("ps-ctl", "--ps", self.servers.address, "stop").wait()

    def restart_servers(self) -> None:
        """Restart the servers of a stopped job from disk."""
        for shard, program in enumerate(self.servers.programs):
            program.wait()
            self._restart_server(shard)
        for shard in range(self.soak_job.shards):
            self.servers.wait_ready(shard)

    def _restart_server(self, shard: int) -> None:
        program = self.servers.start(shard)
        if shard == 0:
            self.leaders.append(program)

    def _needs_restart(self, name: str, program: Program) -> bool:
        """Return whether a process crashed; note exits that no fault explains.

        Exit code 0 was requested and needs no restart.
        """
        code = program.process.poll()
        if code in (None, 0) or (self.stopped_at < inf and code in AGAIN):
            return False
        if code not in (-9, *AGAIN):
            self.died.append(
                f"{name} (pid {program.pid}) ended with {code}: {program.output[-600:]}"
            )
        return True

    def _worker(self, rank: int) -> Program:
        soak_job = self.soak_job
        arguments: Sequence[object] = (
            "--journal",
            self.journals,
            "--epochs",
            soak_job.epochs,
            "--faults",
            soak_job.faults,
            "--seed",
            soak_job.seed,
            soak_job.job,
        )
        command = ("-m", "tests.chaos.job", *arguments)
        connect_environment = {"PS_CONNECT_TIMEOUT": f"{CONNECT_SECONDS}s"}
        self._started.append(
            worker(
                self._programs,
                self.servers,
                rank,
                *command,
                attempt=self._attempts[rank],
                fresh=True,
                **connect_environment,
            )
        )
        return self._started[-1]
