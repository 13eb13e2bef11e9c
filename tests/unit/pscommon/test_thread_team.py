"""A thread team works in parallel, ends all its threads, and raises their errors."""

import threading

import pytest

from pscommon.system.thread_team import ALONE, PART_BYTES, ThreadTeam, cores


def test_results_are_in_the_order_of_the_input() -> None:
    for team in (ALONE, ThreadTeam(2), ThreadTeam(5)):
        assert team.map(lambda item: item * 2, range(20)) == list(range(0, 40, 2))
        assert team.map(str, []) == []


def test_all_threads_work_at_the_same_time() -> None:
    meeting = threading.Barrier(3, timeout=10)
    seen = ThreadTeam(3).map(lambda item: (meeting.wait(), threading.get_ident())[1], range(3))

    assert threading.get_ident() in seen
    assert len(set(seen)) == 3


def test_a_single_item_runs_in_the_calling_thread() -> None:
    assert set(ALONE.map(lambda item: threading.get_ident(), range(3))) == {threading.get_ident()}
    assert ThreadTeam(4).map(lambda item: threading.get_ident(), [0]) == [threading.get_ident()]


def test_a_blocked_thread_blocks_no_other() -> None:
    rest = threading.Event()
    done = []

    def work(item: int) -> None:
        if item == 0:
            assert rest.wait(10)
        done.append(item)
        if len(done) == 7:
            rest.set()

    ThreadTeam(2).map(work, range(8))
    assert sorted(done) == list(range(8))


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_error_is_raised_when_all_threads_have_finished(bad: int) -> None:
    ended = []

    def work(item: int) -> None:
        if item == bad:
            raise ValueError(item)
        ended.append(item)

    with pytest.raises(ValueError, match=str(bad)):
        ThreadTeam(3).map(work, range(3))
    assert sorted(ended) == [item for item in range(3) if item != bad]


def test_a_pass_over_little_memory_is_not_split() -> None:
    assert [ThreadTeam(2).parts(n * PART_BYTES) for n in (0, 1, 2, 3, 8, 100)] == [1, 1, 2, 3, 8, 8]
    assert ALONE.parts(100 * PART_BYTES) == 1
    assert cores() >= 1


def test_threads_end_with_their_team() -> None:
    meeting, team = threading.Barrier(3, timeout=10), ThreadTeam(3)
    threads = team.map(lambda item: (meeting.wait(), threading.current_thread())[1], range(3))
    del team
    for thread in {*threads} - {threading.current_thread()}:
        thread.join(10)
        assert not thread.is_alive()
