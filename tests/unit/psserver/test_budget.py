"""The bound on bytes in flight: never passed, fair, and nobody waits for ever."""

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from pscommon.core.errors import InFlightError, InvalidRequestError
from psserver.parameters.memory_budget import (
    CALLER_CHECK_INTERVAL_SECONDS,
    MemoryBudget,
    MemoryClaim,
)
from tests.support.workers import together, until

LONG = 100.0
"""Seconds: more than `until` waits."""
WORK = bytes(1 << 16)


class Crowd:
    """Workers that wait for a budget, each in a thread of its own. granted: those that got room,
    in this order.
    """

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
        alive: Callable[[], bool] = lambda: True,
    ) -> None:
        """Returns once the worker is in the queue."""
        before = self._budget.waiting
        thread = threading.Thread(target=self._take, args=(worker, nbytes, seconds, alive))
        self._threads.append(thread)
        thread.start()
        until(lambda: self._budget.waiting > before, f"worker {worker} in the queue")

    def _take(self, worker: int, nbytes: int, seconds: float, alive: Callable[[], bool]) -> None:
        try:
            self.claims[worker] = self._budget.take(worker, nbytes, seconds, alive)
        except InFlightError:
            self.refused.append(worker)
        else:
            self.granted.append(worker)

    def give(self, worker: int) -> None:
        self._budget.release(self.claims.pop(worker))

    def expect(self, *granted: int) -> None:
        """These have got room, in this order, and nobody else."""
        until(lambda: len(self.granted) >= len(granted), f"{granted}")
        assert self.granted == list(granted)

    def go(self) -> None:
        """Everybody gets room, one after another."""

        def over() -> bool:
            ended = not any(thread.is_alive() for thread in self._threads)
            for worker in list(self.claims):
                self.give(worker)
            return ended

        until(over, "the end")


@pytest.fixture
def ten() -> MemoryBudget:
    return MemoryBudget(10)


@pytest.fixture
def crowd(ten: MemoryBudget, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crowd]:
    """Nobody in it looks by itself whether it is its turn: it has to be woken."""
    monkeypatch.setattr("psserver.parameters.memory_budget.CALLER_CHECK_INTERVAL_SECONDS", LONG)
    crowd = Crowd(ten)
    yield crowd
    crowd.go()
    assert (ten.used, ten.waiting) == (0, 0)


def test_64_threads_never_hold_more_than_the_limit() -> None:
    budget, guard = MemoryBudget(1000), threading.Lock()
    held, highest, counts = 0, 0, [0] * 64

    def work(worker: int) -> None:
        nonlocal held, highest
        sizes = random.Random(worker)
        for _ in range(40):
            claim = budget.take(worker, sizes.randint(1, 400), LONG)
            with guard:
                held += claim.nbytes
                highest = max(highest, held)
            counts[worker] += 1
            hashlib.sha256(WORK).digest()  # lets other threads run meanwhile
            with guard:
                held -= claim.nbytes
            budget.release(claim)

    together(*[lambda worker=worker: work(worker) for worker in range(64)])

    assert 400 < highest <= 1000
    assert counts == [40] * 64
    assert (budget.used, budget.waiting) == (0, 0)


def test_who_holds_least_comes_first(ten: MemoryBudget, crowd: Crowd) -> None:
    mine, other = ten.take(1, 4, LONG), ten.take(2, 6, LONG)
    crowd.wait(1, 4)
    crowd.wait(3, 4)
    ten.release(other)
    crowd.expect(3)
    ten.release(mine)
    crowd.expect(3, 1)


def test_of_those_who_hold_the_same_the_first_one_comes_first(
    ten: MemoryBudget, crowd: Crowd
) -> None:
    full = ten.take(1, 10, LONG)
    workers = [7, 3, 9, 2, 5]
    for worker in workers:
        crowd.wait(worker, 10)
    ten.release(full)
    for place in range(len(workers)):
        crowd.expect(*workers[: place + 1])
        crowd.give(workers[place])


def test_small_claims_do_not_pass_a_large_one(ten: MemoryBudget, crowd: Crowd) -> None:
    small = [ten.take(worker, 2, LONG) for worker in range(5)]
    crowd.wait(90, 10)
    for worker in (11, 12, 13):
        crowd.wait(worker, 2)
    for claim in small[1:]:
        ten.release(claim)
        assert ten.used == sum(each.nbytes for each in small) - 2 * (small.index(claim))
    crowd.wait(14, 2)
    assert crowd.granted == []
    ten.release(small[0])
    crowd.expect(90)
    crowd.give(90)
    until(lambda: len(crowd.granted) == 5, "the small ones")


def test_all_that_fit_go_at_once(ten: MemoryBudget, crowd: Crowd) -> None:
    full = ten.take(1, 10, LONG)
    for worker in range(2, 9):
        crowd.wait(worker, 2)
    ten.release(full)
    until(lambda: len(crowd.granted) == 5, "all that fit")

    assert set(crowd.granted) == {2, 3, 4, 5, 6}  # their threads may note it in another order
    assert (ten.used, ten.waiting) == (10, 2)


def test_who_waits_too_long_is_told_what_was_full_and_lets_the_next_one_go(
    ten: MemoryBudget, crowd: Crowd
) -> None:
    held = ten.take(1, 6, LONG)
    began = time.monotonic()
    crowd.wait(8, 10, seconds=0.5)
    crowd.wait(9, 4)
    with pytest.raises(
        InFlightError, match="6 of 10 bytes are in flight, no room for 5 more"
    ) as caught:
        ten.take(2, 5, 0.2)

    assert caught.value.reason == "IN_FLIGHT"
    crowd.expect(9)
    assert crowd.refused == [8]
    assert time.monotonic() - began >= 0.5
    ten.release(held)


def test_what_can_never_fit_is_refused_at_once(ten: MemoryBudget) -> None:
    full = ten.take(1, 10, LONG)
    began = time.monotonic()
    with pytest.raises(
        InvalidRequestError, match="11 bytes do not fit the server's --in-flight of 10"
    ) as caught:
        ten.take(2, 11, LONG)

    assert time.monotonic() - began < 5
    assert caught.value.exit_code == 2
    assert ten.waiting == 0
    ten.release(full)
    assert ten.take(2, 10, 0.0).nbytes == 10


def test_a_caller_that_is_gone_leaves_the_queue(
    ten: MemoryBudget, crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "psserver.parameters.memory_budget.CALLER_CHECK_INTERVAL_SECONDS",
        CALLER_CHECK_INTERVAL_SECONDS,
    )
    full, here = ten.take(1, 5, LONG), threading.Event()
    here.set()
    crowd.wait(2, 10, alive=here.is_set)
    crowd.wait(3, 5)
    here.clear()
    crowd.expect(3)

    assert crowd.refused == [2]
    ten.release(full)


def test_what_is_lent_comes_back_whatever_happens(ten: MemoryBudget) -> None:
    seen = []

    def work() -> None:
        with ten.borrow(1, 7, LONG, lambda: True):
            seen.append(ten.used)
            raise KeyError

    with pytest.raises(KeyError):
        work()

    assert (seen, ten.used) == ([7], 0)
