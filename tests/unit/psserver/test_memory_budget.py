"""The limit of bytes in flight is never exceeded, is fair, and leaves no caller waiting forever."""

import hashlib
import random
import threading
import time
from collections.abc import Iterator

import pytest

from pscommon.core.errors import InFlightError, InvalidRequestError
from psserver.shard.memory_budget import MemoryBudget, MemoryClaim
from psserver.waiting import ThreadWaiter, run
from tests.support.workers import together, until

LONG = 100.0
"""Seconds: more than `until` waits."""
WORK = bytes(1 << 16)


class Caller(ThreadWaiter):
    """A caller that may hang up."""

    is_over = False

    def hang_up(self) -> None:
        self.is_over = True
        self.wake()


def take(
    budget: MemoryBudget,
    worker: int,
    nbytes: int,
    seconds: float = LONG,
    caller: ThreadWaiter | None = None,
    is_push: bool = True,
) -> MemoryClaim:
    return run(budget.take(worker, nbytes, seconds, caller or ThreadWaiter(), is_push=is_push))


class Waiters:
    """Workers that wait for a budget, each in its own thread. granted: the order of the grants."""

    def __init__(self, budget: MemoryBudget) -> None:
        self.granted: list[int] = []
        self.refused: list[int] = []
        self.claims: dict[int, MemoryClaim] = {}
        self._budget = budget
        self._threads: list[threading.Thread] = []

    def wait(
        self,
        worker: int,
        nbytes: int,
        seconds: float = LONG,
        caller: ThreadWaiter | None = None,
    ) -> None:
        """Start waiting; return once the worker is in the queue."""
        before = self._budget.waiting
        thread = threading.Thread(target=self._take, args=(worker, nbytes, seconds, caller))
        self._threads.append(thread)
        thread.start()
        until(lambda: self._budget.waiting > before, f"worker {worker} in the queue")

    def _take(self, worker: int, nbytes: int, seconds: float, caller: ThreadWaiter | None) -> None:
        try:
            self.claims[worker] = take(self._budget, worker, nbytes, seconds, caller)
        except InFlightError:
            self.refused.append(worker)
        else:
            self.granted.append(worker)

    def give(self, worker: int) -> None:
        self._budget.release(self.claims.pop(worker))

    def expect(self, *granted: int) -> None:
        """Check that exactly these have been granted, in this order."""
        until(lambda: len(self.granted) >= len(granted), f"{granted}")
        assert self.granted == list(granted)

    def go(self) -> None:
        """Grant each waiter in turn."""

        def all_have_ended() -> bool:
            ended = not any(thread.is_alive() for thread in self._threads)
            for worker in list(self.claims):
                self.give(worker)
            return ended

        until(all_have_ended, "the end")


@pytest.fixture
def budget_of_ten() -> MemoryBudget:
    return MemoryBudget(10)


@pytest.fixture
def waiters(budget_of_ten: MemoryBudget) -> Iterator[Waiters]:
    waiters = Waiters(budget_of_ten)
    yield waiters
    waiters.go()
    assert (budget_of_ten.used, budget_of_ten.waiting) == (0, 0)


def test_64_threads_never_exceed_the_limit() -> None:
    budget, guard = MemoryBudget(1000), threading.Lock()
    in_flight, highest, counts = 0, 0, [0] * 64

    def work(worker: int) -> None:
        nonlocal in_flight, highest
        sizes = random.Random(worker)
        for _ in range(40):
            claim = take(budget, worker, sizes.randint(1, 400))
            with guard:
                in_flight += claim.nbytes
                highest = max(highest, in_flight)
            counts[worker] += 1
            hashlib.sha256(WORK).digest()  # releases the GIL
            with guard:
                in_flight -= claim.nbytes
            budget.release(claim)

    together(*[lambda worker=worker: work(worker) for worker in range(64)])

    assert 400 < highest <= 1000
    assert counts == [40] * 64
    assert (budget.used, budget.waiting) == (0, 0)


def test_a_worker_has_two_pushes_and_one_pull_at_most(
    budget_of_ten: MemoryBudget, waiters: Waiters
) -> None:
    """Its further claims hold up no other worker, and come when it has released one."""
    pushes = [take(budget_of_ten, 1, 1), take(budget_of_ten, 1, 1)]
    pull = take(budget_of_ten, 1, 1, is_push=False)
    for is_push in (True, False):
        with pytest.raises(InFlightError, match="worker 1 has another pu"):
            take(budget_of_ten, 1, 1, 0.0, is_push=is_push)
    waiters.wait(1, 1)
    budget_of_ten.release(take(budget_of_ten, 2, 7, 0.0))
    budget_of_ten.release(pull)
    assert not waiters.granted
    budget_of_ten.release(pushes[0])
    waiters.expect(1)
    budget_of_ten.release(pushes[1])


