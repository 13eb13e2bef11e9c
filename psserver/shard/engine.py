"""One running shard: stages pushes, applies log entries, reports, and answers waiting requests.

Each request runs on its own thread. The thread that delivers log entries applies them, so that no
hand-over to another thread costs time. Receiving a push needs no lock. live_state.py has the locks.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple, Protocol

from pscommon.core.errors import UnreachableError
from pscommon.core.log_entries import (
    Apply,
    Cut,
    Entry,
    Evict,
    PushKey,
    Reject,
    Reshard,
    SetBuffers,
    ShardReport,
    Staged,
)
from pscommon.core.model_spec import ModelSpec
from pscommon.tracing.recorder import server_spans
from psserver.core.job.settings import ANY, GradientRules
from psserver.core.job.snapshot_schedule import PartReport
from psserver.core.shard.state_machine import PushOutcome
from psserver.durability.shard_log import ShardLog
from psserver.durability.shard_state import ShardState
from psserver.parameters.staging import Staging, replace_non_finite
from psserver.parameters.store import ParameterStore, clipped_optimizers
from psserver.shard.live_state import LiveShardState
from psserver.shard.worker_traffic import WorkerTraffic

REPORT_INTERVAL_SECONDS = 1.0
"""Time between complete reports of a shard to the coordinator."""

UNAWAITED = frozenset({Apply, Reject, SetBuffers})
"""Entries that nothing waits for a shard to carry out: the next report is soon enough."""

QUICK_BYTES = 256 << 10
"""Size of a partition whose updates take well below a millisecond."""


class PendingPartition(NamedTuple):
    """A shard's new partition in a reshard, to be filled from the shards that held it before.

    state: the shard's state when the partition was prepared.
    store: the new partition's arrays.
    """

    state: ShardState
    store: ParameterStore


class Coordinator(Protocol):
    """The coordinator as a shard sees it: in the same process, or over a connection."""

    def request_report(self) -> None:
        """Make the shard report what is new. Called outside all locks."""

    def record_part(self, part: PartReport) -> None:
        """Record how writing the shard's part of a snapshot ended. Called in the writing thread."""

    def describe_wait(self) -> str:
        """Return what the job waits for, as text.

        Raises TooFewWorkersError if waiting for the first workers can no longer succeed.
        """
        ...


