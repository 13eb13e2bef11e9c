"""The executor carries out the consequences of a request, however the request ends."""

from collections.abc import Callable, Sequence
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pscommon.core.errors import FencedError, PSError
from pscommon.core.log_entries import BatchKey, PushKey, ShardReport, Staged
from psserver.coordinator.executor import CommandExecutor
from psserver.core.commands.data_commands import LeaseBatches, ReturnBatches
from psserver.core.commands.recorder import Recorder
from psserver.core.commands.worker_commands import Leave
from psserver.core.job.policy import policy
from psserver.waiting import ThreadWaiter, run
from tests.support.coordinator_job import LOOP, Job
from tests.support.shard_reports import report_to
from tests.support.workers import until


class RecordingFollower:
    """Replace the engine: record what it receives. fails: every delivery raises."""

    def __init__(self) -> None:
        self.entries: list[object] = []
        self.fails = False

    def deliver(self, log_id: int, entries: list[object]) -> None:
        if self.fails:
            raise MemoryError("no room")
        self.entries += entries


class EntryLog(SimpleNamespace):
    """Replace the coordinator's log."""

    def __init__(self) -> None:
        super().__init__(index=0, entries=[])

    def append(self, entry: object) -> None:
        self.entries.append(entry)
        self.index += 1

    def after(self, index: int) -> list[object]:
        return self.entries[index:]


def coordinator() -> SimpleNamespace:
    """Return a coordinator that is a log alone."""
    membership = SimpleNamespace(index=SimpleNamespace(answered=set()), members={})
    job, ledger = SimpleNamespace(log_id=7, failure=None), SimpleNamespace(news=0)
    return SimpleNamespace(log=EntryLog(), job=job, membership=membership, ledger=ledger)


@pytest.fixture
def follower() -> RecordingFollower:
    return RecordingFollower()


@pytest.fixture
def broken() -> list[Exception]:
    return []


@pytest.fixture
def failures() -> list[PSError]:
    return []


@pytest.fixture
def executor(
    follower: RecordingFollower, failures: list[PSError], broken: list[Exception]
) -> CommandExecutor:
    recorder = cast(Recorder, SimpleNamespace(coordinator=coordinator()))
    return CommandExecutor(
        recorder, cast(Any, follower), lambda: "", lambda: False, failures.append, broken.append
    )


def append(executor: CommandExecutor, entry: object, error: Exception | None = None) -> None:
    with executor.step() as (recorder, _):
        cast(Any, recorder.coordinator).log.append(entry)
        if error is not None:
            raise error


def test_entries_of_a_refused_request_are_delivered(
    executor: CommandExecutor, follower: RecordingFollower
) -> None:
    """A snapshot was due, for example, or the request ended the membership of its worker."""
    with pytest.raises(FencedError):
        append(executor, "first", FencedError("out"))
    append(executor, "second")

    assert follower.entries == ["first", "second"]


def test_the_end_of_the_job_is_reported_although_the_request_is_refused(
    executor: CommandExecutor, failures: list[PSError]
) -> None:
    cast(Any, executor.coordinator).job.failure = why = PSError("abort")

    with pytest.raises(FencedError):
        append(executor, "entry", FencedError("out"))

    assert failures == [why]


def test_a_shard_that_cannot_apply_entries_ends_its_process(
    executor: CommandExecutor, follower: RecordingFollower, broken: list[Exception]
) -> None:
    follower.fails = True

    with pytest.raises(MemoryError):
        append(executor, "entry")

    assert [str(bug) for bug in broken] == ["no room"]


def test_a_memory_error_ends_the_server_without_a_delivery(
    executor: CommandExecutor, follower: RecordingFollower, broken: list[Exception]
) -> None:
    """The command is not recorded, so a restart does not contain it."""
    with pytest.raises(MemoryError):
        append(executor, "half done", MemoryError("no room"))

    assert [type(error) for error in broken] == [MemoryError]
    assert follower.entries == []


