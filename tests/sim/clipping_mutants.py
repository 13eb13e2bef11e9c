"""Bugs planted in how updates are clipped, as in mutants.py."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import psserver.core.job.entry_log as job_log_module
from pscommon.core.log_entries import Contribution, Entry, Measure, PushKey, ShardReport
from pscommon.core.model_spec import ModelSpec
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.clipping import Measurement
from psserver.core.job.pending_pushes import PendingPushes
from psserver.core.job.policy import policy
from psserver.durability.shard_log import SegmentBase
from psserver.durability.shard_state import ShardState
from tests.sim.scenario import SHRINK, Scenario


class TakesAnyMeasurement(CoordinatorMachine):
    """Clips an update by what was measured of another one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        square_norm = self.rounds._square_norm

        def of_any(contributions: tuple[Contribution, ...]) -> float | None:
            if self.pending.measurement is not None:
                return self.pending.measurement.square_norm(self.shards)
            return square_norm(contributions)

        self.rounds._square_norm = of_any  # type: ignore[method-assign]


class MeasurementOverReshard(CoordinatorMachine):
    """Adds up what shards of two layouts measured."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        clear = self.pending.clear

        def clear_pushes(shards: int) -> None:
            measurement = self.pending.measurement
            clear(shards)
            if measurement is not None:
                norms = measurement.square_norms.items()
                remaining = {shard: value for shard, value in norms if shard < shards}
                self.pending.measurement = replace(measurement, square_norms=remaining)

        self.pending.clear = clear_pushes  # type: ignore[method-assign]


LOAD = ShardState.load


def forgets_what_it_measured(state: ShardState, base: SegmentBase) -> None:
    """Forget, in a recovery, what was measured before the cut."""
    remaining = {key: value for key, value in base.state.items() if key != "measured"}
    LOAD(state, base._replace(state=remaining))


class ForgetsTheMeasurement(CoordinatorMachine):
    """Made again, or a standby's, it does not know what it waits for."""

    def load_state(
        self, state: Mapping[str, Any], model: ModelSpec | None, now: float, snapshot: int = 0
    ) -> None:
        super().load_state(state, model, now, snapshot)
        self.pending.measurement = None


class ClipsEachPush(CoordinatorMachine):
    """Clips each push of a round by its own norm instead of their average."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        clip = self.rounds._clipped

        def clip_each(
            contributions: tuple[Contribution, ...],
        ) -> tuple[Contribution, ...] | None:
            clipped = [clip((each,)) for each in contributions]
            return (
                None if None in clipped else tuple(each[0] for each in clipped if each is not None)
            )

        self.rounds._clipped = clip_each  # type: ignore[method-assign]


class AnswersUnwritten(CoordinatorMachine):
    """Acts on what shards measured without having it written down."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        record_index = self.reports.record_index

        def record_answer(report: ShardReport) -> None:
            record_index(report)
            if self.pending.measurement is not None and report.log_id == self.log_id:
                self.pending.measurement.take(report)

        self.reports.has_measured = lambda report: False  # type: ignore[method-assign]
        self.reports.record_index = record_answer  # type: ignore[method-assign]


COUNTED = job_log_module.counted


def counted_by_updates(entries: Iterable[Entry]) -> set[PushKey]:
    """Forgets that a Measure needs its pushes, too."""
    return COUNTED(entry for entry in entries if not isinstance(entry, Measure))


def first_answer(measurement: Measurement, shards: int) -> float | None:
    """Takes one shard's part of the norm for all of it."""
    return next(iter(measurement.square_norms.values()), None)


def always(pending: PendingPushes, key: PushKey) -> bool:
    """Takes 0 for the norm of a push at which some shard did not look."""
    return True


def clipped_with_standbys_that_lag(scenario: Scenario) -> Scenario:
    return replace(
        scenario,
        policy=policy("sync"),
        on_loss=SHRINK,
        workers=3,
        shards=3,
        durable=True,
        standbys=6,
        lag=True,
        reshards=0,
        switches=0,
        clip_norm=1.0,
    )


def clipped_sync(scenario: Scenario) -> Scenario:
    return replace(
        scenario, policy=policy("sync"), workers=3, shards=max(2, scenario.shards), clip_norm=1.0
    )


def clipped_among_cuts(scenario: Scenario) -> Scenario:
    """Logs that start a new segment between a Measure and its update."""
    return replace(
        clipped_sync(scenario), durable=True, lag=False, every=1, server_kills=4, standbys=2
    )


SCENARIOS: Mapping[str, Callable[[Scenario], Scenario]] = {
    "an update is clipped by the norm of another one": clipped_sync,
    "a measurement outlives a reshard": clipped_sync,
    "a measured norm forgotten over a restart": clipped_among_cuts,
    "a coordinator that forgets what it had measured": clipped_among_cuts,
    "a log that needs pushes for updates alone": clipped_with_standbys_that_lag,
}

CLASSES: dict[str, dict[str, type]] = {
    "an update is clipped by the norm of another one": {"coordinator_class": TakesAnyMeasurement},
    "a measurement outlives a reshard": {"coordinator_class": MeasurementOverReshard},
    "a coordinator that forgets what it had measured": {"coordinator_class": ForgetsTheMeasurement},
    "each push of a round is clipped alone": {"coordinator_class": ClipsEachPush},
    "measured norms that are not written": {"coordinator_class": AnswersUnwritten},
}
PATCHES: dict[str, tuple[Any, str, Any]] = {
    "a measured norm forgotten over a restart": (ShardState, "load", forgets_what_it_measured),
    "a log that needs pushes for updates alone": (job_log_module, "counted", counted_by_updates),
    "the norm of one shard for that of all": (Measurement, "square_norm", first_answer),
    "a push that was not measured has no norm": (PendingPushes, "is_measured", always),
}
