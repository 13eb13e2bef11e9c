"""Collective calls on the coordinator: who is waited for, what the result is, and how long it is
kept.
"""

import json
import math
import random
from typing import Any

import pytest

from pscommon.core.errors import InvalidRequestError, MismatchError
from pscommon.core.log_entries import BatchKey
from psserver.core.commands.data_commands import CallCollective, ReturnBatches
from psserver.core.commands.recorder import Recorder, replay
from psserver.core.commands.waiting import waiting_for_call
from psserver.core.commands.worker_commands import Join, Leave, Lose
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules
from psserver.core.workers import collectives
from psserver.core.workers.collectives import NUMBERED, CallKey, CollectiveValues
from tests.support.coordinator_job import MODEL, Job
from tests.support.memory_journal import MemoryJournal

BARRIER = CollectiveValues("barrier")


def mean(samples: int = 1, **values: float) -> CollectiveValues:
    return CollectiveValues("all_reduce", tuple(values), tuple(values.values()), samples)


def value(content: Any) -> CollectiveValues:
    return CollectiveValues("broadcast", text=json.dumps(content))


def call(
    job: Job, worker: int, number: int, given: CollectiveValues = BARRIER, first_open: int = 0
) -> CollectiveValues | None:
    return job.recorder.do(CallCollective(worker, number, given, first_open), job.now)


def test_a_call_waits_for_all_members() -> None:
    job = Job(workers=3)

    assert call(job, 1, 1) is None
    assert call(job, 2, 1) is None
    assert call(job, 3, 1) == CollectiveValues("barrier", samples=0)
    assert call(job, 1, 1) == call(job, 2, 1) == CollectiveValues("barrier", samples=0)


def test_all_reduce_is_the_mean_by_samples_in_worker_order() -> None:
    numbers = {1: 0.1, 2: 1e17, 3: -1e17}
    results = set()
    for order in ([1, 2, 3], [3, 1, 2], [2, 3, 1]):
        job = Job(workers=3)
        for worker in order:
            result = call(job, worker, 1, mean(worker, loss=numbers[worker]))
        assert result is not None
        results.add(result.values)

    assert results == {(0.1 * (1 / 6) + 1e17 * (2 / 6) + -1e17 * (3 / 6),)}


def test_values_without_samples_do_not_count() -> None:
    job = Job(workers=2)

    call(job, 1, 1, mean(0, loss=math.inf))
    result = call(job, 2, 1, mean(4, loss=3.0))
    assert result is not None
    assert result.values == (3.0,)

    call(job, 1, 2, mean(0, loss=1.0))
    result = call(job, 2, 2, mean(0, loss=3.0))
    assert result is not None
    assert math.isnan(result.values[0])


def test_a_broadcast_waits_only_for_workers_before_the_first_value() -> None:
    job = Job(workers=3)

    assert call(job, 2, 1, value([2])) is None
    assert call(job, 1, 1, value(None)) == CollectiveValues("broadcast", samples=0, text="[2]")
    assert call(job, 3, 1, value([3])) == CollectiveValues("broadcast", samples=0, text="[2]")


def test_a_broadcast_without_a_value_gives_none_to_all() -> None:
    job = Job(workers=2)

    assert call(job, 1, 1, value(None)) is None
    assert call(job, 2, 1, value(None)) == CollectiveValues("broadcast", samples=0)


@pytest.mark.parametrize("command", [Leave(2, ""), Lose(2, "its lease ended")])
def test_a_departed_worker_releases_the_others(command: Any) -> None:
    """Its own values do not count: a worker that replaces it would bring them again."""
    job = Job(workers=3)
    for worker, number in ((1, 1.0), (2, 5.0)):
        call(job, worker, 1, mean(loss=number))
    call(job, 1, 1, mean(loss=1.0))

    job.recorder.do(command, job.now)
    assert call(job, 1, 1, mean(loss=1.0)) is None
    job.recorder.do(Leave(3, ""), job.now)

    assert call(job, 1, 1, mean(loss=1.0)) == CollectiveValues("all_reduce", ("loss",), (1.0,), 0)


