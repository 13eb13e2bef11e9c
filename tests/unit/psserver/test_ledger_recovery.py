"""A ledger that was written down and read again; workers that take the place of others."""

import json
from typing import Any

import pytest

from pscommon.core.data_loop import LoopSpec
from pscommon.core.log_entries import BatchKey
from psserver.core.data.data_ledger import DataLedger
from tests.support.ledger_histories import LOOPS, History, Worker

FIVE = LoopSpec(0, size=5, batch_size=1)


def through_json(ledger: DataLedger) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = json.loads(json.dumps(ledger.state()))
    return states


def test_a_recovered_ledger_goes_on_exactly_as_the_one_that_died() -> None:
    """2000 random histories, cut at a random place: every answer after it, and all of the state,
    are the same.
    """
    for seed in range(2000):
        history = History(seed)
        for _ in range(history.rng.randint(0, 40)):
            history.step()
        history.recover()
        for _ in range(40):
            history.step()
        history.same([ledger.state() for ledger in history.ledgers])


def test_every_batch_counts_once_or_was_thrown_away_whatever_dies() -> None:
    """2000 random histories, brought to their end by a worker that stays."""
    for seed in range(2000):
        history = History(seed)
        for _ in range(60):
            history.step()
        finish(history)

        everything = sorted(BatchKey(s.loop, n) for s in history.specs for n in range(s.total))
        assert sorted(history.counted + history.thrown) == everything, seed
        loops = history.ledgers[0].loops
        assert sum(loop.dropped for loop in loops.values()) == len(history.thrown)
        assert all(loop.done and loop.duplicates == 0 for loop in loops.values())
        assert history.ledgers[0].open_loop == LOOPS


def finish(history: History) -> None:
    """All die, and one does what is left: every loop in order, each batch in a push of its own."""
    for worker in list(history.workers):
        history.die(worker)
    history.workers = [last := Worker(10_000)]
    for last.loop in range(LOOPS):
        history.ask(last)
        while last.hand:
            while last.hand:
                history.push(last)
            history.ask(last)


def test_what_is_restored_is_what_has_counted_and_nothing_else() -> None:
    ledger, restored = DataLedger(), DataLedger()
    data = ledger.open(1, FIVE)
    data.take(1, 0, 4, [1, 2])
    ledger.commit(1, [BatchKey(0, 2)])
    data.give_back(2)
    restored.restore(through_json(ledger))

    assert (restored.loops[0].committed, len(restored.loops[0].leases), restored.loops[0].free) == (
        1,
        0,
        4,
    )
    assert restored.open(3, FIVE).take(3, 0, 9, [3]) == [0, 1, 3, 4]


def test_an_heir_gets_what_the_dead_worker_had_once_more_in_the_same_order_and_first() -> None:
    """Also what was dealt and not fetched, what came back to it, and what was sent but perhaps
    did not arrive.
    """
    ledger = DataLedger()
    data = ledger.open(1, LoopSpec(0, size=9, batch_size=1))
    assert data.take(1, 0, 2, [1, 2]) == [0, 2]
    data.give_back(1, [0])
    assert data.take(2, 0, 1, [1, 2]) == [1]
    assert data.take(1, 2, 2, [1, 2]) == [0, 5]
    ledger.commit(1, [BatchKey(0, 2)])
    ledger.transfer(1, 7)
    ledger.give_back(1)

    assert data.take(7, 0, 1, [7, 2]) == [0]
    assert data.take(7, 1, 9, [7, 2]) == [5, 7]


def test_an_heir_loses_no_answer() -> None:
    ledger = DataLedger()
    data = ledger.open(1, FIVE)
    data.take(1, 0, 2, [1])
    ledger.transfer(1, 2)

    assert data.take(2, 0, 2, [2]) == [0, 1]
    assert data.take(2, 0, 2, [2]) == [0, 1]
    assert data.take(2, 2, 1, [2]) == [2]


def test_a_push_of_the_dead_worker_does_not_use_up_what_its_heir_has() -> None:
    ledger = DataLedger()
    data = ledger.open(1, FIVE)
    data.take(1, 0, 1, [1])
    ledger.transfer(1, 2)
    ledger.commit(1, [BatchKey(0, 0)])

    assert (data.committed, data.duplicates) == (0, 1)


@pytest.mark.parametrize(
    ("sizes", "first_open"), [([], 0), ([0], 1), ([1], 0), ([0, 1], 1), ([0, 0], 2)]
)
def test_the_open_loop_is_the_first_with_data_that_has_not_counted(
    sizes: list[int], first_open: int
) -> None:
    ledger = DataLedger()
    for loop, size in enumerate(sizes):
        ledger.open(1, LoopSpec(loop, size=size, batch_size=1))

    assert ledger.open_loop == first_open


def test_what_a_worker_left_behind_is_no_duplicate_when_its_next_push_brings_it() -> None:
    """Gradient accumulation that goes on over the end of a loop."""
    ledger = DataLedger()
    ledger.open(1, FIVE).take(1, 0, 5, [1])
    ledger.open(1, LoopSpec(1, size=5, batch_size=1)).take(1, 0, 1, [1])
    assert ledger.loops[0].dropped == 5
    ledger.commit(1, [BatchKey(0, 3), BatchKey(0, 4), BatchKey(1, 0)])

    assert (ledger.loops[0].dropped, ledger.loops[0].committed, ledger.loops[0].duplicates) == (
        3,
        5,
        0,
    )
    ledger.commit(1, [BatchKey(0, 0)])
    assert (ledger.loops[0].dropped, ledger.loops[0].duplicates) == (3, 1)


def test_batches_that_count_without_being_their_workers_are_duplicates() -> None:
    ledger = DataLedger()
    data = ledger.open(1, FIVE)
    data.take(1, 0, 2, [1])
    data.give_back(1, [0])
    ledger.commit(1, [BatchKey(0, 0), BatchKey(0, 1), BatchKey(0, 1), BatchKey(5, 1)])

    assert (data.committed, data.duplicates) == (1, 2)


def test_batches_of_a_push_that_never_counts_are_dropped_where_nobody_is_to_have_them() -> None:
    ledger = DataLedger()
    data = ledger.open(1, FIVE)
    data.take(1, 0, 3, [1])
    ledger.drop(1, [BatchKey(0, 1), BatchKey(0, 4)])

    assert (data.dropped, data.committed, len(data.leases), data.free) == (1, 1, 2, 2)
