"""Batches that a worker has only evaluated count without a push, when the worker reports them."""

import json

from pscommon.core.data_loop import LoopSpec
from pscommon.core.log_entries import BatchKey
from pscommon.core.script_place import PassName, ScriptPlace
from psserver.coordinator.worker_handlers import never_begun
from psserver.core.commands.data_commands import LeaseBatches, ReturnBatches
from psserver.core.commands.recorded import RecordedCommand
from psserver.core.coordinator.data_requests import BatchesReply
from tests.support.coordinator_job import Job


def test_evaluated_batches_count_and_are_dealt_to_no_other_worker() -> None:
    job, two = Job(workers=2), LoopSpec(0, size=2, batch_size=1)
    assert job.ask(1, loop=two) == BatchesReply((0,))
    assert job.ask(2, loop=two) == BatchesReply((1,))
    loop = job.coordinator.ledger.loops[0]

    job.recorder.do(ReturnBatches(worker=1, batches=[BatchKey(0, 0)], used=True), job.now)
    assert (loop.committed, loop.dropped, loop.ended) == (1, 1, False)
    assert job.ask(1, received=1, idle=True, loop=two) is None
    job.recorder.do(ReturnBatches(worker=2, batches=[BatchKey(0, 1)], used=True), job.now)

    assert (loop.committed, loop.dropped, loop.ended) == (2, 2, True)
    assert job.ask(1, received=1, idle=True, loop=two) == BatchesReply(end=True)
    job.coordinator.registration.leave(1, "", job.now)
    assert (loop.committed, len(loop.leases)) == (2, 0)


def test_a_pass_that_another_worker_has_completed_was_never_begun() -> None:
    """The other worker need not have gone on to another pass yet."""
    job, two = Job(workers=2), LoopSpec(0, size=2, batch_size=1)
    name = PassName("test", 0)
    place = ScriptPlace(name, {"test": 0}, 0, 0)

    def ask(received: int, idle: bool) -> BatchesReply | None:
        command = LeaseBatches(1, two, received, 1, idle, place=place)
        return job.recorder.do(command, job.now)

    first = ask(0, idle=False)
    assert first is not None
    assert first.numbers == (0,)
    assert never_begun(job.coordinator.ledger, 2) == {}
    rest = ask(1, idle=True)
    assert rest is not None
    assert rest.end

    assert never_begun(job.coordinator.ledger, 2) == {name: 1}
    assert never_begun(job.coordinator.ledger, 1) == {}


def test_a_worker_completes_only_its_own_batches() -> None:
    job, two = Job(workers=2), LoopSpec(0, size=2, batch_size=1)
    job.ask(1, loop=two)

    job.recorder.do(
        ReturnBatches(worker=2, batches=[BatchKey(0, 0), BatchKey(7, 0)], used=True), job.now
    )

    assert job.coordinator.ledger.loops[0].committed == 0


def test_completed_batches_are_replayed_and_other_returns_keep_their_format() -> None:
    used = RecordedCommand(ReturnBatches(worker=1, batches=[BatchKey(0, 0)], used=True), 1.0)
    free = RecordedCommand(ReturnBatches(1, [BatchKey(0, 0)]), 1.0)

    assert RecordedCommand.from_json(json.loads(json.dumps(used.as_json()))) == used
    assert "used" not in free.as_json()
