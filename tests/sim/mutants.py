"""Bugs planted by hand, one at a time: each must be caught by the simulation, or the simulation
proves nothing.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import psserver.core.commands.recorder as recorder_module
import psserver.core.coordinator.update_rounds as updates_module
import psserver.core.data.data_ledger as data_ledger_module
import psserver.core.job.job_state as job_state_module
import psserver.durability.coordinator_log as coordinator_log_module
import psserver.durability.shard_state as shard_state_module
from pscommon.core.errors import PSError
from pscommon.core.log_entries import Entry, PushKey, Reshard, Staged
from pscommon.core.model_spec import ModelSpec
from psserver.core.commands.data_commands import LeaseBatches, ReportMetrics
from psserver.core.commands.recorded import RecordedCommand
from psserver.core.commands.recorder import NO_DEATHS, Recorder
from psserver.core.commands.request_checks import UnfitPush
from psserver.core.commands.worker_commands import Lose
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.data.map_loop import MapLoop
from psserver.core.job.pending_pushes import PendingPushes
from psserver.core.job.policy import Policy, choose, policy
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


def averages_in_arrival_order(
    store: SimStore,
    stagings: Sequence[SimStaging],
    samples: Sequence[int],
    scales: Sequence[float],
) -> list[float]:
    """Add gradients in the order in which they arrived."""
    pushes = sorted(zip(stagings, samples, scales, strict=True), key=lambda push: push[0].number)
    return AVERAGE(store, *map(list, zip(*pushes, strict=True)))


class ShardForgets(ShardMachine):
    """Keeps no table of pushes that were counted: a repeated one is staged again."""

    def outcome(self, key: PushKey) -> PushOutcome | None:
        return (
            None
            if key not in self.staged and key.seq in self._outcomes.get(key.worker, {})
            else super().outcome(key)
        )

    def offer(self, push: Staged) -> bool:
        self._outcomes.get(push.key.worker, {}).pop(push.key.seq, None)
        return super().offer(push)


class NoDuplicateCheck(CoordinatorMachine):
    """Counts every push that the shards hold, also one that was counted before."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rounds._forget = self.pending.forget  # type: ignore[method-assign]


class ReadyOnOneShard(PendingPushes):
    """Takes a push for staged everywhere as soon as one shard has it."""

    def staged(self, shard: int, staged: Staged) -> None:
        super().staged(shard, staged)
        self._ready.setdefault(staged.key, staged)


class LosesPlaces(CoordinatorMachine):
    """Does not give the successor of a dead worker what that was leased."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ledger.transfer = lambda old, new: None  # type: ignore[method-assign]


def reports_before_writing(log: ShardLog, *push: Any) -> None:
    """Report a push that is not in the log."""


LOAD = ShardState.load


def forgets_outcomes(state: ShardState, base: SegmentBase) -> None:
    """Forget, in a recovery, which pushes counted before the cut."""
    LOAD(state, base._replace(state={**base.state, "outcomes": []}))


WRITE = CoordinatorLog.write


def forgets_leases(log: CoordinatorLog, command: RecordedCommand) -> None:
    """Do not write which worker leased batches."""
    if not isinstance(command.command, LeaseBatches):
        WRITE(log, command)


class ForgetsEntries(CoordinatorMachine):
    """Gives its standby no entries that shards have not carried out yet."""

    def complete_state(self) -> dict[str, Any]:
        state = super().complete_state()
        return state | {
            "log": state["log"] | {"base": self.log.index, "digest": self.log.digest, "entries": []}
        }


class ForgetsTheCut(CoordinatorMachine):
    """Does not tell its standby of the snapshot that is being written."""

    def complete_state(self) -> dict[str, Any]:
        return super().complete_state() | {"cut": None}


def bound_off_by_one(
    row: Policy, clocks: Mapping[int, int], ready: Mapping[int, PushKey]
) -> Sequence[PushKey]:
    """Lets a worker get S + 1 ahead."""
    looser = (
        row if row.bound is None or row.barrier else Policy(row.name, row.bound + 1, row.barrier)
    )
    return choose(looser, clocks, ready)


def part_of_the_members(
    row: Policy, clocks: Mapping[int, int], ready: Mapping[int, PushKey]
) -> Sequence[PushKey]:
    """Close a round with the members that have pushed."""
    return choose(
        row, {w: c for w, c in clocks.items() if w in ready} if row.barrier else clocks, ready
    )


class LosesBatchesOfTheDead(CoordinatorMachine):
    """Never gives the batches of a lost worker to anybody else."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ledger.give_back = lambda worker: (
            self.ledger.loops.get(0) and self.ledger.loops[0].drop(worker)
        )  # type: ignore


