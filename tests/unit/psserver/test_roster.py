"""Who takes part, in which order, and from which clock on."""

import math

from psserver.core.workers.membership import GENERATION, LATENESS, Member, Membership, WorkerState


def joined(roster: Membership, rank: int | None = None, now: float = 0.0) -> Member:
    return roster.join(now, rank, "host", 1, "cpu")


def active(roster: Membership, rank: int | None = None, clock: int = 0) -> Member:
    member = joined(roster, rank)
    roster.activate(member)
    member.clock = clock
    return member


def test_workers_are_ordered_by_rank_whoever_comes_first() -> None:
    roster = Membership(5.0)
    workers = [joined(roster, rank).worker for rank in (2, 0, 1, 0)]

    assert workers == [1, 2, 3, 4]
    assert [m.worker for m in roster] == [2, 4, 3, 1]


def test_without_ranks_the_order_is_that_of_joining() -> None:
    roster = Membership(5.0, generation=3)

    assert [joined(roster).rank for _ in range(3)] == [0, 1, 2]
    assert [m.worker for m in roster] == [
        3 * GENERATION + 1,
        3 * GENERATION + 2,
        3 * GENERATION + 3,
    ]


def test_rounds_wait_for_the_active_only() -> None:
    roster = Membership(5.0)
    members = [active(roster) for _ in WorkerState]
    for member, state in zip(members, WorkerState, strict=True):
        member.state = state

    assert [m.state for m in roster.active()] == [WorkerState.ACTIVE]
    assert [m.state for m in roster.registered()] == [WorkerState.ACTIVE, WorkerState.IDLE]
    assert [m.state for m in roster if m.alive] == [
        WorkerState.JOINED,
        WorkerState.ACTIVE,
        WorkerState.IDLE,
    ]
    assert list(roster.clocks()) == [members[1].worker]


def test_a_joiner_starts_level_with_the_slowest() -> None:
    roster = Membership(5.0)
    active(roster, clock=7)
    active(roster, clock=4)

    assert active_clock(roster) == 4


def test_whoever_comes_back_keeps_a_clock_that_is_higher() -> None:
    roster = Membership(5.0)
    slow, fast = active(roster, clock=4), active(roster, clock=7)
    fast.state = slow.state = WorkerState.IDLE

    roster.activate(fast)
    assert fast.clock == 7
    roster.activate(slow)
    assert slow.clock == 7


def test_when_all_wait_for_data_a_joiner_starts_level_with_the_fastest() -> None:
    roster = Membership(5.0)
    for clock in (3, 9):
        active(roster, clock=clock).state = WorkerState.IDLE

    assert active_clock(roster) == 9


def test_the_next_lease_to_end_is_that_of_whoever_was_silent_for_longest() -> None:
    roster = Membership(5.0)
    assert roster.lease_left(0.0) == math.inf
    joined(roster, now=0.0), joined(roster, now=2.0)

    assert [roster.lease_left(now) for now in (3.0, 5.0, 6.0, 8.0)] == [2.0, 0.0, 1.0, math.inf]
    assert [len(roster.expired(now)) for now in (5.0, 5.1, 7.1)] == [0, 1, 2]


def active_clock(roster: Membership) -> int:
    member = joined(roster)
    roster.activate(member)
    return member.clock


def test_leases_end_and_are_forgiven() -> None:
    roster = Membership(5.0)
    early, late = joined(roster, now=0.0), joined(roster, now=2.0)

    assert roster.expired(5.0) == []
    assert roster.expired(6.0) == [early]
    roster.forgive(3.0)
    assert roster.expired(8.0) == []
    assert roster.expired(11.0) == [early, late]
    roster.remove(early, WorkerState.LOST, "")
    assert roster.expired(11.0) == [late]


def test_bytes_that_move_renew_a_lease() -> None:
    roster = Membership(5.0)
    silent, sending = joined(roster), joined(roster)
    sending.last_moved = 8.0

    assert roster.expired(11.0) == [silent]
    assert roster.lease_left(11.0) == 2.0
    roster.forgive(3.0)
    assert roster.lease_left(14.0) == 2.0


def test_workers_of_before_a_restart_are_out() -> None:
    roster = Membership(5.0, generation=1)
    roster.restore({1: 12, 2: 13})

    assert [(m.worker, m.seq, m.alive) for m in roster] == [(1, 12, False), (2, 13, False)]
    assert roster.counts() == {WorkerState.PAST: 2}  # nobody was lost
    assert joined(roster).worker == GENERATION + 1


def test_a_newcomer_doubts_its_rank_until_the_other_is_heard_of_later() -> None:
    roster = Membership(5.0)
    other = active(roster, rank=1)
    newcomer = joined(roster, rank=1, now=10.0)

    for heard in (9.0, 10.0 + LATENESS):
        other.last_seen = heard  # it may have been sent before
        assert roster.doubtful(newcomer, asked=20.0) is other
    other.last_moved = 19.0  # bytes may have lain in a server for longer than a request does
    assert roster.doubtful(newcomer, asked=20.0) is other
    other.last_seen = 10.1 + LATENESS
    assert roster.doubtful(newcomer, asked=20.0) is None
    assert roster.doubtful(joined(roster, rank=2, now=20.0), asked=20.0) is None


def test_who_asks_late_is_doubted_if_a_newcomer_of_its_rank_trains() -> None:
    roster = Membership(5.0)
    late = joined(roster, rank=1, now=0.0)
    newcomer = joined(roster, rank=1, now=10.0)
    roster.activate(newcomer)

    assert roster.doubtful(late, asked=10.0 + LATENESS) is newcomer  # it may have been sent before
    assert roster.doubtful(late, asked=10.1 + LATENESS) is None