def test_observers_have_any_number_of_pulls(budget_of_ten: MemoryBudget) -> None:
    claims = [take(budget_of_ten, 0, 1, 0.0, is_push=False) for _ in range(10)]
    for claim in claims:
        budget_of_ten.release(claim)

    assert budget_of_ten.used == 0


def test_the_worker_with_the_fewest_bytes_comes_first(
    budget_of_ten: MemoryBudget, waiters: Waiters
) -> None:
    mine, other = take(budget_of_ten, 1, 4), take(budget_of_ten, 2, 6)
    waiters.wait(1, 4)
    waiters.wait(3, 4)
    budget_of_ten.release(other)
    waiters.expect(3)
    budget_of_ten.release(mine)
    waiters.expect(3, 1)


def test_equal_holders_are_served_in_order_of_arrival(
    budget_of_ten: MemoryBudget, waiters: Waiters
) -> None:
    full = take(budget_of_ten, 1, 10)
    workers = [7, 3, 9, 2, 5]
    for worker in workers:
        waiters.wait(worker, 10)
    budget_of_ten.release(full)
    for place in range(len(workers)):
        waiters.expect(*workers[: place + 1])
        waiters.give(workers[place])


def test_small_requests_do_not_overtake_a_large_one(
    budget_of_ten: MemoryBudget, waiters: Waiters
) -> None:
    small = [take(budget_of_ten, worker, 2) for worker in range(5)]
    waiters.wait(90, 10)
    for worker in (11, 12, 13):
        waiters.wait(worker, 2)
    for claim in small[1:]:
        budget_of_ten.release(claim)
        assert budget_of_ten.used == sum(each.nbytes for each in small) - 2 * (small.index(claim))
    waiters.wait(14, 2)
    assert waiters.granted == []
    budget_of_ten.release(small[0])
    waiters.expect(90)
    waiters.give(90)
    until(lambda: len(waiters.granted) == 5, "the small ones")


def test_all_requests_that_fit_are_granted_at_once(
    budget_of_ten: MemoryBudget, waiters: Waiters
) -> None:
    full = take(budget_of_ten, 1, 10)
    for worker in range(2, 9):
        waiters.wait(worker, 2)
    budget_of_ten.release(full)
    until(lambda: len(waiters.granted) == 5, "all that fit")

    assert set(waiters.granted) == {2, 3, 4, 5, 6}  # threads record their grants in any order
    assert (budget_of_ten.used, budget_of_ten.waiting) == (10, 2)


def test_a_timeout_names_the_full_budget_and_lets_the_next_request_proceed(
    budget_of_ten: MemoryBudget, waiters: Waiters
) -> None:
    in_flight = take(budget_of_ten, 1, 6)
    began = time.monotonic()
    waiters.wait(8, 10, seconds=0.5)
    waiters.wait(9, 4)
    with pytest.raises(InFlightError, match=r"6 of 10 bytes.* 5") as caught:
        take(budget_of_ten, 2, 5, 0.2)

    assert caught.value.reason == "IN_FLIGHT"
    waiters.expect(9)
    assert waiters.refused == [8]
    assert time.monotonic() - began >= 0.5
    budget_of_ten.release(in_flight)


def test_a_request_above_the_limit_is_refused_at_once(budget_of_ten: MemoryBudget) -> None:
    full = take(budget_of_ten, 1, 10)
    began = time.monotonic()
    with pytest.raises(InvalidRequestError, match=r"11 bytes.*--in-flight") as caught:
        take(budget_of_ten, 2, 11)

    assert time.monotonic() - began < 5
    assert caught.value.exit_code == 2
    assert budget_of_ten.waiting == 0
    budget_of_ten.release(full)
    assert take(budget_of_ten, 2, 10, 0.0).nbytes == 10


def test_a_cancelled_caller_leaves_the_queue(budget_of_ten: MemoryBudget, waiters: Waiters) -> None:
    full, caller = take(budget_of_ten, 1, 5), Caller()
    waiters.wait(2, 10, caller=caller)
    waiters.wait(3, 5)
    caller.hang_up()
    waiters.expect(3)

    assert waiters.refused == [2]
    budget_of_ten.release(full)