class CommitsWhenHandedOut(MapLoop):
    """Counts a batch when it is handed out instead of with the push that used it."""

    def take(self, worker: int, received: int, count: int, together: Sequence[int]) -> list[int]:
        numbers = super().take(worker, received, count, together)
        for number in numbers:
            self.commit(worker, number)
        return numbers


class StagedOverReshard(ShardMachine):
    """Keeps what was staged for another number of shards."""

    def done(self, entry: Entry, square_norm: float = 0.0) -> None:
        staged = dict(self.staged)
        super().done(entry, square_norm)
        if isinstance(entry, Reshard):
            self.staged.update(staged)


def accepts_any_layout(live: LiveShardState, shards: int) -> None:
    """Accept pushes that are meant for another number of shards."""


class AdoptsNoOutcomes(ShardMachine):
    """Joins in a move without knowing what has counted."""

    def adopt(self, state: Mapping[str, Any]) -> None:
        super().adopt({**state, "outcomes": []})


class CountsInMove(CoordinatorMachine):
    """Counts pushes as soon as all shards hold them, before the move is safe on the disk."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        advance, job = self.rounds.advance, self.job

        def advance_without_move(now: float) -> None:
            reshard, job.reshard = job.reshard, None
            advance(now)
            job.reshard = reshard

        self.rounds.advance = advance_without_move  # type: ignore[method-assign]


class TakesAMoveForOver(CoordinatorMachine):
    """Believes, made again in a move, that the snapshot which ends it is written."""

    def load_state(
        self, state: Mapping[str, Any], model: ModelSpec | None, now: float, snapshot: int = 0
    ) -> None:
        super().load_state(state, model, now, sys.maxsize)


def keeps_its_standby(log: ShardLog) -> None:
    """Let a standby go on with its partition from before a reshard."""


BASE = ShardState.base


def forgets_frozen_numbers(state: ShardState) -> SegmentBase:
    """Do not write, where a segment begins in a reshard, that the previous partition is kept."""
    return BASE(state)._replace(frozen=None)


class TrustsTheReborn(CoordinatorMachine):
    """Believes that a shard which died in a move still holds its new part."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.resharding.restart_shard = lambda shard: None  # type: ignore[method-assign]


RECOVERED = Recorder.recovered


def keeps_everybody(
    recorder: Recorder, now: float, generation: int, is_complete: bool = True, resumes: bool = False
) -> None:
    """Lets workers go on where they stand, though who took over may lack what they were told."""
    RECOVERED(recorder, now, generation, resumes=resumes)


TICK = Recorder.tick


def gives_up_places_of_the_dead(
    recorder: Recorder, now: float, deaths: Mapping[int, str] = NO_DEATHS
) -> list[Member]:
    """Takes a proof of death for the end of a place, whatever --on-worker-loss says."""
    members = recorder.coordinator.membership.members
    for worker, proof in deaths.items():
        if worker in members and members[worker].is_current:
            recorder.do(Lose(worker, proof), now)
    return TICK(recorder, now)


def believes_late_messages(leases: WorkerLeases, now: float) -> list[Member]:
    """Takes what a dead worker sent before for a sign of life."""
    return [m for m in leases._current if now - m.last_contact_at > leases.seconds]


def replay_until_an_error(
    coordinator: CoordinatorMachine, commands: Iterable[RecordedCommand], *rest: Any
) -> int:
    """Ignore what was recorded after a command that raised an unexpected error."""
    for command in () if hasattr(coordinator, "has_failed") else commands:
        try:
            command.command.perform(coordinator, command.now)
        except PSError:
            continue
        except ZeroDivisionError:
            coordinator.has_failed = True  # type: ignore[attr-defined]
    return -1


