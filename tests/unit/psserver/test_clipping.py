"""How the coordinator clips updates, request by request; tests/sim has histories with faults."""

import json
import math

import pytest

from pscommon.core.log_entries import (
    Apply,
    Cut,
    Evict,
    Measure,
    Measured,
    PushKey,
    Reject,
    Reshard,
    ShardReport,
    Staged,
    clip_factor,
)
from pscommon.core.model_spec import ModelSpec, OptimizerSettings
from psserver.core.commands.job_commands import PolicySettings, SetPolicy
from psserver.core.commands.shard_commands import StartReshard
from psserver.core.commands.worker_commands import Leave, Lose
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import Policy, policy
from psserver.core.workers.members import WorkerState
from tests.support.clipped_job import MODEL, ClippedJob, part, scales


def test_the_factor_equals_that_of_torch() -> None:
    assert clip_factor(1.0, 9.0) == 1.0 / (3.0 + 1e-6)
    assert clip_factor(5.0, 9.0) == 1.0
    assert clip_factor(1.0, math.inf) == 0.0


def test_a_round_of_several_pushes_is_measured_before_it_is_applied() -> None:
    job = ClippedJob()
    job.push(1, 1)
    job.push(2, 1)
    assert job.news() == [Measure(2, (part(1), part(2)))]

    job.measure(4.0)
    job.report(1)
    assert job.news() == []
    job.report(1, Measured(2, 12.0))

    (update,) = job.news()
    assert scales(update) == [1.0 / (4.0 + 1e-6)] * 2
    assert job.machine.pending.measurement is None


def test_a_gradient_within_the_clip_norm_is_not_scaled() -> None:
    job = ClippedJob()
    job.push(1, 1)
    job.push(2, 1)
    job.measure(0.25, 0.25)

    assert scales(job.news()[-1]) == [1.0, 1.0]


@pytest.mark.parametrize("job_policy", [policy("sync"), policy("async"), policy("ssp", 1)])
def test_an_update_of_one_push_uses_the_norm_reported_with_the_push(job_policy: Policy) -> None:
    job = ClippedJob(job_policy, workers=1)
    job.push(1, 1, (4.0, 12.0))

    (update,) = job.news()
    assert scales(update) == [1.0 / (4.0 + 1e-6)]


def test_a_push_without_a_reported_norm_is_measured() -> None:
    """A shard may not know the clip norm yet: the worker that resumes a job may bring one."""
    job = ClippedJob(policy("async"), workers=1)
    job.push(1, 1, (4.0, 0.0))
    assert job.news() == [Measure(2, (part(1),))]
    job.measure(4.0, 12.0)

    assert scales(job.news()[-1]) == [1.0 / (4.0 + 1e-6)]


def test_without_a_clip_norm_nothing_is_measured() -> None:
    job = ClippedJob(model=ModelSpec(MODEL.tensors, OptimizerSettings("sgd", ({"lr": 0.1},))))
    job.push(1, 1)
    job.push(2, 1)

    assert job.news() == [Apply(2, 1, (part(1), part(2)))]
    assert "measurement" not in job.machine.job.as_json()["pending"]


def test_the_clip_norm_applies_to_the_gradient_after_max_norm() -> None:
    """The push of norm 3 is scaled to 1.5 first; the shards measure that, and both factors
    apply.
    """
    job = ClippedJob(bad_gradients="clip", max_norm=1.5)
    job.push(1, 1, (4.0, 5.0))
    job.push(2, 1, (1.0, 1.0))
    assert job.news() == [Measure(2, (part(1, scale=0.5), part(2)))]
    job.measure(2.0, 2.0)
    factor = 1.0 / (2.0 + 1e-6)

    assert scales(job.news()[-1]) == [0.5 * factor, factor]


def test_one_push_is_clipped_after_max_norm() -> None:
    job = ClippedJob(workers=1, bad_gradients="clip", max_norm=1.5)
    job.push(1, 1, (4.0, 5.0))

    assert scales(job.news()[-1]) == [0.5 * (1.0 / (1.5 + 1e-6))]


def test_a_clipped_update_counts_as_no_fault_of_its_workers() -> None:
    job = ClippedJob(bad_gradients="clip", max_norm=100.0, quarantine_after=1)
    job.push(1, 1)
    job.push(2, 1)
    job.measure(50.0, 50.0)

    assert [type(entry) for entry in job.news()] == [Measure, Apply]
    assert {member.state for member in job.machine.membership} == {WorkerState.ACTIVE}


def test_a_quarantined_worker_does_not_make_its_round_count_twice() -> None:
    """The first worker of the round was removed before the other pushes left the ready set."""
    job = ClippedJob(bad_gradients="clip", quarantine_after=1)
    job.push(1, 1, mended="w")
    job.push(2, 1)
    job.measure(0.1, 0.1)

    assert [type(entry) for entry in job.news()] == [Measure, Apply, Evict]
    assert job.machine.job.version == 1


def test_evicting_a_contributor_voids_the_measurement() -> None:
    """The round then consists of the other pushes and has another norm."""
    job = ClippedJob(workers=3)
    for worker in (1, 2, 3):
        job.push(worker, 1)
    job.measure(100.0)
    job.recorder.do(Lose(2, "silent"), 0.0)

    first, evict, second = job.news()
    assert isinstance(first, Measure)
    assert evict == Evict(3, 2, "silent")
    assert second == Measure(4, (part(1), part(3)))
    job.measure(100.0, 100.0, index=2)
    assert job.news() == []
    job.measure(4.0, 12.0)
    assert scales(job.news()[-1]) == [1.0 / (4.0 + 1e-6)] * 2


