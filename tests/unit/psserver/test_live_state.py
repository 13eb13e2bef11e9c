"""A waiting request is woken only when its push changes."""

import threading

import pytest

from pscommon.core.log_entries import Apply, Begin, Contribution, Cut, Entry, Evict, PushKey, Reject
from psserver.shard.live_state import Changes

MINE, OTHERS = PushKey(1, 5), PushKey(2, 5)


def applied(*keys: PushKey) -> Apply:
    return Apply(1, 1, tuple(Contribution(key, 1, 0, 1.0) for key in keys))


def count_wakes(push: PushKey | None, entry: Entry) -> int:
    """Return how often an entry wakes two requests that wait for a push."""
    changes, woken = Changes(threading.RLock()), list[int]()
    with (
        changes.watch(push, lambda: woken.append(1)),
        changes.watch(push, lambda: woken.append(2)),
    ):
        changes.notify_entry(entry)
    changes.notify_entry(entry)  # wakes nothing any more
    assert sorted(woken) in ([], [1, 2])
    return len(woken)


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
    assert count_wakes(MINE, entry) == 2 * is_woken


def test_any_entry_wakes_requests_that_wait_for_any_change() -> None:
    assert count_wakes(None, applied(OTHERS)) == 2


def test_any_change_wakes_all_requests() -> None:
    changes, woken = Changes(threading.RLock()), list[PushKey | None]()
    with (
        changes.watch(MINE, lambda: woken.append(MINE)),
        changes.watch(None, lambda: woken.append(None)),
    ):
        changes.notify_all()

    assert woken == [MINE, None]