class ShardEngine:
    """Runs one shard.

    start_snapshot(entry, store, record_part) is called, while nothing is applied, to copy exactly
    this version.

    state: the state to begin with.
    live: the current state.
    traffic: the traffic with workers; its observers learn what happens to the shard.
    coordinator: decides what the shard applies.
    log: the shard's log; a push or entry is written to it before anything is reported of it.
    gradient_rules: what pushes must satisfy.
    """

    def __init__(
        self,
        state: ShardState,
        traffic: WorkerTraffic,
        start_snapshot: Callable[[Cut, ParameterStore, Callable[[PartReport], None]], None],
        coordinator: Coordinator,
        log: ShardLog | None = None,
        gradient_rules: GradientRules = ANY,
    ) -> None:
        self.traffic, self.coordinator = traffic, coordinator
        self.gradient_rules = gradient_rules
        self.live = LiveShardState(state)
        self._observers = traffic.observers
        # a small push has no time for observers that ignore it
        self._on_receive, self._on_repeat, self._on_update = (
            [getattr(each, event) for each in traffic.observers if event in vars(type(each))]
            for event in ("on_receive", "on_repeat", "on_update")
        )
        self._start_snapshot = start_snapshot
        self.log = log or ShardLog(state.shard)

    # ---- the model -------------------------------------------------------------------------------

    def set_model(self, spec: ModelSpec) -> None:
        """Create this shard's partition of the job's model. Repeating it is harmless."""
        state = self.live.state
        if state.machine.begun and state.store is not None:
            # a resumed job may have another clip norm
            state.store.clipped = clipped_optimizers(spec)
        if not state.needs_model(spec):
            return
        store = state.new_store(spec)
        with self.live.apply_lock, self.live.changed:
            if self.live.state is state:
                self._install_model(spec, store)
                self.log.write_model(spec)

    def _install_model(self, spec: ModelSpec, store: ParameterStore) -> None:
        self.live.state.install_model(spec, store)
        self.live.changes.notify_all()
        for observer in self._observers:
            observer.on_model(self.live.state)

    def install(self, state: ShardState, continues_log: bool = False) -> None:
        """Replace the whole state. Discards staged pushes; workers attach their buffers again.

        continues_log: the state comes from this shard's own log, which goes on.
        """
        with self.live.apply_lock, self.live.log_lock, self.live.changed:
            for arrays in self.live.state.staged.values():
                self.release(arrays.staging)
            self.live.state = state
            for observer in self._observers:
                observer.on_install(state)
                observer.on_model(state)
            if not continues_log:
                self.log.clear()
            self._begin_segment()
            self.live.changes.notify_all()

    def _begin_segment(self) -> None:
        state = self.live.state
        self.log.begin_segment(state.base(), state.model, state.staged_pushes())

    # ---- resharding ------------------------------------------------------------------------------

    def prepare_partition(self, index: int) -> PendingPartition | None:
        """Return the partition to build after the Reshard at `index`.

        None: the shard has not applied that entry yet, or already has its partition.
        """
        state = self.live.state
        if not state.machine.is_resharding or state.machine.index < index or state.model is None:
            return None
        return PendingPartition(state, state.new_store(state.model))

    def install_partition(self, pending: PendingPartition) -> None:
        """Start to use the new partition, unless the shard's state has been replaced meanwhile."""
        state, store = pending
        with self.live.apply_lock, self.live.changed:
            if (
                self.live.state is not state
                or state.shards != store.plan.shards
                or not state.machine.is_resharding
            ):
                return
            self.log.reset_standby("the model was resharded")  # no record describes it
            self._install_model(store.plan.spec, store)
            state.machine.finish_reshard()
        self.coordinator.request_report()

    # ---- pushes ----------------------------------------------------------------------------------

    def stage_push(self, staged: Staged, staging: Staging) -> bool:
        """Stage a complete push. Return False if it was decided before."""
        store = self.live.state.store
        if store is None or not store.owns(staging):
            self.release(staging)
            raise UnreachableError(
                f"shard {self.live.shard} has another partition of the model now", "NOT_READY"
            )
        began = server_spans.now()
        staged = check_gradient(staged, staging, store, self.gradient_rules)
        server_spans.add("check", began, (staged.key,))
        with self.live.log_lock:
            with self.live.changed:
                state = self.live.state
                store, must_log = state.store, staged.key not in state.staged
                is_known = state.machine.outcome(staged.key) is not None
            is_new = not is_known and store is not None and store.owns(staging)
            if is_new and must_log:
                self.log.write_push(staged, staging)
            with self.live.changed:
                is_new = is_new and self.live.state.stage(staged, staging)
        for on_receive in self._on_receive:
            on_receive(staging.nbytes)
        if is_new:
            self.coordinator.request_report()
            return True
        self.release(staging)
        if self.live.machine.outcome(staged.key) is None:
            return True  # staged by an earlier attempt, or a reshard has started
        for on_repeat in self._on_repeat:
            on_repeat()
        return False

    def find_repeat(self, key: PushKey) -> bool | None:
        """Return whether a push that was received before is decided; None: it was not received."""
        with self.live.changed:
            machine = self.live.state.machine
            is_decided = machine.outcome(key) is not None
            if not is_decided and key not in machine.staged:
                return None
        if is_decided:
            for on_repeat in self._on_repeat:
                on_repeat()
        return is_decided

    def release(self, staging: Staging) -> None:
        """Free the memory of a push that is no longer needed."""
        claim, staging.claim = staging.claim, None
        self.live.state.release(staging)
        if claim is not None:
            self.traffic.budget.release(claim)

    def watch_outcome(
        self, key: PushKey | None, wake: Callable[[], None]
    ) -> AbstractContextManager[None]:
        """Call `wake` when `find_outcome` may have news, until the block ends."""
        live = self.live
        with live.changed:
            is_decided = key is not None and live.state.machine.outcome(key) is not None
            # a decided push waits for a version, which any change may bring
            return live.changes.watch(None if is_decided else key, wake)

    def find_outcome(self, key: PushKey | None, version: int) -> PushOutcome | None:
        """Return a push's outcome once it is decided and `version` is reached; None before.

        key: The push. None: the outcome is "none", with the newest version.

        Raises UnreachableError: NOT_READY if the worker must send the push again, STOPPING if the
        shard stops.
        """
        live = self.live
        with live.changed:
            machine = live.state.machine
            answer = machine.answer(key, version)
            if answer is not None and key is not None:  # even while stopping: it may end the job
                return answer
            if live.stop_reason:
                raise UnreachableError(
                    f"shard {live.shard} is stopping: {live.stop_reason}", "STOPPING"
                )
            if key is not None and not machine.is_known(key):  # a rollback has discarded it
                raise UnreachableError(
                    f"shard {live.shard} does not hold push {key.seq} of this worker", "NOT_READY"
                )
            return answer

    @property
    def is_quick(self) -> bool:
        """Whether a request takes well below a millisecond: the partition is small, not logged."""
        store = self.live.state.store
        return store is not None and store.step_nbytes <= QUICK_BYTES and self.log.is_idle

    # ---- the log ---------------------------------------------------------------------------------

    def deliver(self, log_id: int, entries: Iterable[Entry]) -> None:
        """Apply the next entries of the log.

        Entries may come twice, too early, or from a log that is no longer followed.
        """
        with self.live.apply_lock:
            with self.live.changed:
                ready = self.live.state.machine.accept(log_id, entries)
            for group in _visible_together(ready):
                entry = group[-1]
                # no push may be logged between a Reshard record and its effect
                with self.live.log_lock if isinstance(entry, Reshard) else nullcontext():
                    self._carry_out(group)
                if isinstance(entry, Apply):
                    self.log.send_checksum(entry.version, self.live.state.loaded_store)
                elif isinstance(entry, Cut):
                    with self.live.log_lock:
                        self._begin_segment()
        if not UNAWAITED.issuperset(map(type, ready)):
            self.coordinator.request_report()

    def _carry_out(self, group: Sequence[Entry]) -> None:
        """Change the arrays as the entries say, then what depends on them, all at once."""
        live, state, square_norm, ended = self.live, self.live.state, 0.0, list[Staging]()
        for entry in group:
            self.log.write_entry(entry)
            match entry:
                case Apply():
                    staged_at = [state.staged[c.key].since for c in entry.contributions]
                    began = time.monotonic()
                    state.compute(entry)
                    seconds = time.monotonic() - began
                    pushes = tuple(each.key for each in entry.contributions)
                    server_spans.add("apply", began, pushes, entry.version, ended=began + seconds)
                    for on_update in self._on_update:
                        on_update(entry, staged_at, began, seconds)
                case Reject():
                    for observer in self._observers:
                        observer.on_reject(entry)
                case Evict():
                    for observer in self._observers:
                        observer.on_evict(entry.worker)
                case Cut() if not state.machine.is_resharding:
                    self._start_snapshot(entry, state.loaded_store, self.coordinator.record_part)
                case _:
                    square_norm = state.compute(entry)
        with live.changed:
            for entry in group:
                ended += state.finish(entry, square_norm)
            for entry in group:
                live.changes.notify_entry(entry)
        for staging in ended:
            self.release(staging)

    def make_report(self, only_new: bool = False) -> ShardReport:
        """Return what the coordinator needs to know of this shard.

        only_new: Leave out pushes that an earlier report had.
        """
        with self.live.changed:
            report = self.live.state.machine.report(only_new)
        self.log.wait_before_report()
        nbytes, is_broken = self.log.nbytes, self.log.is_broken
        return (
            replace(report, log_bytes=nbytes, log_broken=is_broken)
            if nbytes or is_broken
            else report
        )

    def stop(self, reason: str) -> None:
        """End all waiting requests; each fails with this reason."""
        with self.live.changed:
            self.live.stop_reason = reason or "the job ends"
            self.live.changes.notify_all()


