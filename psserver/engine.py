"""One shard at work: its machine (core/shard.py), its numbers (store.py), and the waiting of those who ask.

Threads. Every call has one. `_changed` guards the machine and wakes whoever waits; it is never held during work on
numbers. `_carrying` makes one thread at a time carry out log entries, in order: whoever brings entries does it, so no
hand-over to another thread costs time. Receiving a push needs neither lock.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from pscommon.core.errors import UnreachableError
from pscommon.core.log import Apply, Begin, Cut, Entry, Evict, PushKey, Reject, Report, Staged
from pscommon.core.model import ModelSpec, OptimizerSpec, Scalar
from pscommon.core.tape import Plan
from pscommon.optimizers import groups_from_json, validate
from pscommon.snapshot import Manifest
from pscommon.team import Team
from pscommon.values import Lanes
from psproto.v1 import parameter_server_pb2 as pb
from psserver.budget import Budget
from psserver.core.rules import ANY, Fitness
from psserver.core.shard import LogError, Outcome, Shard
from psserver.fitness import examined
from psserver.memories import Memories
from psserver.metrics import ServerMetrics
from psserver.pulls import Pulls
from psserver.recovery import Kept, LogUnfitError, Recovery, apply
from psserver.shard_log import ShardLog
from psserver.staging import Staging
from psserver.store import Store, TapeReader, numbers_of
from psserver.timing import Timing

LOOK = 0.4
"""Seconds after which a thread that waits for an update looks whether its caller is still there."""


class Engine:
    """A shard's owner. `report` is called, outside all locks, whenever there is something new to tell the coordinator.

    cut(version, store) is called, while nothing is applied, to start a snapshot of exactly this version.
    threads: how many work on one update. log: where all is written before it is told. fitness: what pushes have to be.
    """

    def __init__(
        self,
        shard: int,
        shards: int,
        metrics: ServerMetrics,
        cut: Callable[[int, Store], None],
        in_flight: int,
        lanes: Lanes,
        threads: int = 1,
        log: ShardLog | None = None,
        fitness: Fitness = ANY,
    ) -> None:
        self.shards = shards
        self.metrics = metrics
        self.budget = Budget(in_flight)
        self.memories = Memories(lanes)
        self.pulls = Pulls(self)
        self.report: Callable[[], None] = lambda: None
        self.waiting_for: Callable[[], str] = lambda: ""
        self.check_gathering: Callable[[], None] = lambda: None  # raises when waiting for workers has become pointless
        self.apply_seconds = 0.0
        self.received_bytes = 0
        self.duplicates = 0
        self._cut = cut
        self._team = Team(threads)
        self._log = log
        self._fitness = fitness
        self._logging = threading.Lock()  # a push is written and staged, or a new segment begun: never both at once
        self._machine = Shard(shard)
        self._changed = threading.Condition()
        self._carrying = threading.RLock()
        self._kept: dict[PushKey, Kept] = {}
        self._timings: dict[int, Timing] = {}
        self._model: ModelSpec | None = None
        self._store: Store | None = None
        self._like: OptimizerSpec | None = None
        self._stopping = ""

    # ---- the model --------------------------------------------------------------------------------------------------

    @property
    def shard(self) -> int:
        return self._machine.shard

    @property
    def version(self) -> int:
        return self._machine.version

    @property
    def begun(self) -> bool:
        return self._machine.begun

    @property
    def store(self) -> Store | None:
        return self._store

    def set_model(self, spec: ModelSpec) -> None:
        """The job's model is known: make room for this shard's part. Repeating it is harmless."""
        if self._machine.begun or (self._model is not None and self._model.fingerprint() == spec.fingerprint()):
            return
        store = Store(Plan(spec, self.shards), self.shard, self._team)
        with self._carrying, self._changed:
            self._install(spec, store)
            if self._log is not None:
                self._log.model(spec)

    def _install(self, spec: ModelSpec, store: Store) -> None:
        self._model, self._store, self._like = spec, store, validate(spec.optimizer)
        self._changed.notify_all()
        self.metrics.model(numbers_of(Plan(spec, self.shards), self.shard), store.nbytes)

    def begin_log(self, epoch: int, base: int) -> None:
        """Follow a log from `base` on with nothing: what was here before is void."""
        with self._carrying, self._logging, self._changed:
            self._forget(Shard(self.shard))
            self._machine.follow(epoch, base)
            self._model = self._store = self._like = None
            self._begin_segment()

    def restore(self, epoch: int, manifest: Manifest, reader: TapeReader) -> None:
        """Everything from a snapshot; what was staged before is void."""
        store = Store(Plan(manifest.model, self.shards), self.shard, self._team)
        store.restore(reader)
        with self._carrying, self._logging, self._changed:
            self._forget(Shard(self.shard))
            self._machine.restore(epoch, manifest.version, manifest.index)
            self._install(manifest.model, store)
            self._begin_segment()
        self.metrics.version(manifest.version)

    def _forget(self, machine: Shard) -> None:
        """Another machine, and nothing staged."""
        self._release(list(self._kept))
        self._machine = machine
        if self._log is not None:
            self._log.clear()

    def _begin_segment(self) -> None:
        if self._log is not None:
            machine = self._machine
            staged = [(machine.staged[key], kept.staging) for key, kept in self._kept.items()]
            self._log.begin(machine.version, machine.state(), self._model, staged)

    def recover(self, epoch: int, manifest: Manifest | None, reader: TapeReader | None) -> None:
        """Be what this shard was before it died: the snapshot, and all that it had written down since.

        LogUnfitError: the log is not there, or does not go with the snapshot and the epoch; then nothing has changed.
        """
        if self._log is None:
            raise LogUnfitError("this server keeps no log")
        recovery = Recovery(self.shard, self.shards, self._team, epoch, manifest, reader)
        recovery.read(self._log)
        with self._carrying, self._logging, self._changed:
            self._machine, self._kept = recovery.machine, recovery.kept
            if recovery.model is not None and recovery.store is not None:
                self._install(recovery.model, recovery.store)
            self._begin_segment()
            self._changed.notify_all()
        self.metrics.version(self._machine.version)

    def wait_for_store(self, seconds: float) -> Store:
        """The numbers, once the model is known; a worker may be quicker here than the coordinator's word."""
        with self._changed:
            self._changed.wait_for(lambda: self._store is not None or self._stopping, seconds)
        if self._store is None:
            raise UnreachableError(f"shard {self.shard} does not know the job's model yet", "NOT_READY")
        return self._store

    def groups(self, text: str) -> tuple[Mapping[str, Scalar], ...]:
        """A push's hyper-parameters, checked against the job's optimizer."""
        assert self._like is not None
        return groups_from_json(text, self._like)

    def staging(self, header: pb.PushPullHeader, alive: Callable[[], bool]) -> Staging:
        """Where the push of this header goes. Waits for the model, and for room (InFlightError: there was none)."""
        seconds = header.wait_ms / 1000
        store = self.wait_for_store(seconds)
        if header.memory:
            return store.staging_on(self.memories.tapes(header).gradients, header.absent, header.initial)
        self.memories.check_wire()
        nbytes = store.nbytes if header.initial else store.step_nbytes
        claim = self.budget.take(header.worker, nbytes, seconds, alive)
        try:
            staging = store.staging(header.absent, header.initial)
        except BaseException:
            self.budget.give(claim)
            raise
        staging.claim = claim
        return staging

    def release(self, staging: Staging) -> None:
        """Nobody needs the push's bytes any more."""
        claim, staging.claim = staging.claim, None
        if self._store is not None:
            self._store.release(staging)
        if claim is not None:
            self.budget.give(claim)

    # ---- pushes -----------------------------------------------------------------------------------------------------

    def stage(self, staged: Staged, staging: Staging) -> bool:
        """A push has come, whole. False: it had been decided before, and its bytes were for nothing."""
        staged = examined(staged, staging, self._numbers, self._fitness)
        with self._logging:
            decided, fresh = self._keep(staged, staging)
        self.received_bytes += staging.nbytes
        self.metrics.moved(received=staging.nbytes)
        if fresh:
            self.report()
        else:
            self.release(staging)
        if decided:
            self.duplicates += 1
            self.metrics.pushed("duplicate")
        return not decided

    def _keep(self, staged: Staged, staging: Staging) -> tuple[bool, bool]:
        """Had it been decided before; and is it new? Then it is on the disk, where there is a log, and staged."""
        with self._changed:
            if decided := self._machine.outcome(staged.key) is not None:
                return decided, False
        if self._log is not None and staged.key not in self._kept:
            self._log.push(staged, staging)
        with self._changed:
            fresh = self._machine.offer(staged)
            if fresh:
                self._kept[staged.key] = Kept(staging, time.monotonic())
            return False, fresh

    def outcome(self, key: PushKey) -> Outcome | None:
        with self._changed:
            return self._machine.outcome(key)

    def wait(self, key: PushKey | None, version: int, seconds: float, alive: Callable[[], bool]) -> Outcome | None:
        """Until the push is decided and `version` is here; None: not within `seconds`. NOT_READY: send it (again)."""
        deadline = time.monotonic() + seconds

        def ready() -> bool:
            machine = self._machine
            over = self._stopping or (key is not None and not machine.knows(key))  # all have gone back, say
            rejected = key is not None and (outcome := machine.outcome(key)) is not None and outcome.status != "applied"
            decided = key is None or key.seq == 0 or machine.outcome(key) is not None
            return bool(over or rejected or (decided and machine.begun and machine.version >= version))

        with self._changed:
            while not ready() and alive() and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, LOOK))
            if self._stopping:
                raise UnreachableError(f"shard {self.shard} is stopping: {self._stopping}", "STOPPING")
            if key is not None and not self._machine.knows(key):
                raise UnreachableError(f"shard {self.shard} does not hold push {key.seq} of this worker", "NOT_READY")
            if key is None or not ready():
                return None
            return self._machine.outcome(key) or Outcome("applied", self._machine.version)

    def timing(self, key: PushKey) -> Timing:
        """Where a push's time went, as long as it is its worker's newest that counted."""
        known = self._timings.get(key.worker)
        return known if known is not None and known.seq == key.seq else Timing(key.seq, 0.0, 0.0)

    # ---- pulls ------------------------------------------------------------------------------------------------------

    @contextmanager
    def standing(self) -> Iterator[tuple[int, Store]]:
        """The weights and their version: nothing is applied meanwhile. NOT_READY: there are none yet."""
        with self._carrying:
            if not self._machine.begun:
                raise UnreachableError(f"shard {self.shard} has no weights yet", "NOT_READY")
            yield self._machine.version, self._numbers

    # ---- the log ----------------------------------------------------------------------------------------------------

    def deliver(self, epoch: int, entries: Iterable[Entry]) -> None:
        """Carry out what is next in the log. Entries may come twice, early, or from a log that is void."""
        with self._carrying:
            with self._changed:
                ready = self._machine.accept(epoch, entries)
            for entry in ready:
                if self._log is not None:
                    self._log.entry(entry)
                self._carry_out(entry)
                with self._changed:
                    self._machine.done(entry)
                    self._release([key for key in self._kept if key not in self._machine.staged])
                    self._changed.notify_all()
                if isinstance(entry, Cut):
                    with self._logging:
                        self._begin_segment()
        if ready:
            self.report()

    def snapshot_written(self, version: int) -> None:
        """All shards have written this version: what was noted down before is not needed any more."""
        if self._log is not None:
            self._log.retire(version)

    def make_report(self) -> Report:
        with self._changed:
            report = self._machine.report()
        log = self._log
        return replace(report, log_bytes=log.nbytes, log_broken=log.broken) if log is not None else report

    def stop(self, reason: str) -> None:
        """Answer everyone who waits."""
        with self._changed:
            self._stopping = reason or "the job ends"
            self._changed.notify_all()

    def _carry_out(self, entry: Entry) -> None:
        match entry:
            case Begin():
                self._numbers.begin(self._kept[PushKey(entry.worker, 0)].staging)
            case Apply():
                self._apply(entry, self._numbers)
            case Reject():
                self.metrics.pushed("stale" if entry.reason == "STALE" else "rejected")
            case Evict():
                self._timings.pop(entry.worker, None)
                self.memories.drop(entry.worker)
            case Cut():
                self._cut(entry.version, self._numbers)

    @property
    def _numbers(self) -> Store:
        if self._store is None:
            raise LogError(f"shard {self.shard}: the log speaks of weights before there is a model")
        return self._store

    def _apply(self, entry: Apply, store: Store) -> None:
        began = time.monotonic()
        kept = [self._kept[c.key] for c in entry.contributions]
        apply(store, entry, self._kept)
        seconds = time.monotonic() - began
        self.apply_seconds += seconds
        self.metrics.applied(seconds, len(kept))
        self.metrics.version(entry.version)
        for contribution, each in zip(entry.contributions, kept, strict=True):
            self.metrics.pushed("applied", entry.version - 1 - contribution.base)
            self.metrics.waited(began - each.since)
            self._timings[contribution.key.worker] = Timing(contribution.key.seq, began - each.since, seconds)

    def _release(self, keys: Sequence[PushKey]) -> None:
        for key in keys:
            self.release(self._kept.pop(key).staging)
