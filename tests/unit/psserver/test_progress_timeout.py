"""A worker whose script makes no call is reported; with --progress-timeout it is removed."""

from dataclasses import replace

import pytest

from pscommon.core.errors import FencedError, InvalidRequestError, TooFewWorkersError
from psserver.core.commands.recorder import Recorder
from psserver.core.commands.waiting import waiting_for
from psserver.core.commands.worker_commands import Lose
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules, WorkerLossMode
from psserver.core.workers.leases import HANGING_SECONDS
from psserver.core.workers.members import WorkerHeartbeat, WorkerState
from psserver.core.workers.membership import Membership
from psserver.monitoring.worker_monitor import find_conditions
from psserver.process.config import ServerConfig
from tests.support.coordinator_job import Job
from tests.support.memory_journal import MemoryJournal

TIMEOUT = 7.0


def job_of_two(
    timeout: float | None = TIMEOUT, on_loss: WorkerLossMode | None = None
) -> tuple[Job, MemoryJournal]:
    job = Job(workers=2)
    job.coordinator.use_rules(
        replace(
            job.coordinator.job.rules, progress_timeout=timeout, on_loss=on_loss or WorkerLossMode()
        ),
        job.now,
    )
    written = MemoryJournal()
    job.recorder = Recorder(job.coordinator, written)
    return job, written


def beat(job: Job, *no_call_seconds: float) -> None:
    """Send a heartbeat of each worker and check the clock."""
    for worker, seconds in enumerate(no_call_seconds, start=1):
        member = job.coordinator.job.member(worker, job.now)
        member.heartbeat = WorkerHeartbeat(no_call_seconds=seconds)
    job.recorder.tick(job.now)


@pytest.mark.parametrize("mode", ["shrink", "wait"])
def test_a_hanging_worker_is_lost_and_its_round_closes(mode: str) -> None:
    """Its membership ends even with `--on-worker-loss wait`: the process lives and rejoins."""
    job, written = job_of_two(on_loss=WorkerLossMode(mode, 60.0))  # type: ignore[arg-type]
    beat(job, 0.0, TIMEOUT)
    job.push(1, 1)
    assert job.applied() == []

    beat(job, 0.0, TIMEOUT + 0.5)

    assert job.applied() == [[1]]
    assert job.coordinator.membership.members[2].state is WorkerState.LOST
    assert written.commands[-1].command == Lose(
        2, "--progress-timeout: its script made no call for 7.5 s"
    )
    with pytest.raises(FencedError, match="its script made no call"):
        job.coordinator.job.member(2, job.now)


def test_with_abort_a_hanging_worker_ends_the_job() -> None:
    job, _ = job_of_two(on_loss=WorkerLossMode("abort"))

    beat(job, 0.0, TIMEOUT + 0.5)

    assert isinstance(job.coordinator.job.failure, TooFewWorkersError)


def test_without_a_timeout_a_hanging_worker_is_reported_and_stays() -> None:
    job, written = job_of_two(timeout=None)
    job.push(1, 1)
    beat(job, 0.0, HANGING_SECONDS)
    assert str(find_conditions(job.coordinator, job.now)[2].health) == "live"

    beat(job, 0.0, HANGING_SECONDS + 10)

    assert str(find_conditions(job.coordinator, job.now)[2].health) == "hanging"
    assert str(find_conditions(job.coordinator, job.now)[1].health) == "live"
    assert "whose script has made no call for 40 s" in waiting_for(job.coordinator, job.now)
    assert not any(isinstance(recorded.command, Lose) for recorded in written.commands)


def test_a_worker_that_has_not_registered_is_not_removed() -> None:
    """It may be reading its data; no round waits for it."""
    job, written = job_of_two()
    worker = job.coordinator.membership.join(job.now, None, "host", 1, "cpu").worker

    member = job.coordinator.job.member(worker, job.now)
    member.heartbeat = WorkerHeartbeat(no_call_seconds=600.0)
    job.recorder.tick(job.now)

    assert not any(isinstance(recorded.command, Lose) for recorded in written.commands)


def test_a_worker_is_reported_before_it_is_removed() -> None:
    membership = Membership(5.0)
    member = membership.join(0.0, None, "host", 1, "cpu")
    membership.index.set_state(member, WorkerState.ACTIVE)
    for timeout, hanging in ((None, False), (4.0, True), (600.0, False)):
        membership.leases.progress_timeout = timeout
        member.heartbeat = WorkerHeartbeat(no_call_seconds=5.0)
        assert membership.leases.is_hanging(member) is hanging


def test_heartbeat_activity_is_no_part_of_the_state() -> None:
    membership = Membership(5.0)
    membership.join(0.0, None, "host", 1, "cpu")

    assert "no_call_seconds" not in membership.state()["members"][0]


def test_settings_without_a_timeout_keep_their_format() -> None:
    assert "progress_timeout" not in JobRules(policy("sync")).as_json()
    rules = JobRules(policy("sync"), progress_timeout=TIMEOUT)
    assert JobRules.from_json(rules.as_json()) == rules


def test_a_timeout_of_zero_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="--progress-timeout 0"):
        ServerConfig(progress_timeout=0.0)
