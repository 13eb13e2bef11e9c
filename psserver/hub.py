"""The coordinator at work, on shard 0: its machine, its clock, its snapshots' manifests, and everybody's waiting.

Threads. Each request has one; `_changed` guards the machine, and whoever changes it wakes those who wait, who then ask
the machine again. New log entries go to this process's own shard in the thread that made them, outside the lock, and to
the other shards through `news`, which their links wait for.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from pscommon.core.errors import (
    MismatchError,
    PSError,
    SnapshotError,
    TooFewWorkersError,
    UnreachableError,
    WaitTimeoutError,
)
from pscommon.core.log import BatchKey, Report
from pscommon.core.loop import LoopSpec
from pscommon.core.model import ModelSpec
from pscommon.core.tape import Plan
from pscommon.snapshot import Manifest
from psserver.archive import Archive
from psserver.config import ServerConfig
from psserver.core.coordinator import Batches, Coordinator
from psserver.core.cuts import Cuts, Every, PartReport
from psserver.core.policy import policy
from psserver.core.room import check_room, push_nbytes
from psserver.core.roster import Member, State
from psserver.core.waiting import waiting_for
from psserver.engine import Engine
from psserver.fleet import Fleet, News, Server, Told
from psserver.identity import Identity
from psserver.metrics import ServerMetrics
from psserver.status import describe, statistics

TICK = 0.2

LAST_SNAPSHOT = 30.0
"""Seconds that the end of a job waits for its last snapshot."""

T = TypeVar("T")
log = logging.getLogger("psserver")


class Hub:
    """Owner of the Coordinator. All methods may be called from any thread."""

    def __init__(
        self, config: ServerConfig, identity: Identity, engine: Engine, archive: Archive, metrics: ServerMetrics
    ) -> None:
        self.config = config
        self.engine = engine
        self.archive = archive
        self.metrics = metrics
        self.fleet = Fleet(config.shards, identity.address)
        self._identity = identity
        self.stop_reason: str | None = None
        self.failure: PSError | None = None  # why the job had to end, if it did not end well
        self.stopped = threading.Event()  # the last snapshot is written, or there is none to write
        self._began = time.monotonic()
        self._gathering_since: float | None = None  # somebody is here, --min-workers are not
        self._changed = threading.Condition()
        self._revision = 0  # of what those who wait look at
        self._coordinator = self._new_coordinator()
        self._ticker = threading.Thread(target=self._tick_forever, name="ticker", daemon=True)

    def _new_coordinator(self) -> Coordinator:
        config, every = self.config, self.config.snapshot_every
        row = policy(config.policy, config.staleness, config.max_staleness)
        cuts = Every(every.seconds, every.steps) if every else Every()
        return Coordinator(config.shards, row, config.min_workers, config.lease, cuts, self.archive.generation)

    def start(self, ticking: bool = True) -> None:
        """Resume if there is something to resume from, then let time pass (in a simulation it does not)."""
        self.engine.report = lambda: self.report(self.engine.make_report())
        self.engine.waiting_for = lambda: self.waiting_for
        self.engine.check_gathering = self.check_gathering
        manifest = self.archive.to_resume(self.config.resume)
        self.engine.follow(self._coordinator.epoch, 0)
        if manifest is not None:
            self._identity.learn(self.config.job or manifest.job, self.fleet.addresses)
            self._resume(manifest)
        if ticking:
            self._ticker.start()

    @property
    def job(self) -> str:
        """The job's name."""
        return self._identity.job

    # ---- waiting ----------------------------------------------------------------------------------------------------

    @property
    def waiting_for(self) -> str:
        """Whom the job waits for just now, in words."""
        with self._changed:
            return self.fleet.missing or waiting_for(self._coordinator, time.monotonic())

    def _step(self, action: Callable[[Coordinator, float], T], quiet: bool = False) -> T:
        """One event for the machine; then carry out what came of it. quiet: no news to those who wait."""
        with self._changed:
            before = self._coordinator.last_index
            result = action(self._coordinator, time.monotonic())
            entries, epoch = self._coordinator.entries_after(before), self._coordinator.epoch
            if entries or not quiet:
                self._wake()
        if entries:
            self.engine.deliver(epoch, entries)
        return result

    def _moved_on(self, revision: int) -> bool:
        return self._revision != revision

    def _wake(self) -> None:
        """Let those who wait look again."""
        self._revision += 1
        self._changed.notify_all()

    def _until(
        self, action: Callable[[Coordinator, float], T | None], seconds: float, stopping: bool = False
    ) -> T | None:
        """The machine's answer as soon as it has one; None: not within `seconds`, or (not `stopping`) the job ends."""
        deadline, asked = time.monotonic() + seconds, False
        while True:
            # asking may change who takes part, but only the first time: those who wait must not wake each other
            with self._changed:
                seen = self._revision
            answer = self._step(action, quiet=asked) if not self.fleet.missing else None
            left, asked = deadline - time.monotonic(), True
            if answer is not None or left <= 0 or (self.stop_reason is not None and not stopping):
                return answer
            with self._changed:
                self._changed.wait_for(partial(self._moved_on, seen), min(left, TICK))

    # ---- workers ----------------------------------------------------------------------------------------------------

    def join(self, job: str, rank: int | None, host: str, pid: int, device: str) -> Member:
        self.check_job(job)
        if self.stop_reason is not None:
            raise UnreachableError(f"the job is stopping: {self.stop_reason}", "STOPPING")
        member = self._step(lambda c, now: c.join(now, rank, host, pid, device))
        log.info("worker joined", extra={"worker": member.worker, "rank": member.rank, "host": host, "pid": pid})
        return member

    def check_job(self, job: str) -> None:
        if job and job != self.job:
            raise MismatchError(f"these servers run job {self.job}, not {job}", "JOB_MISMATCH")

    def register(self, worker: int, spec: ModelSpec, seconds: float) -> str:
        """ready, upload or pending; waits while there is nothing to do but wait."""
        nbytes = push_nbytes(spec, self.config.shards)

        def ask(coordinator: Coordinator, now: float) -> str | None:
            check_room(coordinator, worker, nbytes, self.config.in_flight)
            state = coordinator.register(worker, spec, now)
            return None if state == "pending" else state

        answer = self._until(ask, seconds)
        if self._coordinator.model is not None:
            self.engine.set_model(self._coordinator.model)
        return answer or "pending"

    def beat(self, worker: int, step_seconds: float, samples_per_second: float, phase: str) -> bool:
        """A sign of life; True: the job is ending."""
        member = self._step(lambda c, now: c.member(worker, now), quiet=True)
        member.step_seconds, member.samples_per_second, member.phase = step_seconds, samples_per_second, phase
        return self.stop_reason is not None

    def leave(self, worker: int, reason: str) -> None:
        self._step(lambda c, now: c.leave(worker, reason, now))
        self.metrics.gone(worker)
        log.info("worker left", extra={"worker": worker, "reason": reason or "done"})

    def next_batches(
        self, worker: int, spec: LoopSpec, received: int, count: int, idle: bool, seconds: float
    ) -> Batches | None:
        """Data, or its end; None: not within `seconds`. A stopping job has no more data."""
        answer = self._until(lambda c, now: c.next_batches(worker, spec, received, count, idle, now), seconds)
        if answer is None and self.stop_reason is None:
            self.check_gathering()
        return Batches(end=True) if answer is None and self.stop_reason is not None else answer

    def check_gathering(self) -> None:
        """TooFewWorkersError for those who came, if the others did not within join_timeout of the first one."""
        if self._gathering_since is not None:
            waited = time.monotonic() - self._gathering_since
            if waited > self.config.join_timeout:
                raise TooFewWorkersError(f"after {waited:.0f} s: {self.waiting_for}")

    def return_batches(self, worker: int, batches: Iterable[BatchKey]) -> None:
        keys = list(batches)
        self._step(lambda c, now: c.return_batches(worker, keys, now))

    def report_metrics(self, worker: int, metrics: dict[str, float]) -> None:
        self._step(lambda c, now: c.report_metrics(worker, metrics, now))

    @property
    def begun(self) -> bool:
        """Are there weights, on every shard?"""
        return self._coordinator.begun and not self.fleet.missing

    @property
    def version(self) -> int:
        return self._coordinator.version

    @property
    def plan(self) -> Plan:
        if self._coordinator.model is None:
            raise UnreachableError("no worker has registered a model yet", "NOT_READY")
        return Plan(self._coordinator.model, self.config.shards)

    # ---- shards -----------------------------------------------------------------------------------------------------

    def shard_up(self, shard: int, shards: int, address: str, instance: str) -> tuple[Server, int]:
        """A shard's process says that it is there, over this line. MismatchError if its place is taken or unknown."""
        with self._changed:
            reborn = self.fleet.connect(shard, shards, address, instance)
            server, line = self.fleet[shard], self.fleet[shard].line
            self._identity.learn(self.job, self.fleet.addresses)
            self._wake()
        log.info("shard connected", extra={"shard": shard, "address": address})
        if reborn and self._coordinator.begun:
            self._roll_back(f"shard {shard} was restarted")
        elif reborn:
            self._step(lambda c, now: c.shard_lost(shard))
        return server, line

    def shard_down(self, shard: int, line: int) -> None:
        with self._changed:
            self.fleet.disconnect(shard, line)
            self._wake()

    def report(self, report: Report) -> None:
        """A shard's word on what it holds."""
        self._step(lambda c, now: c.report(report, now))

    def news(self, told: Told) -> News:
        """What a shard that has been told so much does not know yet."""
        with self._changed:
            coordinator = self._coordinator
            epoch, index = coordinator.epoch, told.reached if told.epoch == coordinator.epoch else coordinator.base
            restore = self.fleet.restore if told.epoch != epoch else None
            entries = coordinator.entries_after(index)
            news = Told(epoch, max(index, coordinator.last_index))
            return News(news, coordinator.base, coordinator.model, restore, entries, self.archive.kept)

    def wait_for_news(self, told: Told, seconds: float) -> None:
        """Until there is a log entry that the shard has not been told, or something else may be new."""
        with self._changed:
            if self._coordinator.epoch == told.epoch and self._coordinator.last_index <= told.reached:
                self._changed.wait(seconds)

    def snapshot_part(self, shard: int, part: PartReport) -> None:
        self._step(lambda c, now: c.cuts.part(shard, part))

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def _resume(self, manifest: Manifest) -> None:
        """Take a snapshot as the state of the job; the shards are told to load it."""
        self.archive.next_generation()
        with self._changed:
            self._coordinator = self._new_coordinator()
            self._coordinator.restore(dict(manifest.coordinator), manifest.model, time.monotonic())
            self.fleet.begin_restore(manifest)
            self._wake()
        log.info("resuming", extra={"version": manifest.version})
        self.restored(0, manifest.version, self.archive.load_into(self.engine, self._coordinator.epoch, manifest))

    def restored(self, shard: int, version: int, problem: str) -> None:
        """A shard has loaded the snapshot, or could not: then everybody goes back to the one before."""
        with self._changed:
            wanted = self.fleet.restore
            if wanted is None or version != wanted.version:
                return
            if not problem:
                self.fleet[shard].restored = version
                self._wake()
                return
        log.error("a snapshot cannot be loaded; trying the one before", extra={"version": version, "problem": problem})
        older = self.archive.before(version)
        if older is None:
            self._fail(SnapshotError(f"no snapshot can be loaded: shard {shard}: {problem}"))
        else:
            self._resume(older)

    def _roll_back(self, why: str) -> None:
        """A shard lost its numbers: all shards return to the newest snapshot, or the job ends."""
        manifest = self.archive.newest()
        if manifest is None:
            self._fail(SnapshotError(f"{why} and there is no snapshot to go back to", "NO_SNAPSHOT"))
            return
        lost = self._coordinator.version - manifest.version
        log.error("rolling back to a snapshot", extra={"why": why, "version": manifest.version, "updates_lost": lost})
        self._resume(manifest)

    def _fail(self, error: PSError) -> None:
        self.failure = error
        self.stop(str(error))

    def save(self, seconds: float) -> int:
        """A snapshot of the version that stands, written everywhere; its version."""
        if not self.archive.enabled:
            raise SnapshotError("these servers have no --data-dir", "NO_SNAPSHOT")
        wanted = self._until(lambda c, now: c.version if c.begun else None, seconds)
        if wanted is None:
            raise UnreachableError(f"nothing to save yet: the job waits for {self.waiting_for}", "NOT_READY")
        version = self._saved(wanted, seconds)
        if version is None:
            raise WaitTimeoutError(f"no snapshot after {seconds:.0f} s: {self.archive.problem or 'still writing'}")
        return version

    def _saved(self, wanted: int, seconds: float, stopping: bool = False) -> int | None:
        """Cut until a snapshot of at least this version is written; its version, or None: not in time."""

        def written(coordinator: Coordinator, now: float) -> int | None:
            newest = self.archive.newest_version
            if newest is not None and newest >= wanted:
                return newest
            coordinator.cut(now)
            return None

        return self._until(written, seconds, stopping)

    def _finish_cut(self, cuts: Cuts) -> None:
        """Where all parts are there, the manifest makes them a snapshot; only then may the next one be cut."""
        if cuts.finished is not None:
            self.archive.commit(cuts.finished, self.job, self.plan.spec)
            with self._changed:
                cuts.finished = None
                self._wake()

    # ---- time -------------------------------------------------------------------------------------------------------

    def _tick_forever(self) -> None:
        try:
            while not self.stopped.wait(TICK):
                self._tick()
        except Exception as bug:
            log.exception("the coordinator cannot go on")
            self.failure = PSError(f"a bug: {bug!r}")
            self.stopped.set()

    def _tick(self) -> None:
        gathering = self._coordinator.begun and not self._coordinator.started and self._coordinator.roster.registered()
        self._gathering_since = (self._gathering_since or time.monotonic()) if gathering else None
        for member in self._step(lambda c, now: c.tick(now)):
            log.warning("worker lost", extra={"worker": member.worker, "reason": member.reason})
            self.metrics.gone(member.worker)
        with self._changed:
            cuts, roster = self._coordinator.cuts, list(self._coordinator.roster)
        self._finish_cut(cuts)
        self.fleet[0].stats = statistics(self.engine)
        self.metrics.workers({state: sum(m.state == state for m in roster) for state in State})
        for member in roster:
            if member.registered:
                self.metrics.worker(member.worker, member.clock)
        if self.config.exit_when_done and self._coordinator.roster.all_done(self.config.min_workers):
            self.stop("all workers are done")

    def stop(self, reason: str) -> None:
        """End the job: a last snapshot where there can be one, then every server goes. Returns at once."""
        with self._changed:
            if self.stop_reason is not None:
                return
            self.stop_reason = reason or "asked to"
            self._wake()
        log.info("stopping", extra={"reason": self.stop_reason})
        threading.Thread(target=self._last_snapshot, name="last-snapshot", daemon=True).start()

    def _last_snapshot(self) -> None:
        try:
            if self.archive.enabled and self._coordinator.begun and not self.fleet.missing:
                self._saved(self._coordinator.version, LAST_SNAPSHOT, stopping=True)
        finally:
            self.stopped.set()
            with self._changed:
                self._wake()

    def close(self) -> None:
        """No more time passes. The other shards get a moment to hear that the job is over."""
        self.stopped.set()
        deadline = time.monotonic() + 2.0
        with self._changed:
            self._wake()
            while any(s.connected for s in list(self.fleet)[1:]) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
        if self._ticker.is_alive():
            self._ticker.join()

    def status(self) -> dict[str, Any]:
        """What GetStatus answers (see psserver/status.py)."""
        snapshots = list(self.archive.listing())
        with self._changed:
            return describe(self, self._coordinator, snapshots, time.monotonic(), self._began)
