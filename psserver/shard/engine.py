"""One running shard: its state machine, its arrays, and the threads that wait for it.

Threads. Each request runs on its own thread. `_waiters` guards the machine and wakes threads that
wait for it; it is never held while arrays are computed. `_apply_lock` lets one thread at a time
apply log entries, in order. The thread that delivers entries applies them, so that no hand-over
to another thread costs time. Receiving a push needs neither lock.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

from pscommon.core.errors import LayoutError, UnreachableError
from pscommon.core.log_entries import (
    Apply,
    Cut,
    Entry,
    Evict,
    PushKey,
    Reject,
    Reshard,
    ShardReport,
    Staged,
)
from pscommon.core.model_spec import ModelSpec, Scalar
from pscommon.optim.specs import groups_of_push, validate
from pscommon.settings.values import Lanes
from psserver.core.job.settings import ANY, GradientRules
from psserver.core.shard.state_machine import PushOutcome, ShardMachine
from psserver.durability.record_sink import RecordSink, RecordSource
from psserver.durability.shard_log import ShardLog
from psserver.durability.shard_state import ShardState
from psserver.durability.state_records import StateRecord, shard_records
from psserver.parameters.frozen_shard import FrozenShard
from psserver.parameters.gradient_check import check_gradient
from psserver.parameters.memory_budget import MemoryBudget
from psserver.parameters.staging import Staging
from psserver.parameters.store import ParameterStore, count_elements
from psserver.process.metrics import ServerMetrics
from psserver.shard.push_timings import PushTimings
from psserver.shard.shared_buffers import AttachedBuffers
from psserver.shard.transfer_stats import TransferStats
from psserver.shard.wakeups import PushWaiters

CALLER_CHECK_INTERVAL_SECONDS = 0.4
"""Seconds between checks that the caller of a waiting request is still connected."""


class PendingPartition(NamedTuple):
    """A shard's new partition in a reshard, to be filled from the shards that held it before.

    state: the shard's state when the partition was prepared.
    store: the new partition's arrays.
    """

    state: ShardState
    store: ParameterStore


class ShardEngine:
    """Runs one shard: the locks and waiting threads around its state.

    start_snapshot(entry, store) is called, while nothing is applied, to copy exactly this version.

    state: the state to begin with.
    log: the shard's log; a push or entry is written to it before anything is reported of it.
    gradient_rules: what pushes must satisfy.
    request_report: called, outside all locks, when there is something new to report.
    describe_wait: returns what the job waits for, as text.
    check_first_workers: raises if waiting for the first workers can no longer succeed.
    duplicate_count: pushes received again after they were decided.
    """

    def __init__(
        self,
        state: ShardState,
        metrics: ServerMetrics,
        start_snapshot: Callable[[Cut, ParameterStore], None],
        in_flight: int,
        lanes: Lanes,
        log: ShardLog | None = None,
        gradient_rules: GradientRules = ANY,
    ) -> None:
        self.metrics = metrics
        self.budget = MemoryBudget(in_flight)
        self.shared_buffers = AttachedBuffers(lanes)
        self.request_report: Callable[[], None] = lambda: None
        self.describe_wait: Callable[[], str] = lambda: ""
        self.check_first_workers: Callable[[], None] = lambda: None
        self.push_timings = PushTimings(metrics)
        self.transfer_stats = TransferStats(metrics)
        self.duplicate_count = 0
        self.gradient_rules = gradient_rules
        self._state = state
        self._start_snapshot = start_snapshot
        self._log = log or ShardLog(RecordSink(RecordSource.SHARD), state.shard)
        # one thread at a time logs and stages a push, or begins a segment
        self._log_lock = threading.Lock()
        self._apply_lock = threading.RLock()
        self._waiters = PushWaiters()
        self._stop_reason = ""

    # ---- the model -------------------------------------------------------------------------------

    @property
    def shard(self) -> int:
        return self._state.shard

    @property
    def shards(self) -> int:
        """Number of shards; in a reshard, the number after it."""
        return self._state.shards

    @property
    def version(self) -> int:
        return self._machine.version

    @property
    def has_begun(self) -> bool:
        return self._machine.begun

    @property
    def store(self) -> ParameterStore | None:
        return self._state.store

    @property
    def _machine(self) -> ShardMachine:
        return self._state.machine

    def check_layout(self, shards: int) -> None:
        """Raise LayoutError if a request is meant for another number of shards."""
        if shards not in (0, self.shards):
            raise LayoutError(f"shard {self.shard} belongs to {self.shards} shards, not {shards}")

    def set_model(self, spec: ModelSpec) -> None:
        """Create this shard's partition of the job's model. Repeating it is harmless."""
        state = self._state
        if state.machine.begun and state.store is not None:
            # a resumed job may have another clip norm
            state.store.clips_gradients = spec.optimizer.clip_norm is not None
        if not state.needs_model(spec):
            return
        store = state.new_store(spec)
        with self._apply_lock, self._waiters:
            if self._state is state:
                self._install_model(spec, store)
                self._log.model(spec)

    def _install_model(self, spec: ModelSpec, store: ParameterStore) -> None:
        self._state.install_model(spec, store)
        self._waiters.notify_all()
        self._show_model()

    def _show_model(self) -> None:
        if (store := self._state.store) is not None:
            self.metrics.model(count_elements(store.plan, self.shard), store.nbytes)

    def install(self, state: ShardState, continues_log: bool = False) -> None:
        """Replace the whole state. Discards staged pushes; workers attach their buffers again.

        continues_log: the state comes from this shard's own log, which goes on.
        """
        with self._apply_lock, self._log_lock, self._waiters:
            for arrays in self._state.staged.values():
                self.release(arrays.staging)
            self.shared_buffers.clear()
            self._state = state
            if not continues_log:
                self._log.clear()
            self._show_model()
            self._begin_segment()
            self._waiters.notify_all()

    def _begin_segment(self) -> None:
        state = self._state
        self.metrics.version(state.machine.version)
        self._log.begin(state.base(), state.model, state.staged_pushes())

    # ---- resharding ------------------------------------------------------------------------------

    @property
    def is_resharding(self) -> bool:
        """Whether this shard lacks its new partition of the model."""
        return self._machine.moving

    def prepare_partition(self, index: int) -> PendingPartition | None:
        """Return the partition to build after the Reshard at `index`.

        None: the shard has not applied that entry yet, or already has its partition.
        """
        state = self._state
        if not state.machine.moving or state.machine.index < index or state.model is None:
            return None
        return PendingPartition(state, state.new_store(state.model))

    def install_partition(self, pending: PendingPartition) -> None:
        """Start to use the new partition, unless the shard's state has been replaced meanwhile."""
        state, store = pending
        with self._apply_lock, self._waiters:
            if (
                self._state is not state
                or state.shards != store.plan.shards
                or not state.machine.moving
            ):
                return
            self._log.moved()
            self._install_model(store.plan.spec, store)
            state.machine.moved()
        self.request_report()

    def state_after(self, index: int) -> dict[str, Any] | None:
        """Return the machine's state if it has applied the entry at `index`, else None."""
        with self._waiters:
            return self._machine.state() if self._machine.index >= index else None

    def wait_for_frozen(self, log_id: int, index: int, seconds: float = 0.0) -> FrozenShard:
        """Return the partition that the Reshard entry at this log and index froze.

        Raises UnreachableError (NOT_READY) if it is not frozen within `seconds`, or is discarded.
        """

        def is_frozen() -> bool:
            frozen = self._state.frozen
            return frozen is not None and (frozen.epoch, frozen.index) == (log_id, index)

        with self._waiters:
            self._waiters.wait_for(is_frozen, seconds)
            if self._state.frozen is None or not is_frozen():
                text = f"shard {self.shard} has no partition frozen at entry {index}"
                raise UnreachableError(text, "NOT_READY")
            return self._state.frozen

    def discard_frozen(self) -> None:
        """Drop the partition from before a reshard: no other shard needs it."""
        if self._state.frozen is not None:
            with self._waiters:
                self._state.frozen = None

    # ---- replication -----------------------------------------------------------------------------

    @contextmanager
    def export_state(self, seconds: float) -> Iterator[Iterator[StateRecord]]:
        """Yield the whole state as records for a standby; nothing is applied or staged meanwhile.

        Raises UnreachableError (NOT_READY) if the shard stays busy for `seconds`, or during a
        reshard, when other shards may still need the previous partition.
        """
        if self.is_resharding or self._state.frozen is not None:
            raise UnreachableError("the job is being resharded", "NOT_READY")
        if not self._apply_lock.acquire(timeout=seconds):
            raise UnreachableError(f"shard {self.shard} is busy", "NOT_READY")
        try:
            with self._log_lock, self._waiters:
                yield shard_records(self._state)
        finally:
            self._apply_lock.release()

    def wait_for_store(self, seconds: float) -> ParameterStore:
        """Return the arrays, waiting until the model is known.

        A worker may reach this shard before the coordinator has sent the model.
        """
        with self._waiters:
            self._waiters.wait_for(
                lambda: self._state.store is not None or self._stop_reason, seconds
            )
        if self._state.store is None:
            what = (
                "is waiting for its new partition of the model"
                if self.is_resharding
                else "does not know the job's model yet"
            )
            raise UnreachableError(f"shard {self.shard} {what}", "NOT_READY")
        return self._state.store

    def parse_groups(self, text: str) -> tuple[Mapping[str, Scalar], ...]:
        """Parse a push's hyper-parameters and check them against the job's optimizer."""
        assert self._state.model is not None
        return groups_of_push(
            text, validate(self._state.model.optimizer), self._state.model.tensors
        )

    # ---- pushes ----------------------------------------------------------------------------------

    def stage_push(self, staged: Staged, staging: Staging) -> bool:
        """Stage a complete push. Return False if it was decided before."""
        store = self._state.store
        if store is None or not store.owns(staging):
            self.release(staging)
            raise UnreachableError(
                f"shard {self.shard} has another partition of the model now", "NOT_READY"
            )
        staged = check_gradient(staged, staging, store, self.gradient_rules)
        with self._log_lock:
            is_new = self._log_and_stage(staged, staging)
        self.transfer_stats.count_received(staging.nbytes)
        if is_new:
            self.request_report()
            return True
        self.release(staging)
        if self._machine.outcome(staged.key) is None:
            return True  # staged by an earlier attempt, or a reshard has started
        self.duplicate_count += 1
        self.metrics.pushed("duplicate")
        return False

    def _log_and_stage(self, staged: Staged, staging: Staging) -> bool:
        with self._waiters:
            store = self._state.store
            is_known = self._machine.outcome(staged.key) is not None
            if is_known or store is None or not store.owns(staging):
                return False
        if staged.key not in self._state.staged:
            self._log.push(staged, staging)
        with self._waiters:
            return self._state.stage(staged, staging)

    def release(self, staging: Staging) -> None:
        """Free the memory of a push that is no longer needed."""
        claim, staging.claim = staging.claim, None
        self._state.release(staging)
        if claim is not None:
            self.budget.release(claim)

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
            if not self._machine.begun or self._state.store is None:
                raise UnreachableError(f"shard {self.shard} has no weights yet", "NOT_READY")
            yield self._machine.version, self._state.store

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
                    self._log.applied(entry.version, self._state.loaded_store)
                elif isinstance(entry, Cut):
                    with self._log_lock:
                        self._begin_segment()
        if ready:
            self.request_report()

    def _process_entry(self, entry: Entry) -> None:
        self._log.entry(entry)
        square_norm = self._compute(entry)
        with self._waiters:
            ended = self._state.finish(entry, square_norm)
            self._waiters.notify_entry(entry)
        for staging in ended:
            self.release(staging)

    def _compute(self, entry: Entry) -> float:
        """Change the arrays as the entry says, and update what else depends on it."""
        state = self._state
        match entry:
            case Apply():
                staged_at = [state.staged[c.key].since for c in entry.contributions]
                began = time.monotonic()
                state.compute(entry)
                self.push_timings.record_update(entry, staged_at, began, time.monotonic() - began)
            case Reject():
                self.metrics.pushed("stale" if entry.reason == "STALE" else "rejected")
            case Evict():
                self.push_timings.drop(entry.worker)
                self.shared_buffers.drop(entry.worker)
            case Cut() if not state.machine.moving:
                self._start_snapshot(entry, state.loaded_store)
            case _:
                return state.compute(entry)
        return 0.0

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
