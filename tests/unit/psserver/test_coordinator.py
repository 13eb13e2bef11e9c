"""The coordinator's state machine, request by request; tests/sim has histories with faults."""

import pytest

from pscommon.core.data_loop import LoopSpec
from pscommon.core.errors import FencedError, MismatchError
from pscommon.core.log_entries import Apply, Begin, Cut, Evict, PushKey, Reject, ShardReport, Staged
from pscommon.core.model_spec import ModelSpec, TensorSpec
from psserver.core.commands.data_commands import ReportMetrics
from psserver.core.commands.waiting import waiting_for
from psserver.core.coordinator.data_requests import BatchesReply
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules
from psserver.core.job.snapshot_schedule import SnapshotInterval
from psserver.core.shard.state_machine import GIVEN_UP
from psserver.core.workers.members import WorkerState
from tests.support.coordinator_job import MODEL, Job

OTHER = ModelSpec((TensorSpec("w", (2,), "float32"),), MODEL.optimizer)


def test_the_first_worker_to_register_uploads_and_the_others_wait() -> None:
    coordinator = CoordinatorMachine(2, JobRules(policy("sync"), 2))
    first, second = (
        coordinator.membership.join(0.0, None, "host", 1, "cpu").worker for _ in range(2)
    )

    assert coordinator.registration.register(first, MODEL, 0.0) == "upload"
    assert coordinator.registration.register(second, MODEL, 0.0) == "pending"
    upload = Staged(PushKey(first, 0), 1, 0)
    coordinator.reports.process(ShardReport(0, 0, 0, (upload,)), 0.0)
    assert coordinator.registration.register(second, MODEL, 0.0) == "pending"
    coordinator.reports.process(ShardReport(1, 0, 0, (upload,)), 0.0)

    assert coordinator.registration.register(second, MODEL, 0.0) == "ready"
    assert coordinator.log.after(0) == [Begin(1, first)]


def test_another_worker_uploads_when_the_uploader_leaves() -> None:
    coordinator = CoordinatorMachine(1, JobRules(policy("sync"), 1))
    first, second = (
        coordinator.membership.join(0.0, None, "host", 1, "cpu").worker for _ in range(2)
    )
    coordinator.registration.register(first, OTHER, 0.0)
    coordinator.registration.leave(first, "died", 0.0)

    assert coordinator.registration.register(second, MODEL, 0.0) == "upload"


def test_a_different_model_is_refused_with_the_difference() -> None:
    job = Job(workers=1)
    worker = job.coordinator.membership.join(0.0, None, "host", 1, "cpu").worker

    with pytest.raises(
        MismatchError, match=r"w: float32\[2\] trainable, the job has float32\[1\]"
    ) as caught:
        job.coordinator.registration.register(worker, OTHER, 0.0)
    assert caught.value.reason == "MODEL_MISMATCH"


def test_a_push_counts_once_all_shards_hold_it() -> None:
    job = Job(policy("async"), workers=1, shards=3)
    job.news()

    for shard in (2, 0, 0):
        job.push(1, 1, shards=[shard])
        assert job.applied() == []
    job.push(1, 1, shards=[1])
    job.report(2)
    assert job.applied() == [[1]]


def test_only_the_first_round_waits_for_min_workers() -> None:
    job = Job(policy("async"), workers=2)
    coordinator = CoordinatorMachine(1, JobRules(policy("async"), 2))
    job.lead(coordinator)
    first = job.add()
    job.push(first, 1)
    assert job.applied() == []
    assert waiting_for(coordinator, 0.0) == "workers: 1 of --min-workers 2 are here"

    second = job.add()
    assert job.applied() == [[first]]
    coordinator.registration.leave(second, "", 0.0)
    job.push(first, 2)
    assert job.applied() == [[first]]


def test_a_round_closes_when_the_awaited_worker_leaves_or_is_lost() -> None:
    job = Job(workers=3)
    job.push(1, 1)
    job.push(3, 1)
    assert job.applied() == []
    assert "worker 2" in waiting_for(job.coordinator, 0.0)

    job.coordinator.registration.leave(2, "", 0.0)
    assert job.applied() == [[1, 3]]
    job.push(1, 2)
    job.now = 4.0
    job.coordinator.job.member(1, 4.0)
    for second in (4.5, 5.0, 5.5):
        lost = job.recorder.tick(second)
    assert [m.worker for m in lost] == [3]
    assert job.applied() == [[1]]


def test_a_lost_worker_is_removed_with_its_push() -> None:
    job = Job(workers=2)
    job.push(2, 1)
    job.coordinator.job.member(1, 4.0)
    for second in (4.5, 5.0, 5.5):
        job.recorder.tick(second)

    assert [entry.worker for entry in job.news() if isinstance(entry, Evict)] == [2]
    with pytest.raises(FencedError, match="worker 2 ") as caught:
        job.coordinator.job.member(2, 6.0)
    assert caught.value.reason == "FENCED"
    job.push(1, 1)
    assert job.applied() == [[1]]


