"""Rounds with pushes of several optimizers; tests/sim has histories with faults."""

import json
from dataclasses import replace

import pytest

from pscommon.core.log_entries import (
    Apply,
    Cut,
    Measure,
    Measured,
    ShardReport,
)
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from psserver.core.commands.worker_commands import Lose
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.coordinator.update_rounds import MAX_DELAY_VERSIONS
from psserver.core.job.policy import Policy, policy
from psserver.core.job.snapshot_schedule import SnapshotInterval
from tests.support.clipped_job import ClippedJob, part, scales
from tests.support.coordinator_job import Job

SGD = OptimizerSettings("sgd")
CLIPPED = OptimizerSettings("sgd", clip_norm=1.0)
SEVERAL = ModelSpec(
    (TensorSpec("d.w", (1,), "float32"), TensorSpec("g.w", (1,), "float32", group=1)),
    {"d": CLIPPED, "g": CLIPPED},
)


def test_a_round_makes_one_update_for_each_optimizer() -> None:
    """Its pushes are not stale to each other, and the job counts all updates."""
    job = Job(workers=3, model=replace(SEVERAL, optimizer={"d": SGD, "g": SGD}))
    for worker, name in enumerate("gdg", 1):
        job.push(worker, 1, optimizer=name)

    assert job.news()[-2:] == [
        Apply(2, 1, (part(1), part(3))),
        Apply(3, 2, (part(2),)),
    ]
    state = job.coordinator.job.as_json()
    assert (state["version"], state["updates"]) == (2, {"d": 1, "g": 1})
    assert (state["samples"], state["counts"]["applied"]) == (8, 3)
    assert [member.clock for member in job.coordinator.membership] == [1, 1, 1]


def test_a_clock_counts_each_update_of_a_worker() -> None:
    job = Job(workers=1, model=replace(SEVERAL, optimizer={"d": SGD, "g": SGD}))
    for seq, name in enumerate("dg", 1):
        job.push(1, seq, optimizer=name)

    assert job.coordinator.job.as_json()["version"] == 2
    assert [member.clock for member in job.coordinator.membership] == [2]


def test_a_push_that_begins_a_batch_waits_for_workers_within_one() -> None:
    """So workers that have fallen out of step update the same optimizer together again."""
    job = Job(workers=2, model=replace(SEVERAL, optimizer={"d": SGD, "g": SGD}))
    for worker in (1, 2):
        job.ask(worker)
    job.push(1, 1, batches=[0], optimizer="d")
    job.push(2, 1, optimizer="g")
    assert job.news()[-1] == Apply(2, 1, (part(2),))

    job.push(2, 2, base=1, batches=[1], optimizer="d")
    (update,) = job.news()
    assert [each.key.worker for each in update.contributions] == [1, 2]


def test_a_worker_that_never_commits_a_batch_delays_the_others_for_some_versions_only() -> None:
    job = Job(workers=2, model=replace(SEVERAL, optimizer={"d": SGD, "g": SGD}))
    job.ask(1)
    job.push(1, 1, batches=[0], optimizer="d")
    for seq in range(1, MAX_DELAY_VERSIONS + 2):
        job.push(2, seq, base=seq - 1, optimizer="g")

    assert job.coordinator.membership.members[1].clock == 1
    assert job.coordinator.job.updates == {"d": 1, "g": MAX_DELAY_VERSIONS + 1}


@pytest.mark.parametrize("job_policy", [policy("sync", backup=1), policy("sync", max_staleness=3)])
def test_a_push_that_would_become_stale_does_not_wait(job_policy: Policy) -> None:
    job = Job(job_policy, workers=3, model=replace(SEVERAL, optimizer={"d": SGD, "g": SGD}))
    job.ask(1)
    job.push(1, 1, batches=[0], optimizer="d")
    for worker in (2, 3):
        job.push(worker, 1, optimizer="g")

    assert job.coordinator.membership.members[1].clock == 1


def test_a_snapshot_that_is_due_within_a_round_follows_it() -> None:
    every = SnapshotInterval(steps=3)
    job = Job(workers=2, model=replace(SEVERAL, optimizer={"d": SGD, "g": SGD}), every=every)
    for seq, base in ((1, 0), (2, 2)):
        for worker, name in enumerate("dg", 1):
            job.push(worker, seq, base, optimizer=name)

    *_, first, second, third, fourth, cut = job.news()
    assert [update.version for update in (first, second, third, fourth)] == [1, 2, 3, 4]
    assert cut == Cut(6, 4)


def test_a_job_with_one_optimizer_counts_no_updates_by_name() -> None:
    job = Job(workers=1)
    job.push(1, 1)

    assert job.coordinator.job.version == 1
    assert "updates" not in job.coordinator.job.as_json()


def test_a_round_of_two_optimizers_measures_each_update() -> None:
    """Both updates follow the second measurement; a recovered coordinator has the first one."""
    job = ClippedJob(workers=4, model=SEVERAL)
    for worker, name in enumerate("gdgd", 1):
        job.push(worker, 1, optimizer=name)
    assert job.news() == [Measure(2, (part(1), part(3)))]

    job.measure(4.0, 12.0)
    assert job.news() == [Measure(3, (part(2), part(4)))]
    other = CoordinatorMachine(2, job.rules)
    other.load_state(json.loads(json.dumps(job.machine.complete_state())), SEVERAL, 0.0)
    assert other.complete_state() == job.machine.complete_state()

    job.measure(1.0, 3.0)
    generator, discriminator = job.news()
    assert scales(generator) == [1.0 / (4.0 + 1e-6)] * 2
    assert scales(discriminator) == [1.0 / (2.0 + 1e-6)] * 2
    for shard, square in enumerate((1.0, 3.0)):
        staged = tuple(job.staged[shard].values())
        report = ShardReport(shard, 0, 3, staged, measured=Measured(3, square))
        other.reports.process(report, 0.0)
    assert other.log.after(3) == [generator, discriminator]
    assert other.job.updates == job.machine.job.updates == {"d": 1, "g": 1}


def test_a_round_of_two_optimizers_that_loses_a_worker_ignores_its_measurement() -> None:
    """Each update then has one push, whose norm was reported."""
    job = ClippedJob(workers=3, model=SEVERAL)
    for worker in (1, 2, 3):
        job.push(worker, 1, optimizer="d" if worker == 3 else "g")
    job.measure(4.0)  # shard 1 does not answer
    assert job.news()[-1] == Measure(2, (part(1), part(2)))

    job.recorder.do(Lose(2, "killed"), 0.0)

    update, other = (entry for entry in job.news() if isinstance(entry, Apply))
    assert [scales(update), scales(other)] == [[1.0 / (3.0 + 1e-6)]] * 2
    assert job.machine.pending.measurement is None
