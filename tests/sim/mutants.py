"""Planted bugs: the simulation must find each of them.

CLASSES: arguments of World, by name of the bug.
PATCHES: arguments of monkeypatch.setattr, by name of the bug.
SCENARIOS: changes of each scenario, for a bug that random scenarios rarely reach.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import psserver.core.data.data_ledger as data_ledger_module
import psserver.core.job.job_state as job_state_module
import psserver.core.servers.shard_protocol as shard_protocol_module
import psserver.durability.coordinator_log as coordinator_log_module
import psserver.durability.shard_state as shard_state_module
from pscommon.core.errors import PSError
from pscommon.core.log_entries import Entry, PushKey, Reshard, Staged
from pscommon.core.model_spec import ModelSpec
from psserver.core.commands.command import Command
from psserver.core.commands.data_commands import LeaseBatches, ReportMetrics
from psserver.core.commands.recorded import RecordedCommand
from psserver.core.commands.recorder import NO_DEATHS, Recorder
from psserver.core.commands.request_checks import UnfitPush
from psserver.core.commands.worker_commands import Lose
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.coordinator.update_rounds import UpdateRounds
from psserver.core.data.map_loop import MapLoop
from psserver.core.job.pending_pushes import PendingPushes
from psserver.core.job.policy import policy
from psserver.core.job.ready_pushes import WaitingPush, WaitingPushes
from psserver.core.shard.state_machine import PushOutcome, ShardMachine
from psserver.core.workers.leases import WorkerLeases
from psserver.core.workers.members import Member
from psserver.durability.coordinator_log import CoordinatorLog
from psserver.durability.shard_log import SegmentBase, ShardLog
from psserver.durability.shard_state import ShardState
from psserver.shard.live_state import LiveShardState
from tests.sim.arrays import SimStaging, SimStore
from tests.sim.invalid_requests import FAULT
from tests.sim.scenario import Scenario

AVERAGE = SimStore.average


def average_in_arrival_order(
    store: SimStore,
    stagings: Sequence[SimStaging],
    samples: Sequence[int],
    scales: Sequence[float],
) -> list[float]:
    """Add gradients in the order of their arrival."""
    pushes = sorted(zip(stagings, samples, scales, strict=True), key=lambda push: push[0].number)
    return AVERAGE(store, *map(list, zip(*pushes, strict=True)))


class WithoutOutcomes(ShardMachine):
    """Forgets which pushes have counted, so that a repeated push is staged again."""

    def outcome(self, key: PushKey) -> PushOutcome | None:
        return (
            None
            if key not in self.staged and key.seq in self._outcomes.get(key.worker, {})
            else super().outcome(key)
        )

    def offer(self, push: Staged) -> bool:
        self._outcomes.get(push.key.worker, {}).pop(push.key.seq, None)
        return super().offer(push)


class WithoutDuplicateCheck(CoordinatorMachine):
    """Counts every push that the shards hold, including pushes that have counted before."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rounds._forget = self.pending.forget  # type: ignore[method-assign]


class ReadyOnOneShard(PendingPushes):
    """Treats a push as staged on all shards when one shard has staged it."""

    def staged(self, shard: int, staged: Staged) -> bool:
        super().staged(shard, staged)
        if staged.key not in self.ready:
            self.ready.add(staged.key, staged)
        return True


class WithoutBatchTransfer(CoordinatorMachine):
    """Does not transfer the batch leases of a lost worker to its successor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ledger.transfer = lambda old, new: None  # type: ignore[method-assign]


def omit_push(log: ShardLog, *push: Any) -> None:
    """Do not write a push to the log, although the shard reports it."""


LOAD = ShardState.load


def load_without_outcomes(state: ShardState, base: SegmentBase) -> None:
    """Recover a shard without the outcomes of pushes before the cut."""
    LOAD(state, base._replace(state={**base.state, "outcomes": []}))


WRITE = CoordinatorLog.write


def omit_leases(log: CoordinatorLog, command: Command[object], now: float) -> None:
    """Do not write batch leases to the log."""
    if not isinstance(command, LeaseBatches):
        WRITE(log, command, now)


class StandbyWithoutEntries(CoordinatorMachine):
    """Sends its standby a log without the entries that shards have not carried out yet."""

    def complete_state(self) -> dict[str, Any]:
        state = super().complete_state()
        return state | {
            "log": state["log"] | {"base": self.log.index, "digest": self.log.digest, "entries": []}
        }


class StandbyWithoutCut(CoordinatorMachine):
    """Sends its standby a state without the snapshot that is in progress."""

    def complete_state(self) -> dict[str, Any]:
        return super().complete_state() | {"cut": None}


FIRST = WaitingPushes.first


def first_beyond_bound(
    waiting: WaitingPushes, limit: int, is_valid: Callable[[WaitingPush], bool]
) -> WaitingPush | None:
    """Let the clock of a worker be S + 1 above the smallest clock."""
    return FIRST(waiting, limit + 1, is_valid)


CHOOSE = UpdateRounds._choose


def choose_incomplete_round(rounds: UpdateRounds) -> Sequence[PushKey]:
    """Close a round with the workers that have pushed."""
    job = rounds._job
    if not job.policy.barrier:
        return CHOOSE(rounds)
    ready = job.pending.ready
    return [ready.oldest(m.worker) for m in job.membership.active() if m.worker in ready.by_worker]


class WithoutReturnedBatches(CoordinatorMachine):
    """Never leases the batches of a lost worker again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ledger.give_back = lambda worker: (
            self.ledger.loops.get(0) and self.ledger.loops[0].drop(worker)
        )  # type: ignore