def test_moving_bytes_renew_a_lease_from_the_time_they_moved() -> None:
    """The time of the report does not count, and a later report of older bytes shortens nothing."""
    job = Job(workers=2)
    job.coordinator.job.member(1, 4.0)
    job.coordinator.membership.leases.renew_by_transfers({2: 3.5, 99: 0.0}, 4.0)
    job.coordinator.membership.leases.renew_by_transfers({2: 4.0}, 4.25)
    for second in (4.5, 5.0, 5.4):
        job.recorder.tick(second)
    assert not [entry for entry in job.news() if isinstance(entry, Evict)]

    job.recorder.tick(5.6)
    assert [entry.worker for entry in job.news() if isinstance(entry, Evict)] == [2]


def test_a_suspended_coordinator_process_ends_no_lease() -> None:
    job = Job(workers=2)
    job.recorder.tick(1.0)

    assert job.recorder.tick(1000.0) == []


def test_a_push_of_an_unknown_worker_is_fenced_once() -> None:
    job = Job(workers=1)
    job.news()
    job.push(77, 1)
    job.report(0)

    assert [entry.worker for entry in job.news() if isinstance(entry, Evict)] == [77]


def test_stale_pushes_are_rejected_as_soon_as_they_are_too_old() -> None:
    job = Job(policy("async", max_staleness=1), workers=2)
    job.news()
    for seq in (1, 2):
        job.push(1, seq, base=seq - 1)
    job.push(2, 1, base=1)
    job.push(2, 2, base=0)

    entries = job.news()
    assert [type(entry) for entry in entries] == [Apply, Apply, Apply, Reject]
    assert isinstance(entries[-1], Reject)
    assert (entries[-1].key, entries[-1].reason) == (PushKey(2, 2), "STALE")
    assert job.coordinator.job.counts == {"applied": 3, "stale": 1, "rejected": 0}


def test_a_faulty_push_is_rejected_and_the_round_keeps_waiting() -> None:
    job = Job(bad_gradients="skip")
    job.news()
    job.push(1, 1)
    job.push(2, 1, problem="NON_FINITE: tensor w")

    entries = job.news()
    assert [type(entry) for entry in entries] == [Reject]
    assert isinstance(entries[0], Reject)
    assert (
        entries[0].reason,
        "tensor w" in entries[0].detail,
        "worker 2" in entries[0].detail,
    ) == (
        "NON_FINITE",
        True,
        True,
    )
    job.push(2, 2)
    assert job.applied() == [[1, 2]]


def test_batches_count_with_their_push_and_the_loop_ends_for_all_workers() -> None:
    job = Job(workers=2)
    numbers = {1: [0, 2], 2: [1, 3]}
    for step in (0, 1):
        for worker in (1, 2):
            assert job.ask(worker, step) == BatchesReply((numbers[worker][step],))
        for worker in (1, 2):
            job.push(worker, step + 1, batches=[numbers[worker][step]])

    assert job.ask(1, 2) == BatchesReply()
    assert job.ask(1, 2, idle=True) == BatchesReply(end=True)
    assert job.ask(2, 2) == BatchesReply(end=True)


def test_with_backup_workers_only_a_requesting_worker_gets_batches() -> None:
    """Otherwise the batches of a slow worker would pile up, and the others wait for it at
    the end.
    """
    job = Job(policy("sync", backup=1), workers=2)

    assert [job.ask(1, received) for received in range(3)] == [
        BatchesReply((number,)) for number in range(3)
    ]
    assert job.ask(2) == BatchesReply((3,))


def test_a_worker_without_data_waits_for_batches_that_others_may_return() -> None:
    job, three = Job(workers=2), LoopSpec(0, size=3, batch_size=1)
    for worker in (1, 2):
        assert job.ask(worker, loop=three) == BatchesReply((worker - 1,))
    for worker in (1, 2):
        job.push(worker, 1, batches=[worker - 1])
    assert job.ask(1, 1, loop=three) == BatchesReply((2,))
    assert job.ask(2, 1, idle=True, loop=three) is None
    job.coordinator.registration.leave(1, "died", 0.0)

    assert job.ask(2, 1, idle=True, loop=three) == BatchesReply((2,))
    assert job.coordinator.membership.members[2].state is WorkerState.ACTIVE


def test_idle_workers_delay_no_round() -> None:
    job = Job(workers=2)
    one = LoopSpec(0, size=1, batch_size=1)
    assert job.ask(1, loop=one) == BatchesReply((0,))
    assert job.ask(2, loop=one, idle=True) is None
    assert job.coordinator.membership.members[2].state is WorkerState.IDLE
    job.news()

    job.push(1, 1, batches=[0])
    assert job.applied() == [[1]]
    assert job.ask(2, loop=one, idle=True) == BatchesReply(end=True)
    assert job.coordinator.membership.members[2].state is WorkerState.ACTIVE


