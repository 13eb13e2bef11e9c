"""The ledger deals, counts and takes back each batch exactly once."""

from dataclasses import replace

import pytest

from pscommon.core.data_loop import LoopSpec
from pscommon.core.errors import MismatchError
from pscommon.core.log_entries import BatchKey
from psserver.core.data.data_ledger import DataLedger
from psserver.core.data.map_loop import MapLoop


def loop(total: int = 5) -> MapLoop:
    return MapLoop(LoopSpec(0, size=total, batch_size=1))


def test_a_draw_deals_one_batch_to_each_worker_in_any_order_of_requests() -> None:
    """Under sync the speed of workers decides nothing."""
    for first, second in ((1, 2), (2, 1)):
        data = loop()
        got: dict[int, list[int]] = {1: [], 2: []}
        for worker in (first, first, second, second):
            got[worker] += data.take(worker, len(got[worker]), 1, [1, 2])

        assert got == {1: [0, 2], 2: [1, 3]}


def test_without_a_barrier_the_next_batch_goes_to_the_requesting_worker() -> None:
    data = loop()

    assert [
        data.take(worker, received, 1, [worker])
        for worker, received in ((1, 0), (1, 1), (2, 0), (1, 2))
    ] == [
        [0],
        [1],
        [2],
        [3],
    ]


def test_a_repeated_request_gets_the_same_answer() -> None:
    data = loop()

    assert data.take(1, 0, 2, [1]) == [0, 1]
    assert data.take(1, 0, 2, [1]) == [0, 1]
    assert data.take(1, 1, 2, [1]) == [1]
    assert data.take(1, 2, 2, [1]) == [2, 3]


def test_a_late_request_takes_no_batch() -> None:
    """The answer would be dropped, and the next request would confirm its batches."""
    data = loop()
    data.take(1, 0, 1, [1])
    data.take(1, 1, 1, [1])

    assert data.leases.is_late(1, 0)
    assert not data.leases.is_late(1, 1)
    assert not data.leases.is_late(2, 0)


def test_a_batch_counts_once_and_for_its_holder() -> None:
    data = loop()
    data.take(1, 0, 2, [1])

    assert (data.committed, len(data.leases), data.free) == (0, 2, 3)
    assert not data.commit(2, 0)
    assert data.commit(1, 1)
    assert not data.commit(1, 1)
    assert (data.committed, len(data.leases), data.free) == (1, 1, 3)


def test_returned_batches_are_dealt_first_in_ascending_order() -> None:
    data = loop()
    data.take(1, 0, 3, [1])
    data.give_back(1, [2, 0])

    assert data.take(2, 0, 4, [2]) == [0, 2, 3, 4]
    data.give_back(1)
    assert data.take(2, 4, 4, [2]) == [1]


def test_only_the_holder_can_return_a_batch() -> None:
    data = loop(1)
    data.take(1, 0, 1, [1])
    data.give_back(2, [0])

    assert data.take(2, 0, 1, [2]) == []


def test_batches_that_were_dealt_but_not_fetched_can_be_returned() -> None:
    data = loop(2)
    assert data.take(1, 0, 1, [1, 2]) == [0]
    assert data.has_dealt(2)
    data.give_back(2)

    assert not data.has_dealt(2)
    assert data.take(1, 1, 1, [1]) == [1]


def test_moving_to_the_next_loop_discards_unused_batches() -> None:
    ledger = DataLedger()
    first = ledger.open(1, LoopSpec(0, size=3, batch_size=1))
    first.take(1, 0, 2, [1])
    ledger.open(1, LoopSpec(1, size=3, batch_size=1))

    assert (first.dropped, first.committed, first.free) == (2, 2, 1)


def test_dealt_batches_that_were_not_sent_are_free_when_the_worker_moves_on() -> None:
    ledger = DataLedger()
    first = ledger.open(1, LoopSpec(0, size=4, batch_size=1))
    first.take(1, 0, 2, [1, 2])  # worker 1 gets 0 and 2; 1 and 3 are dealt to worker 2
    ledger.open(2, LoopSpec(1, size=3, batch_size=1))

    assert (first.dropped, first.free) == (0, 2)
    assert first.take(1, 2, 9, [1]) == [1, 3]


def test_a_loop_that_all_workers_have_left_has_ended() -> None:
    """Its remaining batches are not for later workers: a replacement, or a resumed run."""
    ledger, next_one = DataLedger(), LoopSpec(1, size=3, batch_size=1)
    first = ledger.open(1, LoopSpec(0, size=4, batch_size=1), None, [1, 2])
    first.take(1, 0, 1, [1, 2])
    ledger.open(1, next_one, None, [1, 2])
    assert not first.ended  # worker 2 may not have begun the loop

    ledger.open(2, next_one, 0, [1, 2])
    assert not first.ended  # for worker 2, loop 1 is inside loop 0
    ledger.open(2, next_one, 1, [1, 2])

    assert (first.ended, first.done, ledger.open_loop) == (True, False, 1)
    again = DataLedger()
    again.restore(ledger.state())
    assert again.loops[0].ended


