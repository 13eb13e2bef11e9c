"""Calls of one request to all shards, concurrent or sequential."""

import threading
from collections.abc import Callable

import pytest

from psworker.transport.exchange_calls import Cancellation
from psworker.transport.executor import SequentialExecutor, ShardExecutor


class Call:
    """Fake of a call in progress."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


class FakeShardCall:
    """Fake of the call to one shard; it runs a function of the test."""

    def __init__(self, number: int, function: Callable[[int], None]) -> None:
        self._number = number
        self._function = function

    def step(self, may_wait: bool = True) -> bool:
        self._function(self._number)
        return True


def parts(count: int, function: Callable[[int], None]) -> list[FakeShardCall]:
    return [FakeShardCall(number, function) for number in range(count)]


def test_calls_run_in_reused_threads() -> None:
    executor = ShardExecutor("executor-test")
    meet = threading.Barrier(3, timeout=20)
    names: list[dict[int, str]] = []

    def function(number: int) -> None:
        meet.wait()
        names[-1][number] = threading.current_thread().name

    for _ in range(2):
        names.append({})
        executor.run(parts(3, function), Cancellation())
    executor.close()

    assert (
        names[0]
        == names[1]
        == {0: threading.current_thread().name, 1: "executor-test-1", 2: "executor-test-2"}
    )
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("executor-test")
    ]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failed_call_cancels_the_others_and_is_raised(failing: int) -> None:
    executor, cancellation = ShardExecutor("executor-test"), Cancellation()
    ended: list[int] = []

    def function(number: int) -> None:
        if number == failing:
            raise KeyError(number)
        call = Call()
        cancellation.attach(call)
        assert call.cancelled.wait(20)
        ended.append(number)
        raise ValueError("cancelled")

    with pytest.raises(KeyError):
        executor.run(parts(3, function), cancellation)
    assert sorted(ended) == sorted({0, 1, 2} - {failing})
    executor.run(parts(2, ended.append), Cancellation())
    assert sorted(ended[2:]) == [0, 1]
    executor.close()


def test_only_the_last_open_call_may_wait() -> None:
    steps: list[tuple[int, bool]] = []

    class CountedCall(FakeShardCall):
        """Call that ends at its third attempt; call 0 ends at its first."""

        def step(self, may_wait: bool = True) -> bool:
            steps.append((self._number, may_wait))
            attempts = [number for number, _ in steps].count(self._number)
            return attempts == (1 if self._number == 0 else 3)

    calls = [CountedCall(number, lambda _: None) for number in range(2)]
    SequentialExecutor().run(calls, Cancellation())

    assert steps == [(0, False), *[(1, True)] * 3]


def test_a_call_attached_after_the_cancellation_is_cancelled() -> None:
    cancellation, call = Cancellation(), Call()
    cancellation.cancel(KeyError("first"))
    cancellation.cancel(ValueError("second"))
    cancellation.attach(call)

    assert call.cancelled.is_set()
    assert isinstance(cancellation.cause, KeyError)
