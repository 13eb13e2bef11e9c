"""Pushes are ready when every shard that counts holds them, and no longer than that."""

from pscommon.core.log import PushKey, Staged
from psserver.core.pending import Pending

PUSH = Staged(PushKey(1, 1), 8, 0)


def test_a_lost_shard_takes_what_it_held_with_it() -> None:
    pending = Pending(2)
    for shard in (0, 1):
        pending.staged(shard, PUSH)
    assert list(pending.ready) == [PUSH.key]

    pending.shard_lost(1)
    assert list(pending.ready) == []

    pending.staged(1, PUSH)
    assert list(pending.ready) == [PUSH.key]


def test_a_shard_that_has_left_takes_nothing_with_it() -> None:
    """The model moved to one shard; the other one is followed by its standby on its way out."""
    pending = Pending(1)
    pending.staged(0, PUSH)

    pending.shard_lost(1)

    assert list(pending.ready) == [PUSH.key]
