"""What ps-run decides: which process to start, restart or end, and when the run is over. Pure:
events in, actions out.

    start ── s0 ── its port is known ──▶ all other servers and all workers              (running)
    all workers exited with 0 ──▶ Collect ──▶ StopJob ──▶ the servers exit with 0 ──▶ done
    a process failed, a signal came ──▶ SIGTERM to the workers; when they are gone, to the servers   (ending)
                                    after `grace`, or at a second signal: SIGKILL
    s0 ended with 0: somebody has stopped the job, or s0's standby took its place ──▶ the workers finish  (draining)

Servers outlive workers in every way out, so that workers can say goodbye and servers can take a
last snapshot. A process is started again only if a second try can help (`ending.is_retryable`),
and a server only if snapshots bring its weights back; everything else ends the run, and the
first process that failed is the culprit. A server in whose place the job has another one, its
standby, is not missed.
"""

from collections.abc import Iterator
from dataclasses import replace
from enum import Enum, auto

from pscommon.core.exit_codes import ExitCode
from psworker.launch.events import (
    Action,
    CollectResult,
    Event,
    FinishRun,
    KillProcess,
    ProcessExited,
    ResultCollected,
    ServerBound,
    ShowMessage,
    SignalReceived,
    StartProcess,
    StopAnswered,
    StopJob,
    TerminateProcess,
    Tick,
    WorkerHung,
)
from psworker.launch.outcome import RunOutcome, describe, exit_status, is_retryable, signal_name

BIND_SECONDS = 120.0
COLLECT_SECONDS = 600.0
STOP_SECONDS = 120.0


class RunPhase(Enum):
    RUNNING = auto()
    COLLECTING = auto()
    STOPPING = auto()
    DRAINING = auto()
    ENDING = auto()
    OVER = auto()


