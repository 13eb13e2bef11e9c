"""The coordinator forgets departed workers without changing any decision about them."""

import json

import pytest

from pscommon.core.errors import FencedError
from pscommon.core.limits import WORKERS_PER_GENERATION
from pscommon.core.log_entries import Apply, Contribution, Evict, PushKey, ShardReport, Staged
from psserver.core.commands.recorder import MAX_DEPARTED_COUNT, MAX_EVICTED_COUNT
from psserver.core.commands.worker_commands import Join, Leave, Register
from psserver.core.job.policy import policy
from psserver.core.job.settings import WorkerLossMode
from psserver.core.shard.state_machine import MAX_EVICTED_WORKERS, ShardMachine
from psserver.core.workers.members import WorkerState
from psserver.core.workers.membership import Membership
from tests.support.replayed_job import MODEL, Job, full_state
from tests.support.shard_reports import report_to

JOINS = 2000


def join_and_leave(job: Job, count: int, reason: str = "") -> list[int]:
    """Let workers join, register, push once and leave."""
    workers = []
    for _ in range(count):
        worker = job.join()
        job.push(worker)
        job.recorder.do(Leave(worker, reason), job.now)
        job.recorder.tick(job.now)
        workers.append(worker)
    return workers


def test_a_job_with_many_departed_workers_stays_small() -> None:
    job = Job(policy("async"), workers=1)
    departed = join_and_leave(job, JOINS)
    coordinator, membership = job.coordinator, job.coordinator.membership

    assert membership.departed_count <= 2 * MAX_DEPARTED_COUNT
    assert len(coordinator.job.evicted) <= MAX_EVICTED_COUNT
    assert len(json.dumps(coordinator.job.as_json())) < 100_000
    assert (membership.departed.done_count, membership.counts()[WorkerState.LEFT]) == (JOINS, JOINS)
    assert membership.departed_count + membership.departed.done == len(departed)
    assert coordinator.job.version == JOINS


def test_a_restart_and_a_standby_forget_the_same_departed_workers() -> None:
    job = Job(policy("sync"), workers=2, on_loss=WorkerLossMode("wait", 5.0))
    join_and_leave(job, 3 * MAX_DEPARTED_COUNT, reason="killed")
    again = job.replayed()
    standby = job.made()
    standby.load_state(json.loads(json.dumps(again.complete_state())), MODEL, job.now)

    assert job.coordinator.membership.departed.states[WorkerState.LEFT] > 0
    assert full_state(again) == full_state(job.coordinator)
    assert json.dumps(standby.job.as_json()) == json.dumps(again.job.as_json())
    assert standby.membership.counts() == again.membership.counts()


def test_an_unknown_departed_worker_is_fenced_for_every_request() -> None:
    job = Job(policy("async"), workers=1)
    unknown = join_and_leave(job, JOINS)[0]

    assert unknown not in job.coordinator.membership.members
    with pytest.raises(FencedError):
        job.coordinator.job.member(unknown, job.now)
    index = job.coordinator.log.index
    report_to(job.recorder, ShardReport(0, 5, index, (Staged(PushKey(unknown, 2), 1, 0),)), job.now)
    (entry,) = job.coordinator.log.after(index)
    assert isinstance(entry, Evict)
    assert entry.worker == unknown


def test_a_staged_push_of_a_worker_unknown_to_its_shard_is_evicted_again() -> None:
    """The coordinator still knows that the worker has left, and tells the shard exactly once."""
    job = Job(policy("async"), workers=2)
    first = job.workers[0]
    job.recorder.do(Leave(first, ""), job.now)
    before = job.coordinator.log.index
    staged = (Staged(PushKey(first, 9), 1, 0),)
    report_to(job.recorder, ShardReport(1, 5, before - 1, staged), job.now)
    assert job.coordinator.log.index == before
    for _ in range(2):
        report_to(job.recorder, ShardReport(1, 5, before, staged), job.now)

    assert [type(entry) for entry in job.coordinator.log.after(before)] == [Evict]


def test_a_shard_drops_its_oldest_evicted_workers_and_learns_of_them_again() -> None:
    shard = ShardMachine(0)
    shard.follow(1, 0)
    for number in range(1, MAX_EVICTED_WORKERS + 3):
        shard.done(Evict(number, number, "it left the job"))
    newest, oldest = (Staged(PushKey(worker, 1), 1, 0) for worker in (MAX_EVICTED_WORKERS + 2, 1))

    assert len(json.dumps(shard.state())) < 60 * MAX_EVICTED_WORKERS
    assert not shard.offer(newest)
    assert shard.offer(oldest)
    shard.done(Evict(MAX_EVICTED_WORKERS + 3, 1, "it is not a worker of this job any more"))
    outcome = shard.outcome(oldest.key)
    assert not shard.staged
    assert outcome is not None
    assert outcome.reason == "FENCED"