def _visible_together(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Return the entries in order, each by itself, but a rejection with the eviction after it.

    Else a worker would sometimes learn only of the first one.
    """
    groups = list[list[Entry]]()
    for entry in entries:
        if groups and isinstance(entry, Evict) and isinstance(groups[-1][-1], Reject):
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return groups


def check_gradient(
    staged: Staged, staging: Staging, store: ParameterStore, rules: GradientRules
) -> Staged:
    """Return `staged` with what the coordinator must know of the gradient: NaN, Inf and its norm.

    If the operator asked for it, NaN and Inf in gradients are replaced by zeros.
    """
    if staged.reduce_round or staged.upload:
        return staged  # it has no gradient
    tensor = store.find_non_finite(staging)
    if tensor and rules.mends and not staging.initial:
        replace_non_finite(staging)
        # buffers cannot be mended
        staged, tensor = replace(staged, mended=tensor), store.find_non_finite(staging)
    if tensor:
        return replace(staged, problem=f"NON_FINITE: tensor {tensor}")
    # in a round of several the norm of their average matters; where that was not so, the
    # coordinator has it measured
    needs_norm = (
        rules.norms or (staged.optimizer in store.clipped and not store.averaged_last)
    ) and not staging.initial
    return replace(staged, square_norm=store.square_norm([staging])) if needs_norm else staged