def test_the_reported_norm_suffices_when_one_contributor_remains() -> None:
    job = ClippedJob()
    job.push(1, 1, (4.0, 12.0))
    job.push(2, 1)
    job.recorder.do(Leave(2, ""), 0.0)

    measure, evict, update = job.news()
    assert [type(measure), type(evict)] == [Measure, Evict]
    assert scales(update) == [1.0 / (4.0 + 1e-6)]


def test_a_worker_that_joins_during_the_measurement_takes_part() -> None:
    """A round consists of all workers that are active when it is applied."""
    job = ClippedJob()
    job.push(1, 1)
    job.push(2, 1)
    newcomer = job.add(2)
    job.measure(1.0, 1.0)
    assert [type(entry) for entry in job.news()] == [Measure]
    job.push(newcomer, 1)

    assert job.news() == [Measure(3, (part(1), part(2), part(newcomer)))]


def test_a_policy_change_during_the_measurement_lets_each_push_count_alone() -> None:
    job = ClippedJob()
    job.push(1, 1, (4.0, 12.0))
    job.push(2, 1, (0.01, 0.01))
    job.recorder.do(SetPolicy(PolicySettings("async", None, None, 0)), 0.0)

    measure, first, second = job.news()
    assert isinstance(measure, Measure)
    assert [scales(first), scales(second)] == [[1.0 / (4.0 + 1e-6)], [1.0]]


def test_a_cut_during_the_measurement_keeps_it() -> None:
    job = ClippedJob()
    job.push(1, 1)
    job.push(2, 1)
    job.measure(4.0)
    job.recorder.cut(0.0)
    assert [type(entry) for entry in job.news()] == [Measure, Cut]
    job.report(1, Measured(2, 12.0))

    assert scales(job.news()[-1]) == [1.0 / (4.0 + 1e-6)] * 2


def test_a_reshard_during_the_measurement_voids_it() -> None:
    """The workers send the same pushes again, cut for the new shards."""
    job = ClippedJob()
    for shard in (0, 1):
        job.report(shard)
    job.push(1, 1)
    job.push(2, 1)
    job.measure(4.0)
    job.recorder.do(StartReshard(1, False), 0.0)
    assert [type(entry) for entry in job.news()] == [Measure, Reshard]
    assert job.machine.pending.measurement is None
    job.report(0)
    job.measure(12.0, 12.0, index=2)

    assert job.machine.job.version == 0
    assert job.machine.pending.measurement is not None
    assert job.machine.pending.measurement.square_norms == {}
    job.measure(16.0)
    assert scales(job.news()[-1]) == [1.0 / (4.0 + 1e-6)] * 2


def test_a_recovered_coordinator_waits_for_the_same_answers() -> None:
    job = ClippedJob()
    job.push(1, 1)
    job.push(2, 1)
    job.measure(4.0)
    again = job.again()
    assert again.job.as_json() == job.machine.job.as_json()
    other = CoordinatorMachine(2, job.rules)
    other.load_state(json.loads(json.dumps(job.machine.complete_state())), MODEL, 0.0)
    assert other.complete_state() == job.machine.complete_state()

    for machine in (again, other):
        machine.reports.process(
            ShardReport(1, 0, 2, tuple(job.staged[1].values()), measured=Measured(2, 12.0)), 0.0
        )
        (update,) = machine.log.after(2)
        assert scales(update) == [1.0 / (4.0 + 1e-6)] * 2


def test_a_repeated_answer_has_no_effect() -> None:
    job = ClippedJob()
    job.push(1, 1)
    job.push(2, 1)
    before = len(job.journal.lines)
    for _ in range(3):
        job.measure(4.0)
    job.measure(1.0, 1.0, index=1)

    assert len(job.journal.lines) == before + 1


@pytest.mark.parametrize("square", [math.nan, -1.0])
def test_an_answer_that_is_no_sum_of_squares_is_ignored(square: float) -> None:
    job = ClippedJob()
    job.push(1, 1)
    job.push(2, 1)
    job.measure(square, square)
    assert [type(entry) for entry in job.news()] == [Measure]
    job.measure(4.0, 12.0)

    assert scales(job.news()[-1]) == [1.0 / (4.0 + 1e-6)] * 2


@pytest.mark.parametrize("square", [math.nan, -1.0])
def test_a_push_without_a_norm_is_refused(square: float) -> None:
    job = ClippedJob(policy("async"), workers=1)
    job.push(1, 1, (square, square))

    assert [(entry.reason, entry.detail) for entry in job.news() if isinstance(entry, Reject)] == [
        ("INVALID_REQUEST", f"push 1 of worker 1 refused: the square of its norm is {square}")
    ]


def test_a_failed_job_does_not_apply_a_measured_round() -> None:
    job = ClippedJob()
    job.push(1, 1)
    job.push(2, 1)
    key = PushKey(1, 2)
    job.staged[0][key] = Staged(key, 8, 0, problem="NON_FINITE: tensor w")
    job.report(0)
    job.measure(1.0, 1.0)

    assert job.machine.job.failure is not None
    assert job.machine.job.version == 0
