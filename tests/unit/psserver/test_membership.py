"""Membership: which workers take part, in which order, and from which clock on."""

import math

from pscommon.core.limits import WORKERS_PER_GENERATION
from psserver.core.workers.members import Member, WorkerState
from psserver.core.workers.membership import Membership
from psserver.core.workers.replacement import MAX_HEARTBEAT_DELAY_SECONDS, unresolved_peer


def joined(membership: Membership, rank: int | None = None, now: float = 0.0) -> Member:
    return membership.join(now, rank, "host", 1, "cpu")


def active(membership: Membership, rank: int | None = None, clock: int = 0) -> Member:
    member = joined(membership, rank)
    membership.activate(member)
    membership.index.set_clock(member, clock)
    return member


def test_workers_are_ordered_by_rank_in_any_order_of_arrival() -> None:
    membership = Membership(5.0)
    workers = [joined(membership, rank).worker for rank in (2, 0, 1, 0)]

    assert workers == [1, 2, 3, 4]
    assert [m.worker for m in membership] == [2, 4, 3, 1]


def test_without_ranks_the_order_is_that_of_joining() -> None:
    membership = Membership(5.0, generation=3)

    assert [joined(membership).rank for _ in range(3)] == [0, 1, 2]
    assert [m.worker for m in membership] == [
        3 * WORKERS_PER_GENERATION + 1,
        3 * WORKERS_PER_GENERATION + 2,
        3 * WORKERS_PER_GENERATION + 3,
    ]


def test_rounds_wait_for_active_workers_only() -> None:
    membership = Membership(5.0)
    members = [active(membership) for _ in WorkerState]
    for member, state in zip(members, WorkerState, strict=True):
        membership.index.set_state(member, state)

    assert [m.state for m in membership.active()] == [WorkerState.ACTIVE]
    assert [m.state for m in membership.registered()] == [WorkerState.ACTIVE, WorkerState.IDLE]
    assert [m.state for m in membership if m.is_current] == [
        WorkerState.JOINED,
        WorkerState.ACTIVE,
        WorkerState.IDLE,
    ]
    assert membership.index.active_clocks.count == 1


def test_a_new_worker_starts_at_the_smallest_clock() -> None:
    membership = Membership(5.0)
    active(membership, clock=7)
    active(membership, clock=4)

    assert active_clock(membership) == 4


def test_a_returning_worker_keeps_a_higher_clock() -> None:
    membership = Membership(5.0)
    slow, fast = active(membership, clock=4), active(membership, clock=7)
    for member in (fast, slow):
        membership.index.set_state(member, WorkerState.IDLE)

    membership.activate(fast)
    assert fast.clock == 7
    membership.activate(slow)
    assert slow.clock == 7


def test_a_new_worker_starts_at_the_largest_clock_when_all_wait_for_data() -> None:
    membership = Membership(5.0)
    for clock in (3, 9):
        membership.index.set_state(active(membership, clock=clock), WorkerState.IDLE)

    assert active_clock(membership) == 9


def test_the_next_lease_to_end_is_that_of_the_longest_silent_worker() -> None:
    membership = Membership(5.0)
    assert membership.leases.seconds_to_end(0.0) == math.inf
    joined(membership, now=0.0), joined(membership, now=2.0)

    assert [membership.leases.seconds_to_end(now) for now in (3.0, 5.0, 6.0, 8.0)] == [
        2.0,
        0.0,
        1.0,
        math.inf,
    ]
    assert [len(membership.leases.ended(now)) for now in (5.0, 5.1, 7.1)] == [0, 1, 2]


def active_clock(membership: Membership) -> int:
    member = joined(membership)
    membership.activate(member)
    return member.clock


def test_leases_end_and_are_renewed_after_a_suspension() -> None:
    membership = Membership(5.0)
    early, late = joined(membership, now=0.0), joined(membership, now=2.0)

    assert membership.leases.ended(5.0) == []
    assert membership.leases.ended(6.0) == [early]
    membership.leases.extend(3.0)
    assert membership.leases.ended(8.0) == []
    assert membership.leases.ended(11.0) == [early, late]
    membership.remove(early, WorkerState.LOST, "")
    assert membership.leases.ended(11.0) == [late]


def test_bytes_that_move_renew_a_lease() -> None:
    membership = Membership(5.0)
    silent, sending = joined(membership), joined(membership)
    sending.last_moved = 8.0

    assert membership.leases.ended(11.0) == [silent]
    assert membership.leases.seconds_to_end(11.0) == 2.0
    membership.leases.extend(3.0)
    assert membership.leases.seconds_to_end(14.0) == 2.0


def test_workers_from_before_a_restart_are_out() -> None:
    membership = Membership(5.0, generation=1)
    membership.restore({1: 12, 2: 13})

    assert [(m.worker, m.seq, m.is_current) for m in membership] == [(1, 12, False), (2, 13, False)]
    assert membership.counts() == {WorkerState.PAST: 2}  # past workers do not count as lost
    assert joined(membership).worker == WORKERS_PER_GENERATION + 1


def test_a_new_worker_waits_for_its_rank_until_the_former_owner_is_seen_again() -> None:
    membership = Membership(5.0)
    other = active(membership, rank=1)
    newcomer = joined(membership, rank=1, now=10.0)

    for last_seen in (9.0, 10.0 + MAX_HEARTBEAT_DELAY_SECONDS):
        other.last_seen = last_seen  # the heartbeat may precede the join of the newcomer
        assert unresolved_peer(membership.registered(), newcomer, asked_at=20.0) is other
    other.last_moved = 19.0  # bytes may be queued in a server for longer than a request
    assert unresolved_peer(membership.registered(), newcomer, asked_at=20.0) is other
    other.last_seen = 10.1 + MAX_HEARTBEAT_DELAY_SECONDS
    assert unresolved_peer(membership.registered(), newcomer, asked_at=20.0) is None
    assert (
        unresolved_peer(
            membership.registered(), joined(membership, rank=2, now=20.0), asked_at=20.0
        )
        is None
    )


def test_a_late_request_waits_while_a_new_worker_of_its_rank_trains() -> None:
    membership = Membership(5.0)
    late = joined(membership, rank=1, now=0.0)
    newcomer = joined(membership, rank=1, now=10.0)
    membership.activate(newcomer)

    # the late request may precede the join of the newcomer
    assert (
        unresolved_peer(membership.registered(), late, asked_at=10.0 + MAX_HEARTBEAT_DELAY_SECONDS)
        is newcomer
    )
    assert (
        unresolved_peer(membership.registered(), late, asked_at=10.1 + MAX_HEARTBEAT_DELAY_SECONDS)
        is None
    )
