"""A waiting request wakes only when its push changes."""

import threading
from collections.abc import Callable

import pytest

from pscommon.core.log_entries import Apply, Begin, Contribution, Cut, Entry, Evict, PushKey, Reject
from psserver.shard.live_state import PushWaiters

MINE, OTHERS = PushKey(1, 5), PushKey(2, 5)
LONG = 30.0
A_WHILE = 0.2
"""Seconds in which what must not happen could."""


def applied(*keys: PushKey) -> Apply:
    return Apply(1, 1, tuple(Contribution(key, 1, 0, 1.0) for key in keys))


def wakes_waiter(
    wait: Callable[[PushWaiters], object],
    tell: Callable[[PushWaiters], object],
    seconds: float = LONG,
) -> bool:
    """Return whether a waiting thread returns because of this action within some seconds."""
    changes, out = PushWaiters(), threading.Event()
    waits = threading.Event()

    def waiter() -> None:
        with changes:
            waits.set()  # the wait releases the lock of this thread
            wait(changes)
            out.set()

    thread = threading.Thread(target=waiter, daemon=True)
    thread.start()
    waits.wait()
    with changes:
        tell(changes)
    found = out.wait(seconds)
    with changes:
        changes.notify_all()
    thread.join(LONG)
    assert out.is_set()
    return found


@pytest.mark.parametrize(
    ("entry", "is_woken"),
    [
        (applied(MINE), True),
        (applied(OTHERS, MINE), True),
        (applied(OTHERS), False),
        (Reject(1, MINE, "STALE", ""), True),
        (Reject(1, OTHERS, "STALE", ""), False),
        (Evict(1, MINE.worker, ""), True),
        (Evict(1, OTHERS.worker, ""), False),
        (Begin(1, OTHERS.worker), True),
        (Cut(1, 1), True),
    ],
    ids=str,
)
def test_an_entry_wakes_the_requests_of_its_pushes(entry: Entry, is_woken: bool) -> None:
    seconds = LONG if is_woken else A_WHILE
    assert (
        wakes_waiter(
            lambda changes: changes.wait(2 * LONG, MINE),
            lambda changes: changes.notify_entry(entry),
            seconds,
        )
        is is_woken
    )


def test_any_entry_wakes_requests_that_wait_for_any_change() -> None:
    assert wakes_waiter(
        lambda changes: changes.wait(2 * LONG),
        lambda changes: changes.notify_entry(applied(OTHERS)),
    )


def test_both_requests_of_a_repeated_push_are_woken() -> None:
    changes, out = PushWaiters(), threading.Barrier(3)

    def waiter() -> None:
        with changes:
            inside.release()
            changes.wait(LONG, MINE)
        out.wait(LONG)

    inside = threading.Semaphore(0)
    for _ in range(2):
        threading.Thread(target=waiter, daemon=True).start()
    inside.acquire()
    inside.acquire()
    with changes:
        changes.notify_entry(applied(MINE))
    out.wait(LONG)
    assert not out.broken


def test_a_timed_out_wait_leaves_no_waiter() -> None:
    changes = PushWaiters()
    with changes:
        changes.wait(0.01, MINE)
        changes.notify_entry(applied(MINE))
    assert not changes._wakeups.keys
