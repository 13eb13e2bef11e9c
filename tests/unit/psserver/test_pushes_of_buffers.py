"""Pushes of buffers only: when the coordinator counts them."""

from pscommon.core.log_entries import Apply, PushKey, Reject, SetBuffers, ShardReport, Staged
from psserver.core.job.policy import policy
from tests.support.coordinator_job import Job
from tests.support.shard_reports import report_to


def send_buffers(job: Job, worker: int, seq: int, base: int) -> None:
    """Let the only shard report a push of buffers of version `base`."""
    staged = Staged(PushKey(worker, seq), 0, base)
    report_to(job.recorder, ShardReport(0, 0, 0, (staged,)), job.now)


def test_buffers_of_the_newest_version_are_taken_without_an_update() -> None:
    job = Job(policy("async"))
    job.push(1, 1)
    job.news()

    send_buffers(job, 1, 2, base=1)

    (entry,) = job.news()
    assert (entry, job.coordinator.job.version) == (SetBuffers(entry.index, PushKey(1, 2)), 1)
    job.push(1, 3, base=1)
    assert job.applied() == [[1]]


def test_buffers_of_an_older_version_are_dropped() -> None:
    job = Job(policy("async"))
    job.push(1, 1)
    job.push(2, 1)
    job.news()

    send_buffers(job, 1, 2, base=1)

    (entry,) = job.news()
    assert isinstance(entry, Reject)
    assert entry.reason == "STALE"


def test_buffers_are_no_part_of_a_round() -> None:
    job = Job(policy("sync"))
    job.push(1, 1)
    send_buffers(job, 2, 1, base=0)
    assert [type(entry) for entry in job.news()][-1] is SetBuffers

    job.push(2, 2)

    (entry,) = job.news()
    assert isinstance(entry, Apply)
    assert [each.key for each in entry.contributions] == [PushKey(1, 1), PushKey(2, 2)]
    assert [member.steps for member in job.coordinator.membership.members.values()] == [1, 1]
