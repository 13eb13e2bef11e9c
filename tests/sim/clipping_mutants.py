"""Planted bugs in gradient clipping; see mutants.py."""

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


class ClipsByAnyMeasurement(CoordinatorMachine):
    """Clips an update by a norm that was measured for another update."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        square_norm = self.rounds._square_norm

        def any_square_norm(contributions: tuple[Contribution, ...]) -> float | None:
            if self.pending.measurement is not None:
                return self.pending.measurement.square_norm(self.job.shards)
            return square_norm(contributions)

        self.rounds._square_norm = any_square_norm  # type: ignore[method-assign]


class KeepsMeasurementInReshard(CoordinatorMachine):
    """Adds up norms that shards measured before and after a reshard."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        clear = self.pending.clear

        def clear_pushes_only(shards: int) -> None:
            measurement = self.pending.measurement
            clear(shards)
            if measurement is not None:
                norms = measurement.square_norms.items()
                remaining = {shard: value for shard, value in norms if shard < shards}
                self.pending.measurement = replace(measurement, square_norms=remaining)

        self.pending.clear = clear_pushes_only  # type: ignore[method-assign]


LOAD = ShardState.load


def omit_measured_norms(state: ShardState, base: SegmentBase) -> None:
    """Recover a shard without the norms that it measured before the cut."""
    remaining = {key: value for key, value in base.state.items() if key != "measured"}
    LOAD(state, base._replace(state=remaining))


class RecoversWithoutMeasurement(CoordinatorMachine):
    """Loses the pending measurement after a recovery or failover."""

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
            clip_norm: float | None, contributions: tuple[Contribution, ...]
        ) -> tuple[Contribution, ...] | None:
            clipped = [clip(clip_norm, (each,)) for each in contributions]
            return (
                None if None in clipped else tuple(each[0] for each in clipped if each is not None)
            )

        self.rounds._clipped = clip_each  # type: ignore[method-assign]


class UsesUnwrittenNorms(CoordinatorMachine):
    """Uses norms that shards report without writing them to the log."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

        def take_norm(report: ShardReport) -> bool:
            if self.pending.measurement is not None:
                self.pending.measurement.take(report)
            return False

        self.reports.has_measured = take_norm  # type: ignore[method-assign]


COUNTED = job_log_module.counted


def counted_by_updates_only(entries: Iterable[Entry]) -> set[PushKey]:
    """Return the pushes that Apply entries count, without those of Measure entries."""
    return COUNTED(entry for entry in entries if not isinstance(entry, Measure))


def norm_of_first_shard(measurement: Measurement, shards: int) -> float | None:
    """Return the norm of one shard as that of the whole update."""
    return next(iter(measurement.square_norms.values()), None)


def is_always_measured(pending: PendingPushes, key: PushKey) -> bool:
    """Use the norm 0 for a shard that did not measure the push."""
    return True


def clipped_with_lagging_standbys(scenario: Scenario) -> Scenario:
    return replace(
        scenario,
        policy=policy("sync"),
        on_loss=SHRINK,
        workers=3,
        shards=3,
        has_log=True,
        standbys=6,
        has_lagging_standbys=True,
        reshards=0,
        policy_switches=0,
        clip_norm=1.0,
    )


def clipped_sync(scenario: Scenario) -> Scenario:
    return replace(
        scenario, policy=policy("sync"), workers=3, shards=max(2, scenario.shards), clip_norm=1.0
    )


def clipped_with_many_cuts(scenario: Scenario) -> Scenario:
    """Make log segments begin between a Measure and its update."""
    return replace(
        clipped_sync(scenario),
        has_log=True,
        has_lagging_standbys=False,
        snapshot_interval=1,
        server_kills=4,
        standbys=2,
    )


SCENARIOS: Mapping[str, Callable[[Scenario], Scenario]] = {
    "an update is clipped by the norm of another update": clipped_sync,
    "a reshard does not discard a measurement": clipped_sync,
    "a recovered shard lacks its measured norms": clipped_with_many_cuts,
    "a recovered coordinator lacks its measurement": clipped_with_many_cuts,
    "a shard may lack the pushes of a Measure": clipped_with_lagging_standbys,
}

CLASSES: dict[str, dict[str, type]] = {
    "an update is clipped by the norm of another update": {
        "coordinator_class": ClipsByAnyMeasurement
    },
    "a reshard does not discard a measurement": {"coordinator_class": KeepsMeasurementInReshard},
    "a recovered coordinator lacks its measurement": {
        "coordinator_class": RecoversWithoutMeasurement
    },
    "each push of a round is clipped separately": {"coordinator_class": ClipsEachPush},
    "measured norms are not written": {"coordinator_class": UsesUnwrittenNorms},
}
PATCHES: dict[str, tuple[Any, str, Any]] = {
    "a recovered shard lacks its measured norms": (ShardState, "load", omit_measured_norms),
    "a shard may lack the pushes of a Measure": (
        job_log_module,
        "counted",
        counted_by_updates_only,
    ),
    "the norm of one shard counts as the whole norm": (
        Measurement,
        "square_norm",
        norm_of_first_shard,
    ),
    "a push that was not measured has norm 0": (PendingPushes, "is_measured", is_always_measured),
}