def test_a_replacement_takes_the_membership_after_many_departures() -> None:
    job = Job(policy("sync"), workers=0, on_loss=WorkerLossMode("wait", 1000.0))
    join = {"rank": 0, "host": "h", "pid": 1, "device": "cpu"}
    dead = job.recorder.do(Join(attempt=0, **join), job.now).worker
    job.recorder.do(Register(dead, MODEL), job.now)
    job.report(Staged(PushKey(dead, 0), 1, 0))
    job.recorder.do(Register(dead, MODEL), job.now)
    for _ in range(5):
        job.seqs.setdefault(dead, 0)
        job.push(dead)
    clock = job.coordinator.membership.members[dead].clock
    for _ in range(3 * MAX_DEPARTED_COUNT):
        worker = job.recorder.do(Join(rank=None, host="h", pid=1, device="cpu"), job.now).worker
        job.recorder.do(Leave(worker, ""), job.now)
        job.recorder.tick(job.now)
    successor = job.recorder.do(Join(attempt=1, **join), job.now).worker
    job.recorder.do(Register(successor, MODEL), job.now)
    member = job.coordinator.membership.members[successor]

    assert job.coordinator.membership.departed.states[WorkerState.LEFT] > 0
    assert clock == 5
    assert (member.clock, member.rank, member.state) == (clock, 0, WorkerState.ACTIVE)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("ranked", [False, True])
def test_whether_all_workers_have_left_does_not_depend_on_dropped_records(
    lost: bool, ranked: bool
) -> None:
    def membership(keep: int) -> Membership:
        made = Membership(5.0)
        for number in range(6):
            member = made.join(0.0, number % 3 if ranked else None, "h", 1, "cpu")
            made.remove(
                member, WorkerState.LOST if lost and number in (0, 4) else WorkerState.LEFT, ""
            )
            made.forget_departed(keep)
        return made

    assert membership(keep=1).have_all_left == membership(keep=100).have_all_left == (not lost)


def test_a_lost_rank_that_returned_counts_as_left() -> None:
    membership = Membership(5.0)
    for state in (WorkerState.LOST, WorkerState.LEFT, WorkerState.LEFT):
        membership.remove(membership.join(0.0, 0, "h", 1, "cpu"), state, "")
        membership.forget_departed(1)

    assert membership.have_all_left


def test_a_resumed_run_counts_only_its_own_workers_as_finished() -> None:
    membership = Membership(5.0)

    def finish(count: int) -> None:
        for _ in range(count):
            member = membership.join(0.0, None, "h", 1, "cpu")
            member.steps = 1
            membership.remove(member, WorkerState.LEFT, "")

    finish(5)
    membership.forget_departed(3)
    assert (membership.departed.done_count, membership.departed.is_run_done(5)) == (5, True)
    membership.departed.begin_next_run(5)
    assert membership.departed.done_count == 0
    membership.forget_departed(1)
    assert membership.departed.done_count == 0
    finish(2)
    membership.forget_departed(0)
    assert (
        membership.departed.done_count,
        membership.departed.is_run_done(3),
        membership.departed.is_run_done(2),
    ) == (
        2,
        False,
        True,
    )


def test_worker_numbers_do_not_repeat_after_many_joins_and_a_rollback() -> None:
    """A snapshot names workers beyond the numbers of the start that resumes from it."""
    before = Membership(5.0)
    for _ in range(WORKERS_PER_GENERATION + 3):
        before.remove(before.join(0.0, None, "h", 1, "cpu"), WorkerState.LEFT, "")
        before.forget_departed(10)
    after = Membership(5.0, generation=1)
    after.restore(dict.fromkeys(before.members, 0))

    assert before.generation == 1
    assert after.join(0.0, None, "h", 1, "cpu").worker == WORKERS_PER_GENERATION + 4


def test_a_job_that_dropped_no_workers_has_the_state_of_earlier_releases() -> None:
    job = Job(policy("async"))
    join_and_leave(job, 5)

    assert job.coordinator.membership.state().keys() == {"next", "members", "here"}


def test_a_decided_push_of_a_recorded_worker_is_answered_after_others_are_dropped() -> None:
    shard = ShardMachine(0)
    shard.restore(1, 0, 0)
    push = Staged(PushKey(7, 1), 1, 0)
    shard.offer(push)
    shard.done(Apply(1, 1, (Contribution(push.key, 1, 0),)))
    for number in range(MAX_EVICTED_WORKERS + 10):
        shard.done(Evict(number + 2, 100 + number, "gone"))
    outcome = shard.outcome(push.key)

    assert outcome is not None
    assert outcome.status == "applied"