class CountsLeasedBatches(MapLoop):
    """Counts a batch when a worker leases it, instead of with its push."""

    def take(self, worker: int, received: int, count: int, together: Sequence[int]) -> list[int]:
        numbers = super().take(worker, received, count, together)
        for number in numbers:
            self.commit(worker, number)
        return numbers


class KeepsStagedInReshard(ShardMachine):
    """Keeps pushes that were staged for another number of shards."""

    def done(self, entry: Entry, square_norm: float = 0.0) -> None:
        staged = dict(self.staged)
        super().done(entry, square_norm)
        if isinstance(entry, Reshard):
            self.staged.update(staged)


def accept_any_shard_count(live: LiveShardState, shards: int) -> None:
    """Accept pushes that are partitioned for another number of shards."""


class AdoptsWithoutOutcomes(ShardMachine):
    """Joins in a reshard without the outcomes of earlier pushes."""

    def adopt(self, state: Mapping[str, Any]) -> None:
        super().adopt({**state, "outcomes": []})


class CountsInReshard(CoordinatorMachine):
    """Counts pushes during a reshard, before its snapshot is written."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        advance, job = self.rounds.advance, self.job

        def advance_without_reshard(now: float) -> None:
            reshard, job.reshard = job.reshard, None
            advance(now)
            job.reshard = reshard

        self.rounds.advance = advance_without_reshard  # type: ignore[method-assign]


class EndsReshardInRecovery(CoordinatorMachine):
    """Treats a reshard as ended after a recovery, although its snapshot is not written."""

    def load_state(
        self, state: Mapping[str, Any], model: ModelSpec | None, now: float, snapshot: int = 0
    ) -> None:
        super().load_state(state, model, now, sys.maxsize)


RESET = ShardLog.reset_standby


def keep_standby(log: ShardLog, why: str) -> None:
    """Let a standby keep its partition from before a reshard."""
    if why != "the model was resharded":
        RESET(log, why)


BASE = ShardState.base


def omit_frozen_partition(state: ShardState) -> SegmentBase:
    """Begin a log segment in a reshard without the previous partition."""
    return BASE(state)._replace(frozen=None)


class IgnoresRestartInReshard(CoordinatorMachine):
    """Treats the new partition of a shard as loaded after the shard was killed in the reshard."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.resharding.restart_shard = lambda shard: None  # type: ignore[method-assign]


RECOVERED = Recorder.recovered


def keep_workers(
    recorder: Recorder, now: float, generation: int, is_complete: bool = True, resumes: bool = False
) -> None:
    """Keep the workers after a failover in which acknowledged records may be missing."""
    RECOVERED(recorder, now, generation, resumes=resumes)


TICK_SECONDS = Recorder.tick


def remove_proven_dead(
    recorder: Recorder, now: float, deaths: Mapping[int, str] = NO_DEATHS
) -> list[Member]:
    """Remove a worker when its death is proven, whatever --on-worker-loss says."""
    members = recorder.coordinator.membership.members
    for worker, proof in deaths.items():
        if worker in members and members[worker].is_current:
            recorder.do(Lose(worker, proof), now)
    return TICK_SECONDS(recorder, now)


def ignore_death_proofs(leases: WorkerLeases, now: float) -> list[Member]:
    """Return the members whose lease has ended, without those whose death is proven."""
    return [m for m in leases._current if now - m.last_contact_at > leases.seconds]