def test_a_differing_loop_description_is_an_error_that_names_the_difference() -> None:
    job = Job(workers=2)
    job.ask(1)

    with pytest.raises(
        MismatchError, match=r"^loop 1 .* of the job: size is 5 here and \d+ there\. Try: "
    ):
        job.ask(2, loop=LoopSpec(0, size=5, batch_size=1))


def test_a_reported_metric_is_taken_from_the_lowest_rank() -> None:
    job = Job(workers=2)
    job.recorder.do(ReportMetrics(2, {"loss": 2.0, "only": 5.0}), 0.0)
    job.recorder.do(ReportMetrics(1, {"loss": 1.0}), 0.0)
    job.recorder.do(ReportMetrics(2, {"loss": 3.0}), 0.0)

    assert {name: value for name, (_, value) in job.coordinator.reported.latest.items()} == {
        "loss": 1.0,
        "only": 5.0,
    }


def test_the_log_retains_entries_until_every_shard_has_applied_them() -> None:
    job = Job(policy("async"), workers=1, shards=2)
    job.push(1, 1)
    job.report(0, index=2)
    assert [entry.index for entry in job.coordinator.log.after(0)] == [1, 2]

    job.report(1, index=1)
    assert [entry.index for entry in job.coordinator.log.after(0)] == [2]
    assert job.coordinator.log.base == 1


def test_a_restored_snapshot_continues_with_its_data_and_remembers_pushes() -> None:
    job = Job(workers=1, every=SnapshotInterval(steps=1))
    job.ask(1)
    job.push(1, 1, batches=[0])
    cutting = job.coordinator.cuts.cutting
    assert [type(entry) for entry in job.news()] == [Begin, Apply, Cut]
    assert cutting is not None

    again = Job(workers=0)
    again.lead(CoordinatorMachine(1, JobRules(policy("sync"), 1), generation=1))
    again.coordinator.restore(cutting.state, MODEL, 0.0)
    worker = again.add()

    assert (again.coordinator.job.version, again.coordinator.job.samples) == (1, 8)
    assert again.ask(worker) == BatchesReply((1,))
    with pytest.raises(FencedError):
        again.coordinator.job.member(1, 0.0)


def test_a_late_data_request_changes_nothing() -> None:
    job = Job(policy("async"), workers=1)
    assert job.ask(1, received=0) == BatchesReply((0,))
    assert job.ask(1, received=1) == BatchesReply((1,))

    assert job.ask(1, received=0) == BatchesReply()
    assert job.ask(1, received=2) == BatchesReply((2,))


def test_a_worker_that_registers_after_its_successor_is_refused() -> None:
    """The worker died while its request was under way; a round would wait for it."""
    coordinator = CoordinatorMachine(1, JobRules(policy("sync"), 1, 5.0, SnapshotInterval()))
    old = coordinator.membership.join(0.0, 0, "host", 1, "cpu", attempt=0).worker
    new = coordinator.membership.join(0.0, 0, "host", 2, "cpu", attempt=1).worker
    coordinator.registration.register(new, MODEL, 0.0)
    coordinator.reports.process(ShardReport(0, 0, 0, (Staged(PushKey(new, 0), 1, 0),)), 0.0)
    coordinator.registration.register(new, MODEL, 0.0)

    with pytest.raises(FencedError):
        coordinator.registration.register(old, MODEL, 0.0)
    assert [member.worker for member in coordinator.membership.registered()] == [new]


def test_an_abandoned_partial_push_is_refused_and_releases_its_memory() -> None:
    """The next push may reach either the shard that has the part or the other one."""
    job = Job(workers=1, shards=2)
    job.push(1, 1, shards=[0])
    job.push(1, 2, shards=[1])
    job.news()
    assert Reject(2, PushKey(1, 1), "STALE", GIVEN_UP) in job.coordinator.log.after(0)

    job.push(1, 2, shards=[0])
    assert job.applied() == [[1]]
    job.push(1, 3)
    assert job.applied() == [[1]]


def test_a_push_on_all_shards_counts_although_its_worker_continues() -> None:
    job = Job(workers=2)
    job.push(1, 1)
    job.push(1, 2)
    job.push(2, 1)
    job.push(2, 2)

    assert job.applied() == [[1, 2], [1, 2]]


def test_no_push_counts_once_the_job_has_failed() -> None:
    job = Job(policy("async"))
    job.push(1, 1)
    assert job.applied() == [[1]]

    job.push(1, 2, problem="NON_FINITE: tensor w")
    job.push(2, 1)

    assert job.applied() == []
    assert job.coordinator.job.failure is not None
