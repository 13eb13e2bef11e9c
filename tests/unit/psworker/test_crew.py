"""Parts of a request at the same time."""

import threading

import pytest

from psworker.transport.executor import ShardExecutor
from psworker.transport.streams import Cancellation


class Call:
    """Stands for a call in flight."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


def test_results_come_in_order_from_threads_that_stay() -> None:
    crew = ShardExecutor("crew-test")
    meet = threading.Barrier(3, timeout=20)

    def part(number: int) -> tuple[int, str]:
        meet.wait()
        return number, threading.current_thread().name

    first = crew.run([lambda n=n: part(n) for n in range(3)], Cancellation())  # type: ignore[misc]
    second = crew.run([lambda n=n: part(n) for n in range(3)], Cancellation())  # type: ignore[misc]
    crew.close()

    assert (
        first
        == second
        == [(0, threading.current_thread().name), (1, "crew-test-1"), (2, "crew-test-2")]
    )
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("crew-test")]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_failure_of_one_ends_the_others_and_is_raised(failing: int) -> None:
    crew, cancellation = ShardExecutor("crew-test"), Cancellation()
    ended: list[int] = []

    def part(number: int) -> None:
        if number == failing:
            raise KeyError(number)
        call = Call()
        cancellation.attach(call)
        assert call.cancelled.wait(20)
        ended.append(number)
        raise ValueError("cancelled")

    with pytest.raises(KeyError):
        crew.run([lambda n=n: part(n) for n in range(3)], cancellation)  # type: ignore[misc]
    assert sorted(ended) == sorted({0, 1, 2} - {failing})
    assert crew.run([lambda: 1, lambda: 2], Cancellation()) == [1, 2]
    crew.close()


def test_call_that_starts_after_the_end_is_cancelled() -> None:
    cancellation, call = Cancellation(), Call()
    cancellation.cancel(KeyError("first"))
    cancellation.cancel(ValueError("second"))
    cancellation.attach(call)

    assert call.cancelled.is_set()
    assert isinstance(cancellation.cause, KeyError)