@pytest.mark.parametrize("command", [Leave(3, ""), Lose(3, "its lease ended")])
def test_the_departure_of_the_last_missing_worker_is_the_result(command: Any) -> None:
    job = Job(workers=3)
    for worker in (1, 2):
        call(job, worker, 1, mean(loss=float(worker)))

    job.recorder.do(command, job.now)

    found = job.coordinator.job.collectives.results[CallKey(NUMBERED, 1)]
    assert found == CollectiveValues("all_reduce", ("loss",), (1.5,), 0)


def test_a_worker_lost_before_the_first_call_is_not_waited_for() -> None:
    """--min-workers counts only until training has started."""
    job = Job(workers=3)
    job.push(1, 1)
    job.recorder.do(Lose(2, "its lease ended"), job.now)

    assert call(job, 1, 1) is None
    assert call(job, 3, 1) is not None


def test_an_earlier_call_without_a_result_is_made_again() -> None:
    """Its result was lost in a rollback; other workers have gone on to the next call."""
    job = Job(workers=2)
    call(job, 1, 2)
    assert call(job, 2, 2) is not None

    job.recorder.do(Lose(1, "its lease ended"), job.now)
    again = job.add()
    assert call(job, again, 1) is not None


def test_a_later_call_of_a_worker_counts_as_the_earlier_ones() -> None:
    """After a rollback the coordinator may not know the calls that a running script has made."""
    job = Job(workers=2)
    call(job, 1, 1)
    assert call(job, 2, 8) is None

    assert call(job, 1, 1) is not None


def test_a_waiting_worker_does_not_block_rounds_and_returns_to_them() -> None:
    job = Job(workers=2)
    job.applied()
    call(job, 1, 1)

    job.push(2, 1)
    assert job.applied() == [[2]]

    call(job, 2, 1)
    job.push(2, 2)
    assert job.applied() == []
    job.push(1, 1)
    assert job.applied() == [[1, 2]]


def test_a_repeated_call_is_recorded_once() -> None:
    job = Job(workers=2)
    job.recorder.journal = written = MemoryJournal()

    for _ in range(5):
        call(job, 1, 1)

    assert len(written.lines) == 1


def test_before_training_calls_wait_for_min_workers() -> None:
    coordinator = CoordinatorMachine(1, JobRules(policy("sync"), 2))
    recorder = Recorder(coordinator)
    first = coordinator.membership.join(0.0, None, "host", 1, "cpu").worker
    assert recorder.do(CallCollective(first, 1, BARRIER, first_open=0), 0.0) is None
    assert (
        waiting_for_call(coordinator, CallKey(NUMBERED, 1), 0.0)
        == "workers: 1 of --min-workers 2 are here"
    )

    second = coordinator.membership.join(0.0, None, "host", 1, "cpu").worker
    assert recorder.do(CallCollective(first, 1, BARRIER, first_open=0), 0.0) is None
    assert "worker 2" in waiting_for_call(coordinator, CallKey(NUMBERED, 1), 0.0)

    assert recorder.do(CallCollective(second, 1, BARRIER, first_open=0), 0.0) is not None


def test_a_repetition_that_lets_calls_begin_is_recorded() -> None:
    """The second worker joined between two requests of the first one."""
    coordinator = CoordinatorMachine(1, JobRules(policy("sync"), 2))
    recorder = Recorder(coordinator, written := MemoryJournal())
    for _ in range(2):
        worker = recorder.do(Join(None, "host", 1, "cpu"), 0.0).worker
        for _ in range(2):
            recorder.do(CallCollective(1, 1, BARRIER, first_open=0), 0.0)

    replayed = CoordinatorMachine(1, coordinator.job.rules)
    replay(replayed, written.commands)

    assert worker == 2
    assert coordinator.job.collectives.has_begun
    assert replayed.job.as_json() == coordinator.job.as_json()


@pytest.mark.parametrize("is_done", [False, True], ids=["open", "done"])
@pytest.mark.parametrize("other", [mean(accuracy=1.0), BARRIER, value(1)])
def test_another_call_of_the_same_number_is_a_mismatch(
    other: CollectiveValues, is_done: bool
) -> None:
    job = Job(workers=2)
    call(job, 1, 1, mean(loss=1.0))
    if is_done:
        call(job, 2, 1, mean(loss=1.0))

    with pytest.raises(MismatchError) as caught:
        call(job, 2, 1, other)

    assert caught.value.reason == "COLLECTIVE_MISMATCH"
    assert "all_reduce of loss" in str(caught.value)
    assert "Try: the same calls in the same order on all workers" in str(caught.value)


