"""One running shard: its state machine, its arrays, and the threads that wait for it.

Threads. Each request runs on its own thread. `_waiters` guards the machine and wakes threads that
wait for it; it is never held while arrays are computed. `_apply_lock` lets one thread at a time
apply log entries, in order. The thread that delivers entries applies them, so that no hand-over
to another thread costs time. Receiving a push needs neither lock.
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
from psserver.parameters.gradient_check import check_gradient
from psserver.parameters.memory_budget import MemoryBudget
from psserver.parameters.staging import Staging
from psserver.parameters.store import ParameterStore, PartReader, count_elements
from psserver.process.metrics import ServerMetrics
from psserver.shard.push_timings import PushTimings
from psserver.shard.shared_buffers import AttachedBuffers
from psserver.shard.transfer_stats import TransferStats
from psserver.shard.wakeups import PushWaiters

CALLER_CHECK_INTERVAL_SECONDS = 0.4
"""Seconds between checks that the caller of a waiting request is still connected."""


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
    """Owns the state of one shard and applies the job's log to it.

    start_snapshot(entry, store) is called, while nothing is applied, to copy exactly this version.

    threads: number of threads that work on one update.
    log: the shard's log; a push or entry is written to it before anything is reported of it.
    gradient_rules: what pushes must satisfy.
    request_report: called, outside all locks, when there is something new to report.
    describe_wait: returns what the job waits for, as text.
    check_first_workers: raises if waiting for the first workers can no longer succeed.
    frozen: this shard's partition before a reshard, while others may need it.
    duplicate_count: pushes received again after they were decided.
    """

    def __init__(
        self,
        shard: int,
        shards: int,
        metrics: ServerMetrics,
        start_snapshot: Callable[[Cut, ParameterStore], None],
        in_flight: int,
        lanes: Lanes,
        threads: int = 1,
        log: ShardLog | None = None,
        gradient_rules: GradientRules = ANY,
    ) -> None:
        self.shards = shards
        self.metrics = metrics
        self.budget = MemoryBudget(in_flight)
        self.shared_buffers = AttachedBuffers(lanes)
        self.request_report: Callable[[], None] = lambda: None
        self.describe_wait: Callable[[], str] = lambda: ""
        self.check_first_workers: Callable[[], None] = lambda: None
        self.push_timings = PushTimings(metrics)
        self.transfer_stats = TransferStats(metrics)
        self.duplicate_count = 0
        self._start_snapshot = start_snapshot
        self._team = ThreadTeam(threads)
        self._log = log or ShardLog(RecordSink(RecordSource.SHARD), shards)
        self.gradient_rules = gradient_rules
        # one thread at a time logs and stages a push, or begins a segment
        self._log_lock = threading.Lock()
        self._machine = ShardMachine(shard)
        self._waiters = PushWaiters()
        self.frozen = FrozenShardHolder(shard, self._waiters)
        self._apply_lock = threading.RLock()
        self._staged: dict[PushKey, StagedNumbers] = {}
        self._model: ModelSpec | None = None
        self._store: ParameterStore | None = None
        self._stop_reason = ""

    # ---- the model -------------------------------------------------------------------------------

    @property
    def shard(self) -> int:
        return self._machine.shard

    @property
    def version(self) -> int:
        return self._machine.version

    @property
    def has_begun(self) -> bool:
        return self._machine.begun

    @property
    def store(self) -> ParameterStore | None:
        return self._store

    @property
    def is_resharding(self) -> bool:
        """Whether this shard lacks its new partition of the model."""
        return self._machine.moving

    def check_layout(self, shards: int) -> None:
        """Raise LayoutError if a request is meant for another number of shards."""
        if shards not in (0, self.shards):
            raise LayoutError(f"shard {self.shard} belongs to {self.shards} shards, not {shards}")

    def set_model(self, spec: ModelSpec) -> None:
        """Create this shard's partition of the job's model. Repeating it is harmless."""
        if self._machine.begun and self._store is not None:
            # a resumed job may have another clip norm
            self._store.clips_gradients = spec.optimizer.clip_norm is not None
        if self._machine.begun or (
            self._model is not None and self._model.fingerprint() == spec.fingerprint()
        ):
            return
        store = ParameterStore(PartitionPlan(spec, self.shards), self.shard, self._team)
        with self._apply_lock, self._waiters:
            self._install_model(spec, store)
            self._log.model(spec)

    def _install_model(self, spec: ModelSpec, store: ParameterStore) -> None:
        self._model, self._store = spec, store
        self._waiters.notify_all()
        self.metrics.model(
            count_elements(PartitionPlan(spec, self.shards), self.shard), store.nbytes
        )

    def begin_log(self, epoch: int, base: int, shards: int) -> None:
        """Discard all state and follow a new log from `base` on, as one of `shards` shards."""
        with self._apply_lock, self._log_lock, self._waiters:
            self._reset(ShardMachine(self.shard), shards)
            self._machine.follow(epoch, base)
            self._model = self._store = None
            self._begin_segment()

    def restore(self, epoch: int, manifest: Manifest, reader: PartReader, shards: int) -> None:
        """Replace all state by a snapshot's, as one of `shards` shards. Discards staged pushes."""
        store = ParameterStore(PartitionPlan(manifest.model, shards), self.shard, self._team)
        store.restore(reader)
        with self._apply_lock, self._log_lock, self._waiters:
            self._reset(ShardMachine(self.shard), shards)
            self._machine.restore(epoch, manifest.version, manifest.index)
            self._install_model(manifest.model, store)
            self._begin_segment()

    def join_reshard(
        self, epoch: int, state: Mapping[str, Any], spec: ModelSpec, shards: int
    ) -> None:
        """Start as a new shard in a reshard, with the machine's state of another shard."""
        with self._apply_lock, self._log_lock, self._waiters:
            self._reset(ShardMachine(self.shard), shards)
            self._machine.adopt({**state, "epoch": epoch})
            self._model, self._store = spec, None
            self._begin_segment()
        self.request_report()

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
        with self._apply_lock, self._waiters:
            if (
                self._machine is not machine
                or self.shards != store.plan.shards
                or not machine.moving
            ):
                return
            self._log.moved()
            self._install_model(spec, store)
            machine.moved()
        self.request_report()

    def state_after(self, index: int) -> dict[str, Any] | None:
        """Return the machine's state if it has applied the entry at `index`, else None."""
        with self._waiters:
            return self._machine.state() if self._machine.index >= index else None

    def _reset(self, machine: ShardMachine, shards: int) -> None:
        """Install another machine without staged pushes; workers attach their buffers again."""
        self._drop_staged(list(self._staged))
        self.shared_buffers.clear()
        self._machine, self.shards, self.frozen.current = machine, shards, None
        self._log.clear()

    def _begin_segment(self) -> None:
        self.metrics.version(self._machine.version)
        frozen = self.frozen.current
        held = HeldNumbers(frozen.index, frozen.shards) if frozen is not None else None
        self._log.begin(
            SegmentBase(self.shards, self._machine.state(), held),
            self._model,
            self._staged_pushes(),
        )

    def _staged_pushes(self) -> list[tuple[Staged, Staging]]:
        return [(self._machine.staged[key], arrays.staging) for key, arrays in self._staged.items()]

    def recover(
        self, epoch: int, manifest: Manifest | None, snapshot: Open | None, shards: Collection[int]
    ) -> None:
        """Restore this shard from a snapshot plus its write-ahead log.

        Raises LogUnfitError, and changes nothing, if the log does not match the snapshot, the epoch
        and the number of shards.
        """
        recovery = ShardRecovery(self.shard, shards, self._team, epoch, manifest, snapshot)
        recovery.read(self._log)
        self._install_state(recovery)

    def install_state(self, state: ShardState) -> None:
        """Install the state that this process replicated as the shard's standby."""
        self._log.clear()
        self._install_state(state)

    def _install_state(self, state: ShardState) -> None:
        with self._apply_lock, self._log_lock, self._waiters:
            self._machine, self._staged = state.machine, state.kept
            self.shards, self.frozen.current, self._store = state.shards, state.frozen, None
            self._model = state.model or self._model
            if state.model is not None and state.store is not None:
                self._install_model(state.model, state.store)
            self._begin_segment()
            self._waiters.notify_all()

    @contextmanager
    def export_state(self, seconds: float) -> Iterator[Iterator[StateRecord]]:
        """Yield the whole state as records for a standby; nothing is applied or staged meanwhile.

        Raises UnreachableError (NOT_READY) if the shard stays busy for `seconds`, or during a
        reshard, when other shards may still need the previous partition.
        """
        if self.is_resharding or self.frozen.current is not None:
            raise UnreachableError("the job is being resharded", "NOT_READY")
        if not self._apply_lock.acquire(timeout=seconds):
            raise UnreachableError(f"shard {self.shard} is busy", "NOT_READY")
        try:
            with self._log_lock, self._waiters:
                base = SegmentBase(self.shards, self._machine.state())
                yield shard_state(base, self._model, self._store, self._staged_pushes())
        finally:
            self._apply_lock.release()

    def wait_for_store(self, seconds: float) -> ParameterStore:
        """Return the arrays, waiting until the model is known.

        A worker may reach this shard before the coordinator has sent the model.
        """
        with self._waiters:
            self._waiters.wait_for(lambda: self._store is not None or self._stop_reason, seconds)
        if self._store is None:
            what = (
                "is waiting for its new partition of the model"
                if self.is_resharding
                else "does not know the job's model yet"
            )
            raise UnreachableError(f"shard {self.shard} {what}", "NOT_READY")
        return self._store

    def parse_groups(self, text: str) -> tuple[Mapping[str, Scalar], ...]:
        """Parse a push's hyper-parameters and check them against the job's optimizer."""
        assert self._model is not None
        return groups_of_push(text, validate(self._model.optimizer), self._model.tensors)

    # ---- pushes ----------------------------------------------------------------------------------

    def stage_push(self, staged: Staged, staging: Staging) -> bool:
        """Stage a complete push. Return False if it was decided before."""
        store = self._store
        if store is None or not store.owns(staging):
            self.release(staging)
            raise UnreachableError(
                f"shard {self.shard} has another partition of the model now", "NOT_READY"
            )
        staged = check_gradient(staged, staging, store, self.gradient_rules)
        with self._log_lock:
            decided, fresh = self._stage(staged, staging)
        self.transfer_stats.count_received(staging.nbytes)
        if fresh:
            self.request_report()
        else:
            self.release(staging)
        if decided:
            self.duplicate_count += 1
            self.metrics.pushed("duplicate")
        return not decided

    def release(self, staging: Staging) -> None:
        """Free the memory of a push that is no longer needed."""
        claim, staging.claim = staging.claim, None
        if (store := self._store) is not None:
            store.release(staging)
        if claim is not None:
            self.budget.release(claim)

    def _stage(self, staged: Staged, staging: Staging) -> tuple[bool, bool]:
        """Log a push, where there is a log, and stage it.

        Returns whether the push was decided before, and whether it is newly staged.
        """
        with self._waiters:
            if decided := self._machine.outcome(staged.key) is not None:
                return decided, False
            if self._store is None or not self._store.owns(staging):
                return False, False  # a reshard started after the push was received
        if staged.key not in self._staged:
            self._log.push(staged, staging)
        with self._waiters:
            if fresh := self._machine.offer(staged):
                self._staged[staged.key] = StagedNumbers(staging, time.monotonic())
            return False, fresh

    def wait_for_outcome(
        self, key: PushKey | None, version: int, seconds: float, alive: Callable[[], bool]
    ) -> PushOutcome | None:
        """Return a push's outcome once it is decided and `version` is reached; None on timeout.

        key: the push; None to wait for the version alone.

        Raises UnreachableError: NOT_READY if the worker must send the push again, STOPPING if the
        shard stops.
        """
        deadline = time.monotonic() + seconds

        def is_decided() -> bool:
            return self._machine.answers(key, version)

        def is_hopeless() -> bool:  # stopping, or a rollback discarded the push
            return bool(self._stop_reason) or (key is not None and not self._machine.knows(key))

        with self._waiters:
            while (
                not (is_hopeless() or is_decided())
                and alive()
                and (left := deadline - time.monotonic()) > 0
            ):
                is_open = key is not None and self._machine.outcome(key) is None
                self._waiters.wait(
                    min(left, CALLER_CHECK_INTERVAL_SECONDS), key if is_open else None
                )
            if key is not None and is_decided():  # even while stopping: the push may end the job
                return self._machine.outcome(key) or PushOutcome("applied", self._machine.version)
            if self._stop_reason:
                raise UnreachableError(
                    f"shard {self.shard} is stopping: {self._stop_reason}", "STOPPING"
                )
            if key is not None and not self._machine.knows(key):
                raise UnreachableError(
                    f"shard {self.shard} does not hold push {key.seq} of this worker", "NOT_READY"
                )
            return None

    # ---- pulls -----------------------------------------------------------------------------------

    @contextmanager
    def lock_weights(self, shards: int) -> Iterator[tuple[int, ParameterStore]]:
        """Yield the version and the arrays; nothing is applied meanwhile.

        shards: as in `check_layout`. Raises UnreachableError (NOT_READY) without weights.
        """
        with self._apply_lock:
            self.check_layout(shards)
            if not self._machine.begun or self._store is None:
                raise UnreachableError(f"shard {self.shard} has no weights yet", "NOT_READY")
            yield self._machine.version, self._store

    # ---- the log ---------------------------------------------------------------------------------

    def deliver(self, epoch: int, entries: Iterable[Entry]) -> None:
        """Apply the next entries of the log.

        Entries may come twice, too early, or from a log that is no longer followed.
        """
        with self._apply_lock:
            with self._waiters:
                ready = self._machine.accept(epoch, entries)
            for entry in ready:
                # no push may be logged between a Reshard record and its effect
                with self._log_lock if isinstance(entry, Reshard) else nullcontext():
                    self._process_entry(entry)
                if isinstance(entry, Apply):
                    self._log.applied(entry.version, self._loaded_store)
                elif isinstance(entry, Cut):
                    with self._log_lock:
                        self._begin_segment()
        if ready:
            self.request_report()

    def _process_entry(self, entry: Entry) -> None:
        self._log.entry(entry)
        square_norm = self._apply_entry(entry)
        with self._waiters:
            self._machine.done(entry, square_norm)
            self._drop_staged([key for key in self._staged if key not in self._machine.staged])
            self._waiters.notify_entry(entry)

    def retire_log(self, version: int) -> None:
        """Remove log segments from before this version: a complete snapshot of it exists."""
        self._log.retire(version)

    def make_report(self) -> ShardReport:
        """Return what the coordinator needs to know of this shard."""
        with self._waiters:
            report = self._machine.report()
        (log := self._log).before_report()
        return (
            replace(report, log_bytes=log.nbytes, log_broken=log.broken)
            if log.nbytes or log.broken
            else report
        )

    def stop(self, reason: str) -> None:
        """End all waiting requests; each fails with this reason."""
        with self._waiters:
            self._stop_reason = reason or "the job ends"
            self._waiters.notify_all()

    def _apply_entry(self, entry: Entry) -> float:
        match entry:
            case Measure():
                return measure(self._loaded_store, entry, self._staged)
            case Begin():
                self._loaded_store.set_initial_weights(
                    self._staged[PushKey(entry.worker, 0)].staging
                )
            case Apply():
                staged_at = [self._staged[c.key].since for c in entry.contributions]
                began = time.monotonic()
                apply(self._loaded_store, entry, self._staged)
                self.push_timings.record_update(entry, staged_at, began, time.monotonic() - began)
                # updates start only when all shards have their partition
                self.frozen.current = None
            case Reshard():
                with self._waiters:
                    self.frozen.current = FrozenShard(
                        self._machine.epoch, entry.index, self.shards, self._loaded_store
                    )
                    self.shards, self._store = entry.shards, None
            case Reject():
                self.metrics.pushed("stale" if entry.reason == "STALE" else "rejected")
            case Evict():
                self.push_timings.drop(entry.worker)
                self.shared_buffers.drop(entry.worker)
            case Cut() if not self._machine.moving:
                self._start_snapshot(entry, self._loaded_store)
        return 0.0

    @property
    def _loaded_store(self) -> ParameterStore:
        if self._store is None:
            raise LogInvariantError(
                f"shard {self.shard}: a log entry needs weights before the model is known"
            )
        return self._store

    def _drop_staged(self, keys: Sequence[PushKey]) -> None:
        for key in keys:
            self.release(self._staged.pop(key).staging)
