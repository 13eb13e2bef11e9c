"""Invalid requests between valid ones are refused, and the job continues identically live, after a
restart and on a standby.
"""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import StreamSpec
from pscommon.core.errors import FencedError, InvalidRequestError, PSError
from pscommon.core.log_entries import Apply, BatchKey, PushKey, Reject, ShardReport, Staged
from psserver.core.commands.command import Command
from psserver.core.commands.data_commands import LeaseBatches, ReportMetrics, ReturnBatches
from psserver.core.commands.recorded import RecordedCommand
from psserver.core.commands.recorder import replay
from psserver.core.commands.shard_commands import StartReshard
from psserver.core.commands.worker_commands import DrainWorker
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.coordinator.registration import Registration
from psserver.core.job.policy import Policy, policy
from psserver.core.workers.members import Member
from tests.sim import invalid_requests as absurd
from tests.support.replayed_job import Job, full_state
from tests.support.shard_reports import report_to

LOOP = LoopSpec(0, size=9, batch_size=1, epochs=3)
STREAM = StreamSpec(1, sources=2, batch_size=3, epochs=2)
ROWS = (policy("sync"), policy("async"), policy("ssp", 1), policy("async", max_staleness=2))


@settings(max_examples=150)
@given(rng=st.randoms(use_true_random=False), job_policy=st.sampled_from(ROWS))
def test_invalid_requests_are_refused_and_a_replay_reaches_the_same_state(
    rng: random.Random, job_policy: Policy
) -> None:
    """Valid workers are served in between."""
    job = Job(job_policy)
    for _ in range(rng.randint(1, 40)):
        job.now += rng.random()
        try:
            if rng.random() < 0.5:
                absurd.send(job.recorder, rng, [*job.workers, 0, 999, 2**63 - 1], job.now)
            else:
                job.step(rng.choice(job.workers), rng.choice([LOOP, STREAM]))
        except PSError:
            pass

    absurd.encode(job.coordinator)
    assert full_state(job.replayed()) == full_state(job.coordinator)


@pytest.mark.full
@settings(max_examples=100)
@given(rng=st.randoms(use_true_random=False), job_policy=st.sampled_from(ROWS))
def test_commands_that_bypassed_the_checks_replay_to_the_same_state(
    rng: random.Random, job_policy: Policy
) -> None:
    """Logs of earlier releases hold such commands; some of them raised unexpected errors."""
    job = Job(job_policy)
    for _ in range(rng.randint(1, 25)):
        job.now += rng.random()
        command = absurd.request(rng, [*job.workers, 999], is_in_range=False)
        if isinstance(command, LeaseBatches):
            command = replace(
                command, count=min(command.count, 50)
            )  # larger counts would deal all batches
        job.book.write(command, job.now)
        replay(job.coordinator, [RecordedCommand(command, job.now)])

    assert full_state(job.replayed()) == full_state(job.coordinator)


class FaultyError(CoordinatorMachine):
    """Raises in the midst of a command, as a bug would."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        take_latest = self.reported.take_latest

        def take_and_raise(member: Member, name: str, value: float, *rest: Any) -> None:
            self.job.samples += 1
            take_latest(member, name, value, *rest)
            raise ZeroDivisionError("planted")

        self.reported.take_latest = take_and_raise  # type: ignore[method-assign]


def test_an_unexpected_error_leaves_the_same_state_live_and_after_replay() -> None:
    job = Job(policy("async"), kind=FaultyError)
    job.step(job.workers[0], LOOP)
    with pytest.raises(ZeroDivisionError):
        job.recorder.do(ReportMetrics(job.workers[0], {"loss": 1.0}), job.now)
    job.step(job.workers[1], LOOP)
    failed: list[str] = []
    again = job.made()
    replay(
        again,
        job.book.commands,
        lambda recorded, error: failed.append(f"{recorded.command.wire_name}: {error}"),
    )

    assert failed == ["report_metrics: planted"]
    assert full_state(again) == full_state(job.coordinator)
    assert again.job.version == 2


def test_a_memory_error_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends instead, so a replay does not contain the command."""
    job = Job(policy("async"))
    before = list(job.book.lines)

    def run_out_of_memory(self: Registration, worker: int) -> None:
        raise MemoryError

    monkeypatch.setattr(Registration, "drain", run_out_of_memory)
    with pytest.raises(MemoryError):
        job.recorder.do(DrainWorker(job.workers[0]), job.now)
    assert job.book.lines == before


def test_a_replay_refuses_a_command_of_a_newer_release() -> None:
    with pytest.raises(ValueError, match="does not know the command 'later'"):
        RecordedCommand.from_json({"do": "later", "now": 0.0})


# ---- single requests -----------------------------------------------------------------------------


def refusal_reason(job: Job, command: Command[Any]) -> str:
    """Return the reason of a refusal that changes nothing and is not recorded."""
    before, lines = full_state(job.coordinator), len(job.book.lines)
    with pytest.raises(InvalidRequestError) as caught:
        job.recorder.do(command, job.now)
    assert (full_state(job.coordinator), len(job.book.lines)) == (before, lines)
    return caught.value.reason


