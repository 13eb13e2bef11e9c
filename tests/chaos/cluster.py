"""Servers and workers of one act: what dies is started again, what is broken on purpose is
mended in time.
"""

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
from tests.support.process_job import Servers, go_on, kill, state_of, worker
from tests.support.programs import Program, Programs, programs_in
from tests.support.small_disk import SmallDisk, missing

DISK = 256 << 20
SLOW = 400_000
LATENCY = 0.01
CONNECT_SECONDS = 30
AGAIN = (ExitCode.UNREACHABLE, ExitCode.TAKEN)
"""Exit codes after which an operator starts a process again."""


@dataclass(frozen=True)
class Act:
    """job: what tests.chaos.job trains. flags: of every server."""

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
        """Does the script end by itself when it is told so?"""
        return self.job == "counter"


@dataclass
class Mending:
    """A fault that is over: when it began and ended, and how long a killed server took to be
    ready (0: none was).
    """

    kind: str
    began: float
    ended: float
    ready: float = 0.0


@dataclass
class Cluster:
    """Inside the `with`, `servers` run, and `workers` by rank. died: what ended as nothing
    should have.
    """

    act: Act
    folder: Path
    mended: list[Mending] = field(default_factory=list)
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
        act = self.act
        flags = (
            "--policy",
            act.policy,
            "--min-workers",
            act.workers,
            "--lanes",
            "grpc",
            *act.flags,
        )
        self.servers = enter(
            Servers(
                self._programs,
                act.shards,
                *flags,
                data_dir=self.data,
                proxied=True,
                seed=act.seed,
                fresh=True,
            )
        )
        self.leaders.append(self.servers.programs[0])
        self._started: list[Program] = []
        self._attempts = [0] * act.workers
        self.workers = [self._worker(rank) for rank in range(act.workers)]
        self._restarted: dict[int, Mending] = {}
        self._stopped: set[int] = set()
        self.told_to_end = inf  # when the whole job was, in monotonic seconds

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.keep_logs()
        self._resources.close()

    def keep_logs(self) -> None:
        """What every process has said, beside the journals."""
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        for number, program in enumerate([*self.servers.started, *self._started]):
            name = Path(program.command[0]).name
            (logs / f"{number:03d}-{name}-{program.pid}.log").write_text(
                f"{program}\n{program.said}"
            )

    # ---- faults ----------------------------------------------------------------------------------

    def break_(self, fault: Fault) -> None:
        """Begins it."""
        if fault.kind.startswith("kill"):
            kill(self._target(fault))
        elif fault.kind.startswith("stop"):
            self._stopped.add(self._target(fault).pid)
            self._target(fault).send(signal.SIGSTOP)
        elif fault.kind == "full disk":
            if self.disk is not None:
                self.disk.fill()
        else:
            self._line_fault(fault)

    def _line_fault(self, fault: Fault) -> None:
        proxy = self.servers.proxies[fault.target]
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

    def mend(self, fault: Fault, began: float) -> None:
        """Ends it. What was killed is found by `revive`."""
        if fault.kind.startswith("stop"):
            for program in [*self.servers.programs, *self.workers]:
                if program.pid in self._stopped and state_of(program.pid) == "T":
                    go_on(program)
            self._stopped.clear()
        elif fault.kind == "full disk" and self.disk is not None:
            self.disk.free()
        elif not fault.kind.startswith("kill"):
            self.servers.proxies[fault.target].heal()
        self.mended.append(Mending(fault.kind, began, time.monotonic()))
        if fault.kind == "kill server":
            self._restarted[fault.target] = self.mended[-1]

    def mend_all(self) -> None:
        """Whatever is still broken."""
        for program in [*self.servers.programs, *self.workers]:
            if state_of(program.pid) == "T":
                go_on(program)
        if self.disk is not None:
            self.disk.free()
        for proxy in self.servers.proxies:
            proxy.heal()

    def _target(self, fault: Fault) -> Program:
        return (self.workers if fault.kind.endswith("worker") else self.servers.programs)[
            fault.target
        ]

    # ---- life ------------------------------------------------------------------------------------

    def tend(self) -> None:
        """Starts again what has died, sees who is ready, and measures: to be called a few times
        a second.
        """
        for shard, program in enumerate(self.servers.programs):
            if self._ended(f"server {shard}", program):
                self._again(shard)
        for rank, program in enumerate(self.workers):
            if self._ended(f"worker {rank}", program):
                self._attempts[rank] += 1
                self.workers[rank] = self._worker(rank)
        for shard, mending in list(self._restarted.items()):
            if not self._stopped and self.servers.is_ready(shard):
                mending.ready = time.monotonic() - mending.ended
                del self._restarted[shard]

    def measure(self) -> None:
        """Samples of all processes that run."""
        for shard, program in enumerate(self.servers.programs):
            self.gauges.take(f"server {shard}", program.pid)
        for rank, program in enumerate(self.workers):
            self.gauges.take(f"worker {rank}", program.pid)

    @property
    def done(self) -> bool:
        """Have all workers finished? Those of a job that was stopped may have lost the servers
        first.
        """
        fine = (0, *AGAIN) if self.told_to_end < inf else (0,)
        return all(program.process.poll() in fine for program in self.workers)

    def ask_to_end(self) -> None:
        """The scripts, or where they have no such thing, the job."""
        if self.act.has_end:
            (self.journals / STOP).touch()
        else:
            self.stop_job()

    def stop_job(self) -> int:
        """As an operator ends it; the exit code of ps-ctl. What ends then is not started again."""
        self.told_to_end = min(self.told_to_end, time.monotonic())
        return self._programs.run("ps-ctl", "--ps", self.servers.address, "stop").wait()

    def resume(self) -> None:
        """Starts the servers of a job that was stopped once more, from what they have on disk."""
        for shard, program in enumerate(self.servers.programs):
            program.wait()
            self._again(shard)
        for shard in range(self.act.shards):
            self.servers.wait_ready(shard)

    def _again(self, shard: int) -> None:
        program = self.servers.start(shard)
        if shard == 0:
            self.leaders.append(program)

    def _ended(self, name: str, program: Program) -> bool:
        """Has it died? Notes an end that neither a signal of ours nor a lost connection explains.

        What ends with 0 was asked to, and is not started again.
        """
        code = program.process.poll()
        if code in (None, 0) or (self.told_to_end < inf and code in AGAIN):
            return False
        if code not in (-9, *AGAIN):
            self.died.append(f"{name} (pid {program.pid}) ended with {code}: {program.said[-600:]}")
        return True

    def _worker(self, rank: int) -> Program:
        act = self.act
        arguments: Sequence[object] = (
            "--journal",
            self.journals,
            "--epochs",
            act.epochs,
            "--faults",
            act.faults,
            "--seed",
            act.seed,
            act.job,
        )
        command = ("-m", "tests.chaos.job", *arguments)
        patience = {"PS_CONNECT_TIMEOUT": f"{CONNECT_SECONDS}s"}
        self._started.append(
            worker(
                self._programs,
                self.servers,
                rank,
                *command,
                attempt=self._attempts[rank],
                fresh=True,
                **patience,
            )
        )
        return self._started[-1]
