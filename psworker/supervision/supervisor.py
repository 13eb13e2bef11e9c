"""Supervisor of ps-run: decides which process to start, restart or end, and when the run ends.

A pure state machine: events in, actions out.

    RUNNING     s0 starts; after it has bound its port, all other servers and all workers start
    COLLECTING  all workers exited with 0, or while they left: the result is read from the servers,
                again after the restart of a server
    STOPPING    the job is stopped: the servers exit with 0, and the run is done
    DRAINING    s0 exited with 0 (job stopped, or its standby took over): workers finish
    ENDING      a process failed or a signal came: SIGTERM to the workers, then to the servers;
                SIGKILL after `grace` or at a second signal
    FINISHED    all processes have ended

Invariants:
- Servers end after workers, so that workers can leave the job and servers can take a snapshot.
- A process is restarted only if that can help (`outcome.is_retryable`); a server only if
  snapshots restore its weights. Every other failure ends the run; the first failed process is
  the culprit.
- A server that was replaced by its standby is not restarted.
- The number of workers follows the job (`Supervisor.wanted`): a worker that is too many leaves by
  SIGTERM, after its step, and its exit is neither a failure nor a reason for a restart.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from enum import Enum, auto
from functools import wraps
from typing import ParamSpec

from pscommon.core.exit_codes import ExitCode
from psworker.supervision.decisions import (
    Action,
    CollectResult,
    FinishRun,
    KillProcess,
    RunOutcome,
    ShowMessage,
    StartProcess,
    StopJob,
    TerminateProcess,
    describe,
    exit_status,
    is_retryable,
    signal_name,
)

P = ParamSpec("P")

BIND_SECONDS = 120.0
COLLECT_SECONDS = 600.0
STOP_SECONDS = 120.0


class RunPhase(Enum):
    """Phase of a run; see the module."""

    RUNNING = auto()
    COLLECTING = auto()
    STOPPING = auto()
    DRAINING = auto()
    ENDING = auto()
    FINISHED = auto()


def _event(handle: Callable[P, Iterator[Action]]) -> Callable[P, list[Action]]:
    """Let a method handle its event as a whole, and return all actions as a list."""

    @wraps(handle)
    def handled(*args: P.args, **kwargs: P.kwargs) -> list[Action]:
        return list(handle(*args, **kwargs))

    return handled


class Supervisor:
    """State machine of a run; see the module.

    Call `start` once, then one method for each event; execute the returned actions in order.
    Processes are named s0, s1, ... and w0, w1, ...; `now` is in seconds of any monotonic clock.
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
        """Make the machine of a run with these numbers of servers and workers.

        Args:
            max_restarts: maximum number of restarts of all processes together.
            durable: whether snapshots restore the weights of a restarted server.
            grace: seconds between SIGTERM and SIGKILL.
            allow_idle: whether a run without a counted step succeeds.
        """
        self.servers = [f"s{index}" for index in range(servers)]
        self.workers = [f"w{index}" for index in range(workers)]
        self.max_restarts = max_restarts
        self.durable = durable
        self.grace = grace
        self.allow_idle = allow_idle
        self.phase = RunPhase.RUNNING
        self.running: set[str] = set()
        self.leaving: set[str] = set()
        self.unbound: dict[str, float] = {}
        self.attempts: dict[str, int] = {}
        self.asked: set[str] = set()
        self.earlier: list[str] = []
        self.outcome = RunOutcome("done")
        self.is_saved = True
        self.pending_results = 0
        self.deadline = float("inf")

    @property
    def restarts(self) -> int:
        """Return the number of restarts so far."""
        return len(self.earlier)

    @property
    def is_settled(self) -> bool:
        """Return whether all servers have bound their ports and training runs."""
        return (
            self.phase is RunPhase.RUNNING
            and not self.unbound
            and self.running.issuperset(self.servers)
        )

    @property
    def is_ending(self) -> bool:
        """Return whether training is over."""
        return self.phase not in (RunPhase.RUNNING, RunPhase.DRAINING)

    @property
    def _needs_servers(self) -> bool:
        return self.phase in (RunPhase.RUNNING, RunPhase.COLLECTING)

    @property
    def may_restart_servers(self) -> bool:
        """Return whether a server that fails now would be restarted."""
        return self.durable and self.restarts < self.max_restarts

    @_event
    def start(self, now: float) -> Iterator[Action]:
        """Start the first server; all other processes need its port."""
        yield from self._start([self.servers[0]], now)

    def _start(self, names: list[str], now: float) -> Iterator[Action]:
        for name in names:
            self.running.add(name)
            if name in self.servers:
                self.unbound[name] = now + BIND_SECONDS
            yield StartProcess(name, self.attempts.setdefault(name, 0))

    @_event
    def bound(self, name: str, now: float) -> Iterator[Action]:
        """A server has bound its port."""
        self.unbound.pop(name, None)
        if self.phase is RunPhase.RUNNING and self.workers[0] not in self.attempts:
            yield from self._start([*self.servers[1:], *self.workers], now)
        elif self.phase is RunPhase.COLLECTING:
            yield from self._collect()

    @_event
    def wanted(self, count: int, leaving: Collection[str], now: float) -> Iterator[Action]:
        """The job wants another number of workers than before.

        Args:
            count: The number.
            leaving: Workers that the servers have asked to leave.
            now: time.
        """
        if self.phase is not RunPhase.RUNNING:
            return
        present = self.running - self.leaving - set(leaving)
        staying = [name for name in self.workers if name in present]
        if surplus := staying[count:]:  # the newest ones
            yield ShowMessage(f"{count} workers wanted: {', '.join(surplus)} leave")
            self.leaving.update(surplus)
            yield from (TerminateProcess(name) for name in surplus)
        elif missing := count - len(staying):
            yield ShowMessage(f"{count} workers wanted: starting {missing} more")
            yield from self._start(self._free_names(missing), now)

    def _free_names(self, count: int) -> list[str]:
        """Return the first names that no process has; a name that had one gets a new attempt."""
        known = self.workers + [f"w{len(self.workers) + index}" for index in range(count)]
        names = [name for name in known if name not in self.running][:count]
        for name in set(names) & self.attempts.keys():
            self.attempts[name] += 1
        self.workers += [name for name in names if name not in self.workers]
        return names

    @_event
    def exited(self, name: str, code: int, successor: str, now: float) -> Iterator[Action]:
        """A process has ended.

        Args:
            name: process that ended.
            code: exit code; negative for a signal.
            successor: address of the standby that replaced this server; empty without one.
            now: time.
        """
        self.running.discard(name)
        self.unbound.pop(name, None)
        if name in self.leaving and code:
            yield ShowMessage(f"{name} {describe(code)} while it left")
            code = 0
        self.leaving.discard(name)
        if code == ExitCode.NOT_SAVED and name in self.servers:  # otherwise a successful end
            self.is_saved, code = False, 0
        if self.phase is RunPhase.ENDING:
            yield from self._next_wave(now)
        elif self.phase is RunPhase.DRAINING and code == 0:
            yield from self._drained(now)
        elif code == 0 and name in self.workers:
            yield from self._worker_done(now)
        elif code == 0:
            yield from self._server_done(name, now)
        elif successor and self._needs_servers:
            yield ShowMessage(f"{name} {describe(code)}; its standby at {successor} has taken over")
        elif self._may_restart(name, code):
            yield from self._restart(name, code, now)
        else:
            yield from self._fail(name, code, now)

    def _drained(self, now: float) -> Iterator[Action]:
        """Wait for the workers without a deadline, then for the servers with `grace`."""
        if not self.running:
            yield from self._next_wave(now)
        elif self.running.isdisjoint(self.workers):
            self.deadline = now + self.grace

    def _worker_done(self, now: float) -> Iterator[Action]:
        if self.running.isdisjoint(self.workers):
            self._enter(RunPhase.COLLECTING, now + COLLECT_SECONDS)
            yield from self._collect()

    def _collect(self) -> Iterator[Action]:
        if not self.unbound:
            self.pending_results += 1
            yield CollectResult()

    def _server_done(self, name: str, now: float) -> Iterator[Action]:
        """Handle a server that exited with 0.

        Causes: the job was stopped, by ps-run or by a user; its standby was promoted; or, for
        any server but the first, the job was resharded to fewer servers.
        """
        if self.phase is RunPhase.STOPPING and not self.running:
            yield from self._next_wave(now)
        elif self.phase is RunPhase.RUNNING and name != self.servers[0]:
            yield ShowMessage(f"{name} is done: the job continues without it, or is stopping")
        elif self.phase is RunPhase.RUNNING:
            yield ShowMessage(f"{name} is done; waiting for the workers to finish")
            self._enter(RunPhase.DRAINING, float("inf"))
            yield from self._drained(now)

    def _may_restart(self, name: str, code: int) -> bool:
        can_restore = name in self.workers or self.durable
        return (
            self._needs_servers
            and can_restore
            and is_retryable(code)
            and self.restarts < self.max_restarts
        )

    def _restart(self, name: str, code: int, now: float) -> Iterator[Action]:
        self.earlier.append(f"{name} {describe(code)} and was restarted")
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

    @_event
    def hung(self, name: str, now: float) -> Iterator[Action]:
        """A worker was dropped because its script hung (--progress-timeout); its process runs.

        Kill it; its exit leads to a restart.
        """
        if self.phase is RunPhase.RUNNING and name in self.running:
            yield ShowMessage(f"{name} is killed: its script hangs (--progress-timeout)")
            yield KillProcess(name)

    @_event
    def signalled(self, number: int, now: float) -> Iterator[Action]:
        """ps-run has received a signal."""
        if self.phase is RunPhase.ENDING:
            yield from (KillProcess(name) for name in sorted(self.running))
            return
        reason = f"interrupted by {signal_name(number)}"
        self.outcome = RunOutcome(
            "interrupted", 128 + number, reason=reason, earlier=tuple(self.earlier)
        )
        yield ShowMessage(
            f"{reason}; ending {len(self.running)} processes (a second signal kills them)"
        )
        yield from self._end(now)

    @_event
    def collected(self, undone: str, idle: str, now: float) -> Iterator[Action]:
        """The result was read from the servers, or could not be read.

        It is not used if a server was restarted meanwhile: then another result follows.

        Args:
            undone: text about training that a rollback has lost; empty if none.
            idle: why no step was counted; empty if one was, or if unknown.
            now: time.
        """
        self.pending_results -= 1
        if not (self.pending_results or self.unbound):
            yield from self._use_result(now, undone, idle)

    def _use_result(self, now: float, undone: str = "", idle: str = "") -> Iterator[Action]:
        if self.phase is not RunPhase.COLLECTING:
            return
        if undone:
            restarted = next(
                (name for name in self.servers if self.attempts[name]), self.servers[0]
            )
            self.outcome = RunOutcome(
                "failed", ExitCode.NO_SNAPSHOT, restarted, None, undone, tuple(self.earlier)
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

    @_event
    def stop_answered(self, problem: str, now: float) -> Iterator[Action]:
        """The servers have answered the request to stop; `problem` is not empty if it failed."""
        if problem and self.phase is RunPhase.STOPPING:
            yield ShowMessage(f"the servers could not be asked to stop ({problem}); ending them")
            yield from self._end(now)

    @_event
    def tick(self, now: float) -> Iterator[Action]:
        """Time has passed."""
        late = [name for name, deadline in self.unbound.items() if deadline <= now]
        if late and self._needs_servers:
            yield from self._fail(
                late[0], None, now, f"{late[0]} did not open its port within {BIND_SECONDS:g} s"
            )
        elif self.deadline <= now:
            yield from self._too_late(now)

    def _too_late(self, now: float) -> Iterator[Action]:
        if self.phase is RunPhase.COLLECTING:
            yield ShowMessage(
                "the servers did not return the result in time; continuing without it"
            )
            yield from self._use_result(now)
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
        """Send SIGTERM to the running workers, or without workers to the servers; or finish."""
        wave = self._wave()
        if not wave:
            self._enter(RunPhase.FINISHED, float("inf"))
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