@pytest.mark.parametrize("end", [False, True])
def test_returned_batches_of_a_stream_without_epochs_are_refused(end: bool) -> None:
    job = Job(policy("async"))
    worker, empty = job.workers[0], StreamSpec(0, sources=2, batch_size=3, epochs=0)
    job.step(worker, empty)

    assert refusal_reason(job, ReturnBatches(worker, [BatchKey(0, 5, 3, end)])) == "OUT_OF_RANGE"


def test_returning_batches_outside_the_loop_is_refused() -> None:
    job = Job(policy("async"))
    job.step(job.workers[0], LOOP), job.step(job.workers[0], STREAM)
    for batch in (BatchKey(0, 27), BatchKey(0, 2**63 - 1), BatchKey(1, 0, 4)):
        assert refusal_reason(job, ReturnBatches(job.workers[0], [batch])) == "OUT_OF_RANGE"


UNFIT = {
    "a base above the version": {"base": 3},
    "a batch that the loop does not have": {"batches": (BatchKey(0, 27),)},
    "a batch of a stream without epochs": {"batches": (BatchKey(2, 0, 3, True),)},
    "more samples than a batch of the stream has": {"batches": (BatchKey(1, 0, 4),)},
}


@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.parametrize("job_policy", ROWS, ids=lambda job_policy: job_policy.name)
def test_an_invalid_push_is_rejected_before_anything_is_applied(
    name: str, job_policy: Policy
) -> None:
    """The worker keeps its membership, and its next push counts. A base above the version is stale:
    a correct worker may have pulled it from a shard that then rolled back.
    """
    job = Job(job_policy)
    first, second = job.workers
    for spec in (LOOP, StreamSpec(2, 2, 3, epochs=0)):
        job.recorder.do(
            LeaseBatches(worker=first, spec=spec, received=0, count=1, idle=False), job.now
        )
    job.step(first, STREAM), job.step(second, STREAM)
    version = job.coordinator.job.version
    push = Staged(PushKey(first, 2), **{"samples": 1, "base": version, **UNFIT[name]})  # type: ignore[arg-type]
    job.report(push)
    rejected = [entry for entry in job.coordinator.log.after(0) if isinstance(entry, Reject)]

    reason = "STALE" if "base" in UNFIT[name] else "INVALID_REQUEST"
    assert [(entry.key, entry.reason) for entry in rejected] == [(push.key, reason)]
    assert job.coordinator.job.version == version
    assert full_state(job.replayed()) == full_state(job.coordinator)
    job.seqs[first] = 2
    job.push(first), job.push(second)
    assert job.coordinator.job.version > version


def test_an_invalid_push_during_a_reshard_is_rejected_after_it() -> None:
    """A shard that holds its new partition takes pushes before the reshard ends."""
    job = Job(policy("async"), workers=1)
    (worker,) = job.workers
    job.recorder.do(StartReshard(1, False), job.now)
    push = Staged(PushKey(worker, 1), 1, 10**6)
    index = job.coordinator.log.index
    report_to(job.recorder, ShardReport(0, 5, index, (push,), is_resharding=True), job.now)
    assert job.coordinator.job.reshard is not None
    report_to(job.recorder, ShardReport(0, 5, index, (push,)), job.now)
    report_to(job.recorder, ShardReport(0, 5, index, (push,)), job.now)
    entries = job.coordinator.log.after(index)

    assert job.coordinator.job.reshard is None
    assert [type(entry) for entry in entries] == [Reject]
    assert full_state(job.replayed()) == full_state(job.coordinator)


def test_a_push_of_a_departed_worker_is_fenced_whatever_its_base() -> None:
    """After a rollback the bases of old workers are above the version."""
    job = Job(policy("async"))
    job.report(Staged(PushKey(77, 3), 1, base=100))

    assert not any(isinstance(entry, Reject) for entry in job.coordinator.log.after(0))
    with pytest.raises(FencedError):
        job.recorder.do(ReturnBatches(77, []), job.now)


def test_a_worker_removed_during_a_round_does_not_apply_the_round_twice() -> None:
    """Its gradient was clipped once too often; the other push of the round is decided already."""
    job = Job(policy("sync"), workers=2, bad_gradients="clip", max_norm=1.0, quarantine_after=1)
    first, second = job.workers
    job.report(Staged(PushKey(first, 1), 1, 0, square_norm=100.0))
    job.report(Staged(PushKey(second, 1), 1, 0, square_norm=0.1))
    applied = [entry for entry in job.coordinator.log.after(0) if isinstance(entry, Apply)]

    assert [[part.key for part in entry.contributions] for entry in applied] == [
        [PushKey(first, 1), PushKey(second, 1)]
    ]
    assert not job.coordinator.membership.members[first].is_current