def test_ended_loops_cost_pushes_and_workers_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise each push of a script with one loop per epoch would take longer than the last."""
    ledger, asked = DataLedger(), list[int]()
    for number in range(50):
        loop = ledger.open(1, LoopSpec(number, size=2, batch_size=1), None, [1])
        loop.take(1, 0, 2, [1])
        ledger.commit(1, [BatchKey(number, 0)])  # batch 1 stays leased
    for name in ("settle", "lose", "leave", "transfer"):
        monkeypatch.setattr(MapLoop, name, lambda loop, *_: asked.append(loop.spec.loop))
    ledger.commit(1, [BatchKey(49, 1)])
    ledger.transfer(1, 2)
    ledger.give_back(2)

    assert set(asked) == {48, 49}  # the next push may contain the remaining batch of loop 48
    assert [state["received"] for state in ledger.state()][:48] == [[]] * 48


def test_a_nested_loop_does_not_change_the_outer_one() -> None:
    ledger = DataLedger()
    outer = ledger.open(1, LoopSpec(0, size=6, batch_size=1))
    assert outer.take(1, 0, 2, [1, 2]) == [0, 2]
    inner = ledger.open(1, LoopSpec(1, size=3, batch_size=1), place=0)
    inner.take(1, 0, 1, [1, 2])

    assert (len(outer.leases), outer.dropped) == (4, 0)
    # a worker of the inner loop keeps its share of the outer one
    assert outer.take(2, 0, 2, [1, 2]) == [1, 3]
    assert outer.take(2, 2, 1, [1, 2]) == [5]
    assert ledger.open(1, outer.spec).take(1, 2, 1, [1, 2]) == [4]
    ledger.open(1, LoopSpec(2, size=1, batch_size=1))
    assert (outer.dropped, inner.dropped) == (3, 1)


def test_differing_loop_descriptions_are_refused() -> None:
    ledger = DataLedger()
    ledger.open(1, LoopSpec(0, size=3, batch_size=1))

    with pytest.raises(MismatchError, match="of the job: batch_size is 2 here and 1 there"):
        ledger.open(2, LoopSpec(0, size=3, batch_size=2))


def test_a_differing_sampler_order_is_refused_with_the_loop() -> None:
    ledger = DataLedger()
    mine = LoopSpec(1, size=3, batch_size=1, shuffle=False, order="0" * 32, sampler="RandomWalk")
    ledger.open(1, mine)

    with pytest.raises(
        MismatchError,
        match=r"RandomWalk .*loop 2 .*order is 1+ here and 0+ there",
    ) as caught:
        ledger.open(2, replace(mine, order="1" * 32))
    assert caught.value.reason == "LOOP_MISMATCH"
    with pytest.raises(MismatchError, match="sampler is Other here and RandomWalk there") as caught:
        ledger.open(2, replace(mine, sampler="Other"))
    assert caught.value.reason == "LOOP_MISMATCH"
    with pytest.raises(MismatchError, match="sampler is missing here"):
        ledger.open(2, LoopSpec(1, size=3, batch_size=1))


def test_the_ledger_lists_the_loops_that_have_not_ended() -> None:
    """A script may skip numbers: of loops that it created and never began."""
    ledger = DataLedger()
    assert (ledger.known_loops, ledger.open_loops) == (0, [])
    for number in (1, 2, 5):
        ledger.open(1, LoopSpec(number, size=1, batch_size=1), None, [1])

    assert (ledger.known_loops, ledger.open_loops) == (6, [5])

    again = DataLedger()
    again.restore(ledger.state())
    assert (again.known_loops, again.open_loops) == (6, [5])


def test_a_ledger_with_samplers_is_restored() -> None:
    ledger = DataLedger()
    mine = LoopSpec(
        0, size=3, batch_size=2, shuffle=False, order="0" * 32, sampler="Mine", batches=2
    )
    ledger.open(1, mine).take(1, 0, 1, [1])

    again = DataLedger()
    again.recover(ledger.state())

    assert again.loops[0].spec == mine
    assert again.loops[0].take(1, 1, 5, [1]) == [1]


def test_a_restored_loop_deals_exactly_the_uncounted_batches() -> None:
    ledger, restored = DataLedger(), DataLedger()
    data = ledger.open(1, LoopSpec(0, size=6, batch_size=1))
    data.take(1, 0, 4, [1])
    for number in (0, 1, 3):
        data.commit(1, number)
    restored.restore(ledger.state())

    assert restored.open(2, data.spec).take(2, 0, 9, [2]) == [2, 4, 5]
