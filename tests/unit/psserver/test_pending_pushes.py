"""Pushes are ready exactly while every counting shard holds them."""

import json
from dataclasses import replace

from pscommon.core.log_entries import PushKey, Staged
from psserver.core.job.pending_pushes import PendingPushes, staged_to_json

PUSH = Staged(PushKey(1, 1), 8, 0)


def test_a_lost_shard_removes_its_staged_pushes() -> None:
    pending = PendingPushes(2)
    for shard in (0, 1):
        pending.staged(shard, PUSH)
    assert list(pending.ready) == [PUSH.key]

    pending.shard_lost(1)
    assert list(pending.ready) == []

    pending.staged(1, PUSH)
    assert list(pending.ready) == [PUSH.key]


def test_a_removed_shard_removes_no_pushes() -> None:
    """The model was resharded to one shard; the standby of the other one follows it while
    it exits.
    """
    pending = PendingPushes(1)
    pending.staged(0, PUSH)

    pending.shard_lost(1)

    assert list(pending.ready) == [PUSH.key]


def test_a_decided_push_removes_earlier_pushes_of_its_worker() -> None:
    pending, old, other = PendingPushes(1), Staged(PushKey(1, 1), 8, 0), Staged(PushKey(2, 1), 8, 0)
    for push in (old, other, Staged(PushKey(1, 2), 8, 0), Staged(PushKey(1, 3), 8, 0)):
        pending.staged(0, push)

    pending.forget(PushKey(1, 2))

    assert list(pending.ready) == [other.key, PushKey(1, 3)]
    assert not pending.holds(0, old.key)


def test_a_partial_push_is_dropped_when_its_worker_goes_on() -> None:
    pending = PendingPushes(2)
    pending.staged(0, PUSH)
    assert pending.given_up() == []

    pending.staged(1, Staged(PushKey(1, 2), 8, 0))
    assert pending.given_up() == [PUSH.key]

    pending.staged(1, PUSH)
    assert pending.given_up() == []


def test_after_a_lost_shard_a_standby_lists_pushes_in_the_same_order() -> None:
    """The order decides the order of Reject entries. A standby loads the state without pushes that
    only the lost shard had.
    """
    pending, standby = PendingPushes(2), PendingPushes(2)
    pushes = [Staged(PushKey(worker, seq), 8, 0) for worker in (1, 2) for seq in (1, 2)]
    pending.staged(1, pushes[0])
    pending.shard_lost(1)
    standby.recover(pending.state())

    for each in (pending, standby):
        for push in reversed(pushes):
            each.staged(0, push)

    assert pending.given_up() == standby.given_up()
    assert pending.state() == standby.state()


def test_the_optimizer_of_a_push_survives_json() -> None:
    """A job with one optimizer writes what older releases read."""
    named, pending = replace(PUSH, optimizer="d"), PendingPushes(1)
    pending.staged(0, named)
    recovered = PendingPushes(1)
    recovered.recover(json.loads(json.dumps(pending.state())))

    assert recovered.ready == {PUSH.key: named}
    assert staged_to_json([named]) == [[*staged_to_json([PUSH])[0], "d"]]