def test_an_unexpected_error_is_reported_and_its_decisions_are_carried_out(
    executor: CommandExecutor, follower: RecordingFollower, broken: list[Exception]
) -> None:
    """A restart and a standby do the same."""
    with pytest.raises(ZeroDivisionError):
        append(executor, "decided", ZeroDivisionError("planted"))

    assert follower.entries == ["decided"]
    assert broken == []


class WaitingJob:
    """An asynchronous job of four batches and four workers, of which the last three wait for data.

    asked: how often they have asked.
    replies: what they got, by worker.
    """

    def __init__(self, broken: list[Exception]) -> None:
        self.job = Job(workers=4, job_policy=policy("async"))
        engine = SimpleNamespace(deliver=lambda log_id, entries: None)
        self.executor = CommandExecutor(
            self.job.recorder, cast(Any, engine), lambda: "", lambda: False, print, broken.append
        )
        for worker in range(1, 5):
            self.job.ask(worker)
        self.asked, self.replies = 0, dict[int, Any]()
        self._threads = [Thread(target=self._wait, args=(worker,)) for worker in (2, 3, 4)]
        for worker in (2, 3, 4):
            self.push(worker, 1, batches=[worker - 1])
        for thread in self._threads:
            thread.start()
        until(lambda: len(self.executor._registrations.keys) == 3, "three waiting requests")
        self.asked = 0

    def _wait(self, worker: int) -> None:
        def ask(recorder: Recorder, now: float) -> Any:
            self.asked += 1
            return recorder.do(LeaseBatches(worker, LOOP, 1, 1, True), now)

        self.replies[worker] = run(self.executor.until(ask, 20.0, ThreadWaiter(), worker=worker))

    def push(self, worker: int, seq: int, batches: Sequence[int] = ()) -> None:
        keys = tuple(BatchKey(0, number) for number in batches)
        version = self.executor.coordinator.job.version
        report = ShardReport(0, 0, 0, (Staged(PushKey(worker, seq), 8, version, keys),))
        with self.executor.step(quiet=True) as (recorder, now):
            report_to(recorder, report, now)
        assert self.executor.coordinator.job.version == version + 1

    def end(self) -> None:
        """Count the last batch: the data have ended for all."""
        self.push(1, 1000, batches=[0])
        self.join()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(10.0)
        assert not self.executor._registrations.keys


def test_a_push_wakes_no_worker_that_waits_for_data(broken: list[Exception]) -> None:
    """The end of the data wakes all of them."""
    waiting = WaitingJob(broken)
    for seq in range(1, 101):
        waiting.push(1, seq)

    assert waiting.asked == 0
    waiting.end()
    assert [reply.end for reply in waiting.replies.values()] == [True] * 3
    assert broken == []


def test_neither_time_nor_requests_of_others_wake_a_worker_that_waits_for_data(
    broken: list[Exception],
) -> None:
    waiting = WaitingJob(broken)
    executor, new = waiting.executor, waiting.job.add()
    ask = LeaseBatches(new, LOOP, 0, 1, idle=False)
    for _ in range(100):
        with executor.step(quiet=True) as (recorder, _):
            recorder.tick(0.1)
        assert run(
            executor.until(
                lambda recorder, now: recorder.do(ask, now), 0.0, ThreadWaiter(), worker=new
            )
        )

    assert waiting.asked == 0
    waiting.end()


def give_back(job: WaitingJob) -> None:
    job.executor.do(ReturnBatches(1, [BatchKey(0, 0)]), quiet=True)


def leave(job: WaitingJob) -> None:
    job.executor.do(Leave(1, ""), quiet=True)


@pytest.mark.parametrize("free", [give_back, leave])
def test_a_free_batch_wakes_the_workers_that_wait_for_data(
    broken: list[Exception], free: Callable[[WaitingJob], None]
) -> None:
    waiting = WaitingJob(broken)

    free(waiting)

    until(lambda: waiting.replies, "an answer")
    ((worker, reply),) = waiting.replies.items()
    assert reply.numbers == (0,)
    waiting.push(worker, 1000, batches=[0])
    waiting.join()
    assert broken == []
