"""The executor carries out the consequences of a request, however the request ends."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pscommon.core.errors import FencedError, PSError
from pscommon.core.log_entries import BatchKey, PushKey, ShardReport, Staged
from psserver.coordinator.executor import CHECK_INTERVAL_SECONDS, CommandExecutor
from psserver.core.commands.data_commands import LeaseBatches
from psserver.core.commands.recorder import Recorder
from psserver.core.job.policy import policy
from tests.support.coordinator_job import LOOP, Job
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
    """Replace the coordinator by a log alone."""

    def __init__(self) -> None:
        membership = SimpleNamespace(index=SimpleNamespace(answered=set()), members={})
        log = SimpleNamespace(index=0)
        super().__init__(log=log, entries=[], log_id=7, failure=None, membership=membership)

    def append(self, entry: object) -> None:
        self.entries.append(entry)
        self.log.index += 1

    def entries_after(self, index: int) -> list[object]:
        return self.entries[index:]


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
    recorder = cast(Recorder, SimpleNamespace(coordinator=EntryLog()))
    return CommandExecutor(
        recorder, cast(Any, follower), lambda: "", lambda: False, failures.append, broken.append
    )


def appending(entry: object, error: Exception | None = None) -> Callable[[Recorder, float], str]:
    def action(recorder: Recorder, now: float) -> str:
        cast(Any, recorder.coordinator).append(entry)
        if error is not None:
            raise error
        return "done"

    return action


def test_entries_of_a_refused_request_are_delivered(
    executor: CommandExecutor, follower: RecordingFollower
) -> None:
    """A snapshot was due, for example, or the request ended the membership of its worker."""
    with pytest.raises(FencedError):
        executor.step(appending("first", FencedError("out")))
    executor.step(appending("second"))

    assert follower.entries == ["first", "second"]


def test_the_end_of_the_job_is_reported_although_the_request_is_refused(
    executor: CommandExecutor, failures: list[PSError]
) -> None:
    cast(Any, executor.coordinator).failure = why = PSError("abort")

    with pytest.raises(FencedError):
        executor.step(appending("entry", FencedError("out")))

    assert failures == [why]


def test_a_shard_that_cannot_apply_entries_ends_its_process(
    executor: CommandExecutor, follower: RecordingFollower, broken: list[Exception]
) -> None:
    follower.fails = True

    with pytest.raises(MemoryError):
        executor.step(appending("entry"))

    assert [str(bug) for bug in broken] == ["no room"]


def test_a_memory_error_ends_the_server_without_a_delivery(
    executor: CommandExecutor, follower: RecordingFollower, broken: list[Exception]
) -> None:
    """The command is not recorded, so a restart does not contain it."""
    with pytest.raises(MemoryError):
        executor.step(appending("half done", MemoryError("no room")))

    assert [type(error) for error in broken] == [MemoryError]
    assert follower.entries == []


def test_an_unexpected_error_is_reported_and_its_decisions_are_carried_out(
    executor: CommandExecutor, follower: RecordingFollower, broken: list[Exception]
) -> None:
    """A restart and a standby do the same."""
    with pytest.raises(ZeroDivisionError):
        executor.step(appending("decided", ZeroDivisionError("planted")))

    assert follower.entries == ["decided"]
    assert broken == []


def test_a_push_wakes_no_worker_that_waits_for_data(broken: list[Exception]) -> None:
    """The end of the data wakes all of them."""
    job = Job(workers=4, row=policy("async"))
    engine = SimpleNamespace(deliver=lambda log_id, entries: None)
    executor = CommandExecutor(
        job.recorder, cast(Any, engine), lambda: "", lambda: False, print, broken.append
    )
    for worker in range(1, 5):
        job.ask(worker)
    asked, replies = [0], list[Any]()

    def ask(recorder: Recorder, now: float) -> Any:
        worker = waiting[threading.current_thread().name]
        asked[0] += 1
        return recorder.do(LeaseBatches(worker, LOOP, 1, 1, True), now)

    def wait(worker: int) -> None:
        replies.append(executor.until(ask, 20.0, worker=worker))

    waiting = {f"waits-{worker}": worker for worker in (2, 3, 4)}
    for worker in (2, 3, 4):
        push(executor, job, worker, 1, batches=[worker - 1])
    threads = [
        threading.Thread(target=wait, args=(worker,), name=name) for name, worker in waiting.items()
    ]
    for thread in threads:
        thread.start()
    until(lambda: len(executor._wakeups.keys) == 3, "three waiting requests")
    began, before = time.monotonic(), asked[0]
    for seq in range(1, 101):
        push(executor, job, 1, seq)
    rechecks = 3 * ((time.monotonic() - began) / CHECK_INTERVAL_SECONDS + 1)

    assert asked[0] - before <= rechecks
    push(executor, job, 1, 101, batches=[0])
    for thread in threads:
        thread.join(10.0)
    assert [reply.end for reply in replies] == [True] * 3
    assert not executor._wakeups.keys
    assert broken == []


def push(executor: CommandExecutor, job: Job, worker: int, seq: int, batches: Any = ()) -> None:
    keys = tuple(BatchKey(0, number) for number in batches)
    version = executor.coordinator.version
    report = ShardReport(0, 0, 0, (Staged(PushKey(worker, seq), 8, version, keys),))
    executor.step(lambda recorder, now: recorder.report(report, now), quiet=True)
    assert executor.coordinator.version == version + 1