def replay_until_error(
    coordinator: CoordinatorMachine, commands: Iterable[RecordedCommand], *rest: Any
) -> int:
    """Replay no command after one that raised an unexpected error."""
    for command in () if hasattr(coordinator, "has_failed") else commands:
        try:
            command.command.perform(coordinator, command.now)
        except PSError:
            continue
        except ZeroDivisionError:
            coordinator.has_failed = True  # type: ignore[attr-defined]
    return -1


def omit_failed_commands(log: CoordinatorLog, command: Command[object], now: float) -> None:
    """Do not write the command that raises an unexpected error."""
    if not isinstance(command, ReportMetrics) or FAULT not in command.metrics:
        WRITE(log, command, now)


def accept_unfit_pushes(
    coordinator: CoordinatorMachine, news: Iterable[Staged]
) -> dict[PushKey, UnfitPush]:
    """Accept every push."""
    return {}


def with_three_workers(scenario: Scenario) -> Scenario:
    """Use three workers, because the sum of two pushes does not depend on their order."""
    return replace(scenario, policy=policy("sync"), workers=3, clip_norm=None)


def resharded_with_kills(scenario: Scenario) -> Scenario:
    return replace(scenario, has_log=True, has_lagging_standbys=False, reshards=3, server_kills=4)


def one_lagging_shard(scenario: Scenario) -> Scenario:
    """Use only shard 0, with lagging standbys."""
    return replace(
        scenario,
        policy=policy("async"),
        has_log=True,
        has_lagging_standbys=True,
        standbys=6,
        server_kills=2,
        reshards=0,
        shards=1,
    )


SCENARIOS: dict[str, Callable[[Scenario], Scenario]] = {
    "gradients are added in the order of arrival": with_three_workers,
    "a log segment lacks the previous partition": resharded_with_kills,
    "workers are kept although records are missing": one_lagging_shard,
    "a recovery ends a reshard too early": resharded_with_kills,
}

CLASSES: dict[str, dict[str, type]] = {
    "no duplicate check": {"coordinator_class": WithoutDuplicateCheck},
    "a successor lacks its predecessor's batches": {"coordinator_class": WithoutBatchTransfer},
    "a standby lacks the newest entries": {"coordinator_class": StandbyWithoutEntries},
    "a standby lacks the snapshot in progress": {"coordinator_class": StandbyWithoutCut},
    "batches of a lost worker are not leased again": {"coordinator_class": WithoutReturnedBatches},
    "a push counts before a reshard ends": {"coordinator_class": CountsInReshard},
    "a recovery ends a reshard too early": {"coordinator_class": EndsReshardInRecovery},
    "a shard that was killed in a reshard counts as loaded": {
        "coordinator_class": IgnoresRestartInReshard
    },
}
PATCHES: dict[str, tuple[Any, str, Any]] = {
    "gradients are added in the order of arrival": (SimStore, "average", average_in_arrival_order),
    "no duplicate check": (shard_state_module, "ShardMachine", WithoutOutcomes),
    "a push reported before it is written": (ShardLog, "write_push", omit_push),
    "a recovered shard lacks outcomes": (ShardState, "load", load_without_outcomes),
    "leases are not written": (CoordinatorLog, "write", omit_leases),
    "a failed command is not written": (CoordinatorLog, "write", omit_failed_commands),
    "a reshard does not discard staged pushes": (
        shard_state_module,
        "ShardMachine",
        KeepsStagedInReshard,
    ),
    "a push for another shard count is accepted": (
        LiveShardState,
        "check_shard_count",
        accept_any_shard_count,
    ),
    "a new shard lacks outcomes": (
        shard_state_module,
        "ShardMachine",
        AdoptsWithoutOutcomes,
    ),
    "a log segment lacks the previous partition": (ShardState, "base", omit_frozen_partition),
    "a reshard does not reset standbys": (ShardLog, "reset_standby", keep_standby),
    "the ssp bound is exceeded by one": (WaitingPushes, "first", first_beyond_bound),
    "a round closes without all workers": (UpdateRounds, "_choose", choose_incomplete_round),
    "a push counts when one shard has staged it": (
        job_state_module,
        "PendingPushes",
        ReadyOnOneShard,
    ),
    "a worker is removed at a proof of death": (Recorder, "tick", remove_proven_dead),
    "a proof of death does not end a lease": (WorkerLeases, "ended", ignore_death_proofs),
    "a replay ends at a failed command": (
        coordinator_log_module,
        "replay",
        replay_until_error,
    ),
    "an unfit push is not refused": (shard_protocol_module, "unfit_pushes", accept_unfit_pushes),
    "workers are kept although records are missing": (Recorder, "recovered", keep_workers),
    "a batch counts when it is leased": (data_ledger_module, "MapLoop", CountsLeasedBatches),
}
