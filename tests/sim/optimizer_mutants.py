"""Planted bugs in rounds of several optimizers; see mutants.py."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pscommon.core.log_entries import Contribution, PushKey, Staged
from psserver.core.coordinator.update_rounds import UpdateRounds
from psserver.core.job import pending_pushes
from psserver.core.job.clipping import Measurement
from psserver.core.job.job_state import JobState
from psserver.core.job.pending_pushes import PendingPushes
from psserver.core.job.policy import policy
from tests.sim.scenario import TWO_OPTIMIZERS, Scenario

UPDATES = UpdateRounds._updates
APPLY = UpdateRounds._apply
COUNT = JobState.count_update
LOAD = JobState.load_numbers
TO_JSON = pending_pushes._to_json


def average_all_pushes(
    rounds: UpdateRounds, keys: Iterable[PushKey]
) -> dict[str, tuple[Contribution, ...]]:
    """Make one update of a round, whatever optimizers its pushes name."""
    updates = UPDATES(rounds, keys)
    parts = tuple(part for contributions in updates.values() for part in contributions)
    return {next(iter(updates)): parts}


def apply_first_optimizer(rounds: UpdateRounds, keys: Iterable[PushKey], now: float) -> bool:
    """Leave the pushes of a round's other optimizers for a later round."""
    first, *_ = UPDATES(rounds, keys).values()
    return APPLY(rounds, [part.key for part in first], now)


def take_all_pushes(rounds: UpdateRounds, keys: Sequence[PushKey]) -> Sequence[PushKey]:
    """Do not let a worker that begins a batch wait for the others."""
    return keys


def load_without_counts(job: JobState, state: Mapping[str, Any], model: Any) -> None:
    """Forget the number of updates of each optimizer at a recovery."""
    LOAD(job, state, model)
    job.updates = {}


def write_first_optimizer(staged: Staged) -> list[Any]:
    """Write the first optimizer for each pending push."""
    return TO_JSON(replace(staged, optimizer=TWO_OPTIMIZERS[0]))


def measure_one_update(pending: PendingPushes, measurement: Measurement) -> None:
    """Forget the norm of a round's first update when the second one is measured."""
    pending.measurement = measurement


def with_two_optimizers(scenario: Scenario) -> Scenario:
    """Kill workers between their steps, so that rounds have pushes of both optimizers."""
    return replace(
        scenario,
        policy=policy("sync"),
        workers=3,
        worker_kills=3,
        restarts_workers=True,
        has_log=True,
        server_kills=3,
        optimizers=TWO_OPTIMIZERS,
    )


def with_clip_norm(scenario: Scenario) -> Scenario:
    return replace(with_two_optimizers(scenario), shards=2, clip_norm=1.0)


PATCHES: dict[str, tuple[Any, str, Any]] = {
    "a round makes one update for all optimizers": (
        UpdateRounds,
        "_updates",
        average_all_pushes,
    ),
    "workers that are out of step stay so": (UpdateRounds, "_of_begun_batches", take_all_pushes),
    "a round updates only the first optimizer": (UpdateRounds, "_apply", apply_first_optimizer),
    "a recovery forgets the updates of each optimizer": (
        JobState,
        "load_numbers",
        load_without_counts,
    ),
    "a pending push is written with the first optimizer": (
        pending_pushes,
        "_to_json",
        write_first_optimizer,
    ),
    "a round keeps one measurement": (PendingPushes, "measure", measure_one_update),
}

SCENARIOS: dict[str, Callable[[Scenario], Scenario]] = dict.fromkeys(
    PATCHES, with_two_optimizers
) | {"a round keeps one measurement": with_clip_norm}
