"""One shard at work: its machine (core/shard.py), its numbers (store.py), and the waiting of
those who ask.

Threads. Every call has one. `_changed` guards the machine and wakes whoever waits; it is never
held during work on numbers. `_carrying` makes one thread at a time carry out log entries, in
order: whoever brings entries does it, so no hand-over to another thread costs time. Receiving a
push needs neither lock.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

from pscommon.core.errors import LayoutError, UnreachableError
from pscommon.core.log_entries import (
    Apply,
    Begin,
    Cut,
    Entry,
    Evict,
    Measure,
    PushKey,
    Reject,
    Reshard,
    ShardReport,
    Staged,
)
from pscommon.core.model_spec import ModelSpec, Scalar
from pscommon.core.partition import PartitionPlan
from pscommon.optim.specs import groups_of_push, validate
from pscommon.settings.values import Lanes
from pscommon.snapshot import Manifest
from pscommon.system.thread_team import ThreadTeam
from psserver.core.job.settings import ANY, GradientRules
from psserver.core.shard.state_machine import LogInvariantError, PushOutcome, ShardMachine
from psserver.durability.record_sink import RecordSink, RecordSource
from psserver.durability.shard_log import HeldNumbers, SegmentBase, ShardLog
from psserver.durability.shard_recovery import Open, ShardRecovery
from psserver.durability.shard_state import ShardState, StagedNumbers, apply, measure
from psserver.durability.state_records import StateRecord, shard_state
from psserver.parameters.frozen_shard import FrozenShard, FrozenShardHolder
from psserver.parameters.gradient_check import examined
from psserver.parameters.memory_budget import MemoryBudget
from psserver.parameters.staging import Staging
from psserver.parameters.store import ParameterStore, PartReader, numbers_of
from psserver.process.metrics import ServerMetrics
from psserver.shard.push_timings import PushTimings
from psserver.shard.shared_buffers import AttachedBuffers
from psserver.shard.transfer_stats import TransferStats
from psserver.shard.wakeups import PushWaiters

LOOK = 0.4
"""Seconds after which a thread that waits for an update looks whether its caller is still there."""


class PendingPartition(NamedTuple):
    """A shard's new partition in a reshard, to be filled from the shards that held it before.

    machine: the shard's machine when the partition was prepared.
    model: the job's model.
    store: the new partition's arrays.
    """

    machine: ShardMachine
    model: ModelSpec
    store: ParameterStore


class ShardEngine:
    """A shard's owner. `report` is called, outside all locks, whenever there is something new to
    tell the coordinator.

    cut(entry, store) is called, while nothing is applied, to start a snapshot of exactly this
    version. threads: how many work on one update. log: where all is written before it is told.
    fitness: what pushes have to be.
    """

    def __init__(
        self,
        shard: int,
        shards: int,
        metrics: ServerMetrics,
        cut: Callable[[Cut, ParameterStore], None],
        in_flight: int,
        lanes: Lanes,
        threads: int = 1,
        log: ShardLog | None = None,
        fitness: GradientRules = ANY,
    ) -> None:
        self.shards = shards
        self.metrics = metrics
        self.budget = MemoryBudget(in_flight)
        self.memories = AttachedBuffers(lanes)
        self.report: Callable[[], None] = lambda: None
        self.waiting_for: Callable[[], str] = lambda: ""
        self.check_gathering: Callable[[], None] = lambda: (
            None
        )  # raises when waiting for workers has become pointless
        self.timings = PushTimings(metrics)
        self.traffic = TransferStats(metrics)
        self.duplicates = 0
        self._cut = cut
        self._team = ThreadTeam(threads)
        self._log = log or ShardLog(RecordSink(RecordSource.SHARD), shards)
        self.fitness = fitness
        self._logging = (
            threading.Lock()
        )  # a push is written and staged, or a new segment begun: never both at once
        self._machine = ShardMachine(shard)
        self._changed = PushWaiters()
        self.frozen = FrozenShardHolder(shard, self._changed)
        self._carrying = threading.RLock()
        self._kept: dict[PushKey, StagedNumbers] = {}
        self._model: ModelSpec | None = None
        self._store: ParameterStore | None = None
        self._stopping = ""

    # ---- the model -------------------------------------------------------------------------------

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
    def store(self) -> ParameterStore | None:
        return self._store

    @property
    def moving(self) -> bool:
        """Does this shard lack its new part of the model?"""
        return self._machine.moving

    def check_layout(self, shards: int) -> None:
        """LayoutError for a request that is meant for another number of shards."""
        if shards not in (0, self.shards):
            raise LayoutError(f"shard {self.shard} is one of {self.shards}, not of {shards}")

    def set_model(self, spec: ModelSpec) -> None:
        """The job's model is known: make room for this shard's part. Repeating it is harmless."""
        if self._machine.begun and self._store is not None:
            self._store.clips = (
                spec.optimizer.clip_norm is not None
            )  # who resumes a job may change it
        if self._machine.begun or (
            self._model is not None and self._model.fingerprint() == spec.fingerprint()
        ):
            return
        store = ParameterStore(PartitionPlan(spec, self.shards), self.shard, self._team)
        with self._carrying, self._changed:
            self._install(spec, store)
            self._log.model(spec)

    def _install(self, spec: ModelSpec, store: ParameterStore) -> None:
        self._model, self._store = spec, store
        self._changed.notify_all()
        self.metrics.model(numbers_of(PartitionPlan(spec, self.shards), self.shard), store.nbytes)

    def begin_log(self, epoch: int, base: int, shards: int) -> None:
        """Follow the log of so many shards from `base` on with nothing: what was here before is
        void.
        """
        with self._carrying, self._logging, self._changed:
            self._forget(ShardMachine(self.shard), shards)
            self._machine.follow(epoch, base)
            self._model = self._store = None
            self._begin_segment()

    def restore(self, epoch: int, manifest: Manifest, reader: PartReader, shards: int) -> None:
        """Everything from a snapshot, as one of so many shards; what was staged before is void."""
        store = ParameterStore(PartitionPlan(manifest.model, shards), self.shard, self._team)
        store.restore(reader)
        with self._carrying, self._logging, self._changed:
            self._forget(ShardMachine(self.shard), shards)
            self._machine.restore(epoch, manifest.version, manifest.index)
            self._install(manifest.model, store)
            self._begin_segment()

    def adopt(self, epoch: int, state: Mapping[str, Any], spec: ModelSpec, shards: int) -> None:
        """Join the others in a move to so many shards: know what one of them knows, and hold
        nothing yet.
        """
        with self._carrying, self._logging, self._changed:
            self._forget(ShardMachine(self.shard), shards)
            self._machine.adopt({**state, "epoch": epoch})
            self._model, self._store = spec, None
            self._begin_segment()
        self.report()

    def prepare_partition(self, index: int) -> PendingPartition | None:
        """Return the partition to build after the Reshard at `index`.

        None: the shard has not applied that entry yet, or already has its partition.
        """
        machine, spec = self._machine, self._model
        if not machine.moving or machine.index < index or spec is None:
            return None
        store = ParameterStore(PartitionPlan(spec, self.shards), self.shard, self._team)
        return PendingPartition(machine, spec, store)

    def install_partition(self, pending: PendingPartition) -> None:
        """Start to use the new partition, unless the shard's state has been replaced meanwhile."""
        machine, spec, store = pending
        with self._carrying, self._changed:
            if (
                self._machine is not machine
                or self.shards != store.plan.shards
                or not machine.moving
            ):
                return
            self._log.moved()
            self._install(spec, store)
            machine.moved()
        self.report()

    def state_after(self, index: int) -> dict[str, Any] | None:
        """What the machine knows, once it has come so far in the log."""
        with self._changed:
            return self._machine.state() if self._machine.index >= index else None

    def _forget(self, machine: ShardMachine, shards: int) -> None:
        """Another machine, one of so many, and nothing staged; the workers of before come back
        as new ones.
        """
        self._drop_staged(list(self._kept))
        self.memories.clear()
        self._machine, self.shards, self.frozen.current = machine, shards, None
        self._log.clear()

    def _begin_segment(self) -> None:
        self.metrics.version(self._machine.version)
        frozen = self.frozen.current
        held = HeldNumbers(frozen.index, frozen.shards) if frozen is not None else None
        self._log.begin(
            SegmentBase(self.shards, self._machine.state(), held),
            self._model,
            self._staged(),
        )

    def _staged(self) -> list[tuple[Staged, Staging]]:
        return [(self._machine.staged[key], kept.staging) for key, kept in self._kept.items()]

    def recover(
        self, epoch: int, manifest: Manifest | None, snapshot: Open | None, shards: Collection[int]
    ) -> None:
        """Be what this shard was before it died: the snapshot, and all that it had written down
        since.

        LogUnfitError: the log is not there, or does not go with the snapshot, the epoch and the
        number of shards; then nothing has changed.
        """
        recovery = ShardRecovery(self.shard, shards, self._team, epoch, manifest, snapshot)
        recovery.read(self._log)
        self._become(recovery)

    def inherit(self, replica: ShardState) -> None:
        """Be the shard that this process has followed as its standby."""
        self._log.clear()  # of whoever was here before
        self._become(replica)

    def _become(self, replica: ShardState) -> None:
        with self._carrying, self._logging, self._changed:
            self._machine, self._kept = replica.machine, replica.kept
            self.shards, self.frozen.current, self._store = replica.shards, replica.frozen, None
            self._model = replica.model or self._model
            if replica.model is not None and replica.store is not None:
                self._install(replica.model, replica.store)
            self._begin_segment()
            self._changed.notify_all()

    @contextmanager
    def still(self, seconds: float) -> Iterator[Iterator[StateRecord]]:
        """All of this shard, as records for a standby; nothing is applied or staged meanwhile.
        NOT_READY: no such moment came within `seconds`, or the model is on the move, and others
        may need what was here before."""
        if self.moving or self.frozen.current is not None:
            raise UnreachableError("the model is on the move", "NOT_READY")
        if not self._carrying.acquire(timeout=seconds):
            raise UnreachableError(f"shard {self.shard} is busy", "NOT_READY")
        try:
            with self._logging, self._changed:
                base = SegmentBase(self.shards, self._machine.state())
                yield shard_state(base, self._model, self._store, self._staged())
        finally:
            self._carrying.release()

    def wait_for_store(self, seconds: float) -> ParameterStore:
        """The numbers, once the model is known; a worker may be quicker here than the
        coordinator's word.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._store is not None or self._stopping, seconds)
        if self._store is None:
            what = (
                "waits for its new part of the model"
                if self.moving
                else "does not know the job's model yet"
            )
            raise UnreachableError(f"shard {self.shard} {what}", "NOT_READY")
        return self._store

    def groups(self, text: str) -> tuple[Mapping[str, Scalar], ...]:
        """A push's hyper-parameters, checked against the job's optimizer."""
        assert self._model is not None
        return groups_of_push(text, validate(self._model.optimizer), self._model.tensors)

    # ---- pushes ----------------------------------------------------------------------------------

    def stage(self, staged: Staged, staging: Staging) -> bool:
        """A push has come, whole. False: it had been decided before, and its bytes were for
        nothing.
        """
        store = self._store
        if store is None or not store.owns(staging):
            self.release(staging)
            raise UnreachableError(
                f"shard {self.shard} holds another part of the model now", "NOT_READY"
            )
        staged = examined(staged, staging, store, self.fitness)
        with self._logging:
            decided, fresh = self._keep(staged, staging)
        self.traffic.received(staging.nbytes)
        if fresh:
            self.report()
        else:
            self.release(staging)
        if decided:
            self.duplicates += 1
            self.metrics.pushed("duplicate")
        return not decided

    def release(self, staging: Staging) -> None:
        """Free the memory of a push that is no longer needed."""
        claim, staging.claim = staging.claim, None
        if (store := self._store) is not None:
            store.release(staging)
        if claim is not None:
            self.budget.give(claim)

    def _keep(self, staged: Staged, staging: Staging) -> tuple[bool, bool]:
        """Had it been decided before; and is it new? Then it is on the disk, where there is a
        log, and staged.
        """
        with self._changed:
            if decided := self._machine.outcome(staged.key) is not None:
                return decided, False
            if self._store is None or not self._store.owns(staging):
                return False, False  # the model moved while this was on its way
        if staged.key not in self._kept:
            self._log.push(staged, staging)
        with self._changed:
            if fresh := self._machine.offer(staged):
                self._kept[staged.key] = StagedNumbers(staging, time.monotonic())
            return False, fresh

    def wait(
        self, key: PushKey | None, version: int, seconds: float, alive: Callable[[], bool]
    ) -> PushOutcome | None:
        """Until the push is decided and `version` is here; None: not within `seconds`.
        NOT_READY: send it (again).
        """
        deadline = time.monotonic() + seconds

        def answered() -> bool:
            return self._machine.answers(key, version)

        def over() -> bool:  # all have gone back, say
            return bool(self._stopping) or (key is not None and not self._machine.knows(key))

        with self._changed:
            while (
                not (over() or answered()) and alive() and (left := deadline - time.monotonic()) > 0
            ):
                is_open = key is not None and self._machine.outcome(key) is None
                self._changed.wait(min(left, LOOK), key if is_open else None)
            if key is not None and answered():  # be it the push that ends the job
                return self._machine.outcome(key) or PushOutcome("applied", self._machine.version)
            if self._stopping:
                raise UnreachableError(
                    f"shard {self.shard} is stopping: {self._stopping}", "STOPPING"
                )
            if key is not None and not self._machine.knows(key):
                raise UnreachableError(
                    f"shard {self.shard} does not hold push {key.seq} of this worker", "NOT_READY"
                )
            return None

    # ---- pulls -----------------------------------------------------------------------------------

    @contextmanager
    def standing(self, shards: int) -> Iterator[tuple[int, ParameterStore]]:
        """The weights and their version: nothing is applied meanwhile. NOT_READY: there are none
        yet.

        shards: for how many they are meant, as check_layout.
        """
        with self._carrying:
            self.check_layout(shards)
            if not self._machine.begun or self._store is None:
                raise UnreachableError(f"shard {self.shard} has no weights yet", "NOT_READY")
            yield self._machine.version, self._store

    # ---- the log ---------------------------------------------------------------------------------

    def deliver(self, epoch: int, entries: Iterable[Entry]) -> None:
        """Carry out what is next in the log. Entries may come twice, early, or from a log that
        is void.
        """
        with self._carrying:
            with self._changed:
                ready = self._machine.accept(epoch, entries)
            for entry in ready:
                # no push may be written down between a Reshard and its being carried out
                with self._logging if isinstance(entry, Reshard) else nullcontext():
                    self._follow(entry)
                if isinstance(entry, Apply):
                    self._log.applied(entry.version, self._numbers)
                elif isinstance(entry, Cut):
                    with self._logging:
                        self._begin_segment()
        if ready:
            self.report()

    def _follow(self, entry: Entry) -> None:
        self._log.entry(entry)
        square_norm = self._carry_out(entry)
        with self._changed:
            self._machine.done(entry, square_norm)
            self._drop_staged([key for key in self._kept if key not in self._machine.staged])
            self._changed.notify_of(entry)

    def snapshot_written(self, version: int) -> None:
        """All shards have written this version: what was noted down before is not needed any
        more.
        """
        self._log.retire(version)

    def make_report(self) -> ShardReport:
        with self._changed:
            report = self._machine.report()
        (log := self._log).before_report()
        return (
            replace(report, log_bytes=log.nbytes, log_broken=log.broken)
            if log.nbytes or log.broken
            else report
        )

    def stop(self, reason: str) -> None:
        """Answer everyone who waits."""
        with self._changed:
            self._stopping = reason or "the job ends"
            self._changed.notify_all()

    def _carry_out(self, entry: Entry) -> float:
        match entry:
            case Measure():
                return measure(self._numbers, entry, self._kept)
            case Begin():
                self._numbers.begin(self._kept[PushKey(entry.worker, 0)].staging)
            case Apply():
                staged_at, began = (
                    [self._kept[c.key].since for c in entry.contributions],
                    time.monotonic(),
                )
                apply(self._numbers, entry, self._kept)
                self.timings.applied(entry, staged_at, began, time.monotonic() - began)
                self.frozen.current = None  # nothing counts before all shards hold their new parts
            case Reshard():
                with self._changed:
                    self.frozen.current = FrozenShard(
                        self._machine.epoch, entry.index, self.shards, self._numbers
                    )
                    self.shards, self._store = entry.shards, None
            case Reject():
                self.metrics.pushed("stale" if entry.reason == "STALE" else "rejected")
            case Evict():
                self.timings.drop(entry.worker)
                self.memories.drop(entry.worker)
            case Cut() if not self._machine.moving:
                self._cut(entry, self._numbers)
        return 0.0

    @property
    def _numbers(self) -> ParameterStore:
        if self._store is None:
            raise LogInvariantError(
                f"shard {self.shard}: the log speaks of weights before there is a model"
            )
        return self._store

    def _drop_staged(self, keys: Sequence[PushKey]) -> None:
        for key in keys:
            self.release(self._kept.pop(key).staging)