class Supervisor:
    """The machine. Call start() once, then step() with every event; carry out the actions in order.

    Names are s0, s1, ... and w0, w1, ...; `now` is in seconds of any monotonic clock.
    """

    def __init__(
        self,
        servers: int,
        workers: int,
        *,
        max_restarts: int,
        durable: bool,
        grace: float,
        allow_idle: bool = False,
    ) -> None:
        """`durable`: a restarted server finds its weights again, in snapshots.

        allow_idle: a run in which no step was counted is no failure.
        """
        self.servers = [f"s{index}" for index in range(servers)]
        self.workers = [f"w{index}" for index in range(workers)]
        self.max_restarts = max_restarts
        self.durable = durable
        self.grace = grace
        self.allow_idle = allow_idle
        self.phase = RunPhase.RUNNING
        self.running: set[str] = set()
        self.finished: set[str] = set()
        self.unbound: dict[str, float] = {}
        self.attempts: dict[str, int] = {}
        self.asked: set[str] = set()
        self.earlier: list[str] = []
        self.outcome = RunOutcome("done")
        self.is_saved = True
        self.deadline = float("inf")

    @property
    def restarts(self) -> int:
        """How many processes were started again so far."""
        return len(self.earlier)

    @property
    def is_settled(self) -> bool:
        """All servers have their ports, and the workers are at work."""
        return (
            self.phase is RunPhase.RUNNING
            and not self.unbound
            and self.running.issuperset(self.servers)
        )

    @property
    def is_ending(self) -> bool:
        """Nothing is trained any more."""
        return self.phase not in (RunPhase.RUNNING, RunPhase.DRAINING)

    @property
    def may_restart_servers(self) -> bool:
        """Would one that fails be started again?"""
        return self.durable and self.restarts < self.max_restarts

    def start(self, now: float) -> list[Action]:
        """The first server, whose port everybody else needs."""
        return list(self._start([self.servers[0]], now))

    def step(self, event: Event, now: float) -> list[Action]:
        """What to do about an event."""
        match event:
            case ServerBound(name):
                return list(self._bound(name, now))
            case ProcessExited(name, code, successor):
                return list(self._exited(name, code, successor, now))
            case WorkerHung(name):
                return list(self._hung(name))
            case SignalReceived(number):
                return list(self._signalled(number, now))
            case ResultCollected(undone, idle):
                return list(self._collected(now, undone, idle))
            case StopAnswered(problem):
                return list(self._stop_answered(problem, now))
            case Tick():
                return list(self._tick(now))

    def _start(self, names: list[str], now: float) -> Iterator[Action]:
        for name in names:
            self.running.add(name)
            if name in self.servers:
                self.unbound[name] = now + BIND_SECONDS
            yield StartProcess(name, self.attempts.setdefault(name, 0))

    def _bound(self, name: str, now: float) -> Iterator[Action]:
        self.unbound.pop(name, None)
        if self.phase is RunPhase.RUNNING and self.workers[0] not in self.attempts:
            yield from self._start([*self.servers[1:], *self.workers], now)

    def _exited(self, name: str, code: int, successor: str, now: float) -> Iterator[Action]:
        self.running.discard(name)
        self.unbound.pop(name, None)
        if (
            code == ExitCode.NOT_SAVED and name in self.servers
        ):  # the job has ended well, but for that
            self.is_saved, code = False, 0
        if self.phase is RunPhase.ENDING:
            yield from self._next_wave(now)
        elif self.phase is RunPhase.DRAINING and code == 0:
            yield from self._drained(now)
        elif code == 0 and name in self.workers:
            yield from self._worker_done(name, now)
        elif code == 0:
            yield from self._server_done(name, now)
        elif successor and self.phase is RunPhase.RUNNING:
            yield ShowMessage(
                f"{name} {describe(code)}; the job goes on with {successor} in its place"
            )
        elif self._may_restart(name, code):
            yield from self._restart(name, code, now)
        else:
            yield from self._fail(name, code, now)

    def _drained(self, now: float) -> Iterator[Action]:
        """Workers take their time, servers end with the job; those of one that has gone on
        elsewhere are told to.
        """
        if not self.running:
            yield from self._next_wave(now)
        elif self.running.isdisjoint(self.workers):
            self.deadline = now + self.grace

    def _worker_done(self, name: str, now: float) -> Iterator[Action]:
        self.finished.add(name)
        if len(self.finished) == len(self.workers):
            self._enter(RunPhase.COLLECTING, now + COLLECT_SECONDS)
            yield CollectResult()

    def _server_done(self, name: str, now: float) -> Iterator[Action]:
        """A server ends with 0 when the job is over for it: somebody has stopped the job, we
        ourselves or not; another server has taken its place as planned; or, but never that of
        the first one, nobody needs its place any more."""
        if self.phase is RunPhase.STOPPING and not self.running:
            yield from self._next_wave(now)
        elif self.phase is RunPhase.RUNNING and name != self.servers[0]:
            yield ShowMessage(f"{name} is done: the job goes on without it, or is being stopped")
        elif self.phase is RunPhase.RUNNING:
            yield ShowMessage(f"{name} is done; waiting for the workers to finish")
            self._enter(RunPhase.DRAINING, float("inf"))
            yield from self._drained(now)

    def _may_restart(self, name: str, code: int) -> bool:
        useful = name in self.workers or self.durable
        return (
            self.phase is RunPhase.RUNNING
            and useful
            and is_retryable(code)
            and self.restarts < self.max_restarts
        )

    def _restart(self, name: str, code: int, now: float) -> Iterator[Action]:
        self.earlier.append(f"{name} {describe(code)} and was started again")
        self.attempts[name] += 1
        yield ShowMessage(
            f"{name} {describe(code)}; restart {self.restarts} of at most {self.max_restarts}"
        )
        yield from self._start([name], now)

    def _fail(self, name: str, code: int | None, now: float, reason: str = "") -> Iterator[Action]:
        status = ExitCode.UNREACHABLE if code is None else exit_status(code)
        reason = reason or f"{name} {describe(code or 0)}"
        self.outcome = RunOutcome("failed", status, name, code, reason, tuple(self.earlier))
        yield from self._end(now)

    def _hung(self, name: str) -> Iterator[Action]:
        """The job goes on without it, and its process may never end: another one is started, as
        after any kill.
        """
        if self.phase is RunPhase.RUNNING and name in self.running:
            yield ShowMessage(f"{name} is killed: its script makes no call (--progress-timeout)")
            yield KillProcess(name)

    def _signalled(self, number: int, now: float) -> Iterator[Action]:
        if self.phase is RunPhase.ENDING:
            yield from (KillProcess(name) for name in sorted(self.running))
            return
        reason = f"interrupted by {signal_name(number)}"
        self.outcome = RunOutcome(
            "interrupted", 128 + number, reason=reason, earlier=tuple(self.earlier)
        )
        yield ShowMessage(f"{reason}; ending {len(self.running)} processes (once more kills them)")
        yield from self._end(now)

    def _collected(self, now: float, undone: str = "", idle: str = "") -> Iterator[Action]:
        if self.phase is not RunPhase.COLLECTING:
            return
        if undone:
            fell = next((name for name in self.servers if self.attempts[name]), self.servers[0])
            self.outcome = RunOutcome(
                "failed", ExitCode.NO_SNAPSHOT, fell, None, undone, tuple(self.earlier)
            )
        elif idle and not self.allow_idle:
            self.outcome = RunOutcome(
                "failed", ExitCode.IDLE, reason=idle, earlier=tuple(self.earlier)
            )
        self._enter(RunPhase.STOPPING, now + STOP_SECONDS)
        if self.running:
            yield StopJob()
        else:
            yield from self._next_wave(now)

    def _stop_answered(self, problem: str, now: float) -> Iterator[Action]:
        if problem and self.phase is RunPhase.STOPPING:
            yield ShowMessage(f"the servers could not be asked to stop ({problem}); ending them")
            yield from self._end(now)

    def _tick(self, now: float) -> Iterator[Action]:
        late = [name for name, deadline in self.unbound.items() if deadline <= now]
        if late and self.phase is RunPhase.RUNNING:
            yield from self._fail(
                late[0], None, now, f"{late[0]} did not open its port within {BIND_SECONDS:g} s"
            )
        elif self.deadline <= now:
            yield from self._too_late(now)

    def _too_late(self, now: float) -> Iterator[Action]:
        if self.phase is RunPhase.COLLECTING:
            yield ShowMessage(
                "the servers did not hand out the result in time; going on without it"
            )
            yield from self._collected(now)
        elif self.phase is RunPhase.STOPPING:
            name = min(self.running)
            yield from self._fail(name, None, now, f"{name} did not stop within {STOP_SECONDS:g} s")
        elif self.phase is RunPhase.DRAINING:
            yield from self._end(now)
        elif self.phase is RunPhase.ENDING:
            self.deadline = now + self.grace
            yield from (KillProcess(name) for name in self._wave())

    def _end(self, now: float) -> Iterator[Action]:
        self._enter(RunPhase.ENDING, float("inf"))
        yield from self._next_wave(now)

    def _next_wave(self, now: float) -> Iterator[Action]:
        """SIGTERM to the workers that run; once they are gone, to the servers; then it is over."""
        wave = self._wave()
        if not wave:
            self._enter(RunPhase.OVER, float("inf"))
            if self.outcome.status == "done" and not self.is_saved:
                self.outcome = replace(self.outcome, code=ExitCode.NOT_SAVED)
            yield FinishRun(self.outcome)
        elif not self.asked.issuperset(wave):
            self.asked.update(wave)
            self.deadline = now + self.grace
            yield from (TerminateProcess(name) for name in wave)

    def _wave(self) -> list[str]:
        return sorted(self.running.intersection(self.workers)) or sorted(self.running)

    def _enter(self, phase: RunPhase, deadline: float) -> None:
        self.phase = phase
        self.deadline = deadline
