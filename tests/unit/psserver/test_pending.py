"""Pushes are ready when every shard that counts holds them, and no longer than that."""

from pscommon.core.log_entries import PushKey, Staged
from psserver.core.job.pending_pushes import PendingPushes

PUSH = Staged(PushKey(1, 1), 8, 0)


def test_a_lost_shard_takes_what_it_held_with_it() -> None:
    pending = PendingPushes(2)
    for shard in (0, 1):
        pending.staged(shard, PUSH)
    assert list(pending.ready) == [PUSH.key]

    pending.shard_lost(1)
    assert list(pending.ready) == []

    pending.staged(1, PUSH)
    assert list(pending.ready) == [PUSH.key]


def test_a_shard_that_has_left_takes_nothing_with_it() -> None:
    """The model moved to one shard; the other one is followed by its standby on its way out."""
    pending = PendingPushes(1)
    pending.staged(0, PUSH)

    pending.shard_lost(1)

    assert list(pending.ready) == [PUSH.key]


def test_what_is_decided_takes_with_it_what_its_worker_pushed_before() -> None:
    pending, old, other = PendingPushes(1), Staged(PushKey(1, 1), 8, 0), Staged(PushKey(2, 1), 8, 0)
    for push in (old, other, Staged(PushKey(1, 2), 8, 0), Staged(PushKey(1, 3), 8, 0)):
        pending.staged(0, push)

    pending.forget(PushKey(1, 2))

    assert list(pending.ready) == [other.key, PushKey(1, 3)]
    assert not pending.holds(0, old.key)


def test_a_push_is_given_up_when_its_worker_goes_on_before_all_shards_have_it() -> None:
    pending = PendingPushes(2)
    pending.staged(0, PUSH)
    assert pending.given_up() == []

    pending.staged(1, Staged(PushKey(1, 2), 8, 0))
    assert pending.given_up() == [PUSH.key]

    pending.staged(1, PUSH)
    assert pending.given_up() == []
