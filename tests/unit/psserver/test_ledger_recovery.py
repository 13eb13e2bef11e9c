"""Recovery of a ledger, and workers that replace others."""

import json
from typing import Any

import pytest

from pscommon.core.data_loop import LoopSpec
from pscommon.core.log_entries import BatchKey
from psserver.core.data.batch_leases import BatchLeases
from psserver.core.data.data_ledger import DataLedger
from tests.support.ledger_histories import LOOPS, History, Worker

FIVE = LoopSpec(0, size=5, batch_size=1)


def through_json(ledger: DataLedger) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = json.loads(json.dumps(ledger.state()))
    return states


@pytest.mark.full
def test_a_recovered_ledger_continues_exactly_as_the_lost_one() -> None:
    """2000 random histories, cut at a random point: all later answers and the state are
    the same.
    """
    for seed in range(2000):
        history = History(seed)
        for _ in range(history.rng.randint(0, 40)):
            history.step()
        history.recover()
        for _ in range(40):
            history.step()
        history.same([ledger.state() for ledger in history.ledgers])


def test_what_is_stored_about_leases_equals_a_search() -> None:
    """Batches by worker, and the number of changes; 500 random histories, recovered once."""
    for seed in range(500):
        history, before = History(seed), dict[int, tuple[BatchLeases, int, object]]()
        for number in range(60):
            if number == seed % 60:
                history.recover()
            history.step()
            for loop in history.ledgers[-1].loops.values():
                leases = loop.leases
                workers = [*range(history.last_number + 1)]
                for worker in workers:
                    found = [number for number, holder in leases.items() if holder == worker]
                    assert leases.leased_by(worker) == found
                    assert leases.has_sent(worker) is (len(found) > len(leases.ready(worker)))
                assert leases.dealt.keys() == {w for w in workers if leases.ready(w)}
                now = leases, leases.revision, leases.state()
                was = before.get(loop.spec.loop, now)
                assert was[:2] != now[:2] or was == now
                before[loop.spec.loop] = now


@pytest.mark.full
def test_every_batch_counts_once_or_was_discarded_after_any_loss() -> None:
    """2000 random histories, completed by one worker that stays."""
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
    """Lose all workers but one, which trains the rest: every loop in order, one batch per push."""
    for worker in list(history.workers):
        history.die(worker)
    history.workers = [last := Worker(10_000)]
    for last.loop in range(LOOPS):
        history.ask(last)
        while last.hand:
            while last.hand:
                history.push(last)
            history.ask(last)


def test_exactly_the_counted_batches_are_restored() -> None:
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


def test_a_replacement_gets_the_batches_of_the_dead_worker_first_in_order() -> None:
    """Also those that were dealt and not fetched, returned to it, or sent without a
    confirmation.
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


def test_a_replacement_loses_no_answer() -> None:
    ledger = DataLedger()
    data = ledger.open(1, FIVE)
    data.take(1, 0, 2, [1])
    ledger.transfer(1, 2)

    assert data.take(2, 0, 2, [2]) == [0, 1]
    assert data.take(2, 0, 2, [2]) == [0, 1]
    assert data.take(2, 2, 1, [2]) == [2]


def test_a_push_of_the_dead_worker_does_not_use_batches_of_its_replacement() -> None:
    ledger = DataLedger()
    data = ledger.open(1, FIVE)
    data.take(1, 0, 1, [1])
    ledger.transfer(1, 2)
    ledger.commit(1, [BatchKey(0, 0)])

    assert (data.committed, data.duplicates) == (0, 1)


@pytest.mark.parametrize(
    ("sizes", "first_open"), [([], 0), ([0], 1), ([1], 0), ([0, 1], 1), ([0, 0], 2)]
)
def test_the_open_loop_is_the_first_with_uncounted_data(sizes: list[int], first_open: int) -> None:
    ledger = DataLedger()
    for loop, size in enumerate(sizes):
        ledger.open(1, LoopSpec(loop, size=size, batch_size=1))

    assert ledger.open_loop == first_open


def test_a_batch_left_behind_is_no_duplicate_in_its_workers_next_push() -> None:
    """Gradient accumulation that continues past the end of a loop."""
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


def test_batches_counted_for_another_worker_are_duplicates() -> None:
    ledger = DataLedger()
    data = ledger.open(1, FIVE)
    data.take(1, 0, 2, [1])
    data.give_back(1, [0])
    ledger.commit(1, [BatchKey(0, 0), BatchKey(0, 1), BatchKey(0, 1), BatchKey(5, 1)])

    assert (data.committed, data.duplicates) == (1, 2)


def test_batches_of_a_refused_push_can_be_dropped_for_good() -> None:
    ledger = DataLedger()
    data = ledger.open(1, FIVE)
    data.take(1, 0, 3, [1])
    ledger.drop(1, [BatchKey(0, 1), BatchKey(0, 4)])

    assert (data.dropped, data.committed, len(data.leases), data.free) == (1, 1, 2, 2)