def forgets_failed_commands(log: CoordinatorLog, command: RecordedCommand) -> None:
    """Do not write a command that raised an unexpected error."""
    if not isinstance(command.command, ReportMetrics) or FAULT not in command.command.metrics:
        WRITE(log, command)


def no_unfit_pushes(
    coordinator: CoordinatorMachine, news: Iterable[Staged]
) -> dict[PushKey, UnfitPush]:
    """Lets every push be applied."""
    return {}


def three_unclipped(scenario: Scenario) -> Scenario:
    """Two pushes have the same sum in any order."""
    return replace(scenario, policy=policy("sync"), workers=3, clip_norm=None)


def moved_among_kills(scenario: Scenario) -> Scenario:
    return replace(scenario, durable=True, lag=False, reshards=3, server_kills=4)


def lagging_alone(scenario: Scenario) -> Scenario:
    """Shard 0 is all there is, and its standby lags."""
    return replace(
        scenario,
        policy=policy("async"),
        durable=True,
        lag=True,
        standbys=6,
        server_kills=2,
        reshards=0,
        shards=1,
    )


SCENARIOS: dict[str, Callable[[Scenario], Scenario]] = {
    "sum in arrival order": three_unclipped,
    "a log that begins in a reshard": moved_among_kills,
    "workers outlive what they were told": lagging_alone,
    "a reshard that ends too early": moved_among_kills,
}
"""Where histories of any kind would take too many seeds to meet a bug."""

CLASSES: dict[str, dict[str, type]] = {
    "no duplicate check": {"coordinator_class": NoDuplicateCheck},
    "a successor without its predecessor's data": {"coordinator_class": LosesPlaces},
    "a standby without the newest entries": {"coordinator_class": ForgetsEntries},
    "a standby that knows of no cut": {"coordinator_class": ForgetsTheCut},
    "batches of a lost worker are lost": {"coordinator_class": LosesBatchesOfTheDead},
    "a push counts before a reshard ends": {"coordinator_class": CountsInMove},
    "a reshard that ends too early": {"coordinator_class": TakesAMoveForOver},
    "a shard that was killed in a reshard counts as loaded": {"coordinator_class": TrustsTheReborn},
}
PATCHES: dict[str, tuple[Any, str, Any]] = {
    "sum in arrival order": (SimStore, "average", averages_in_arrival_order),
    "no duplicate check": (shard_state_module, "ShardMachine", ShardForgets),
    "a push reported before it is written": (ShardLog, "write_push", reports_before_writing),
    "outcomes forgotten over a restart": (ShardState, "load", forgets_outcomes),
    "commands that are not written": (CoordinatorLog, "write", forgets_leases),
    "a command that failed is not written": (CoordinatorLog, "write", forgets_failed_commands),
    "staged pushes outlive a reshard": (shard_state_module, "ShardMachine", StagedOverReshard),
    "a push for another layout is accepted": (LiveShardState, "check_layout", accepts_any_layout),
    "a new shard does not know what has counted": (
        shard_state_module,
        "ShardMachine",
        AdoptsNoOutcomes,
    ),
    "a log that begins in a reshard": (ShardState, "base", forgets_frozen_numbers),
    "a standby outlives a reshard": (ShardLog, "reset_standby", keeps_its_standby),
    "bound off by one": (updates_module, "choose", bound_off_by_one),
    "a round closed by part of its members": (updates_module, "choose", part_of_the_members),
    "a push counted on one shard only": (job_state_module, "PendingPushes", ReadyOnOneShard),
    "a dead worker's place is given up": (Recorder, "tick", gives_up_places_of_the_dead),
    "a dead worker is believed to live": (WorkerLeases, "ended", believes_late_messages),
    "a replay ends at a command that failed": (
        coordinator_log_module,
        "replay",
        replay_until_an_error,
    ),
    "an unfit push is not refused": (recorder_module, "unfit_pushes", no_unfit_pushes),
    "workers outlive what they were told": (Recorder, "recovered", keeps_everybody),
    "a batch counts when it is handed out": (data_ledger_module, "MapLoop", CommitsWhenHandedOut),
}