def test_restarted_workers_get_the_results_of_earlier_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collectives, "MAX_RESULTS", 3)
    job = Job(workers=1)
    for number in range(1, 6):
        call(job, 1, number, mean(loss=float(number)))
    again = job.add()

    for number in (3, 4, 5):
        result = call(job, again, number, mean(loss=0.0))
        assert result is not None
        assert result.values == (number,)
    with pytest.raises(InvalidRequestError, match="only the newest 3 results"):
        call(job, again, 2, mean(loss=0.0))


def test_there_are_the_newest_1024_results() -> None:
    job = Job(workers=1)
    for number in range(1, 1026):
        call(job, 1, number, mean(loss=float(number)))
    again = job.add()

    result = call(job, again, 2, mean(loss=0.0))
    assert result is not None
    assert result.values == (2.0,)
    with pytest.raises(InvalidRequestError, match="Try: "):
        call(job, again, 1, mean(loss=0.0))


def test_a_worker_that_left_a_pass_gets_no_more_of_its_batches() -> None:
    """It waits at a barrier while the other one finishes the pass alone."""
    job = Job(workers=2)
    first = job.ask(1)
    assert first is not None
    job.recorder.do(ReturnBatches(1, [BatchKey(0, each) for each in first.numbers]), job.now)
    job.recorder.do(CallCollective(1, 1, BARRIER, first_open=1), job.now)

    received, numbers = 0, []
    while (reply := job.ask(2, received, idle=False)) is not None and reply.numbers:
        numbers += reply.numbers
        received += len(reply.numbers)

    assert sorted(numbers) == [0, 1, 2, 3]


def test_requests_that_no_correct_worker_sends_are_refused() -> None:
    job = Job(workers=1)
    requests = [
        CallCollective(1, 1, CollectiveValues("gather"), first_open=0),
        CallCollective(1, 1, CollectiveValues("all_reduce", ("loss",), ()), first_open=0),
        CallCollective(1, 1, mean(**{f"x{index}": 0.0 for index in range(257)}), first_open=0),
        CallCollective(1, 1, mean(**{"x" * 300: 0.0}), first_open=0),
        CallCollective(1, 1, value("x" * 65536), first_open=0),
    ]
    before = job.coordinator.job.as_json()
    for request in requests:
        with pytest.raises(InvalidRequestError) as caught:
            job.recorder.do(request, job.now)
        assert caught.value.reason == "OUT_OF_RANGE"

    assert job.coordinator.job.as_json() == before


def test_a_replay_and_a_standby_have_the_same_calls() -> None:
    """Random calls, departures and joins; the state is copied and the commands are replayed."""
    for seed in range(200):
        rng = random.Random(seed)
        job = Job(workers=3)
        job.recorder.journal = written = MemoryJournal()
        copied: CoordinatorMachine | None = None
        numbers = {1: 0, 2: 0, 3: 0}
        for step in range(30):
            if step == 10:
                copied = CoordinatorMachine(1, job.coordinator.job.rules)
                state = json.loads(json.dumps(job.coordinator.complete_state()))
                copied.load_state(state, MODEL, job.now)
                written.lines.clear()
            worker = rng.choice(list(numbers))
            if rng.random() < 0.1 and len(numbers) > 1:
                job.recorder.do(Lose(worker, "its lease ended"), job.now)
                del numbers[worker]
                continue
            numbers[worker] += (
                call(job, worker, numbers[worker] + 1, mean(worker, loss=rng.random())) is not None
            )

        assert copied is not None
        replay(copied, written.commands)
        assert json.dumps(copied.job.as_json()) == json.dumps(job.coordinator.job.as_json())


def test_a_snapshot_keeps_results_and_drops_open_calls() -> None:
    job = Job(workers=2)
    for worker in (1, 2):
        call(job, worker, 1, mean(loss=1.0))
    call(job, 1, 2)
    state = json.loads(json.dumps(job.coordinator.job.as_json()))

    restored = CoordinatorMachine(1, job.coordinator.job.rules, 1)
    restored.restore(state, MODEL, 0.0)

    assert list(restored.job.collectives.results) == [CallKey(NUMBERED, 1)]
    assert restored.job.collectives.open == {}
