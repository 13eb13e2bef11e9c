"""The state machine of one shard: what it stores, and how it answers for each push."""

import pytest

from pscommon.core.log_entries import (
    Apply,
    Begin,
    Contribution,
    Entry,
    Evict,
    PushKey,
    Reject,
    Staged,
)
from psserver.core.shard.state_machine import OUTCOMES_PER_WORKER, LogInvariantError, ShardMachine


def staged(worker: int, seq: int, base: int = 0) -> Staged:
    return Staged(PushKey(worker, seq), samples=4, base=base)


def apply(index: int, version: int, *pushes: Staged) -> Apply:
    return Apply(index, version, tuple(Contribution(p.key, p.samples, p.base) for p in pushes))


def begun() -> ShardMachine:
    shard = ShardMachine(0)
    shard.offer(staged(1, 0))
    carry_out(shard, Begin(1, 1))
    return shard


def carry_out(shard: ShardMachine, *entries: Entry) -> None:
    for entry in shard.accept(shard.log_id, entries):
        shard.done(entry)


def test_a_push_is_open_until_the_log_decides() -> None:
    shard, push = begun(), staged(1, 1)

    assert shard.offer(push)
    assert shard.outcome(push.key) is None
    assert shard.report().staged == (push,)
    carry_out(shard, apply(2, 1, push))

    outcome = shard.outcome(push.key)
    assert outcome is not None
    assert (outcome.status, outcome.version, outcome.staleness) == ("applied", 1, 0)
    assert shard.report().staged == ()


def test_staleness_counts_the_updates_in_between() -> None:
    shard, pushes = begun(), [staged(1, 1), staged(2, 1), staged(2, 2, base=1)]
    for number, push in enumerate(pushes, start=1):
        shard.offer(push)
        carry_out(shard, apply(number + 1, number, push))

    assert [o.staleness for push in pushes if (o := shard.outcome(push.key))] == [0, 1, 1]


def test_a_repeated_push_is_not_new() -> None:
    shard, push = begun(), staged(1, 1)

    assert shard.offer(push)
    assert not shard.offer(push)
    carry_out(shard, apply(2, 1, push))
    assert not shard.offer(push)


def test_late_initial_weights_are_dropped() -> None:
    shard = begun()

    assert not shard.offer(staged(1, 0))
    assert not shard.offer(staged(2, 0))
    assert shard.report().staged == ()


def test_old_outcomes_are_remembered() -> None:
    shard = begun()
    for number in range(1, OUTCOMES_PER_WORKER + 3):
        shard.offer(staged(1, number))
        carry_out(shard, apply(number + 1, number, staged(1, number)))

    assert not shard.offer(staged(1, 1))
    outcome = shard.outcome(PushKey(1, 1))
    assert outcome is not None
    assert outcome.status == "applied"


@pytest.mark.parametrize("refused", [True, False])
def test_an_abandoned_push_is_dropped_with_the_next_decided_one(refused: bool) -> None:
    """No other shard may hold it, so no entry would name it; it may arrive during the decision."""
    shard, given_up, other, push = begun(), staged(1, 1), staged(2, 1), staged(1, 2)
    for each in (given_up, other, push):
        shard.offer(each)
    carry_out(shard, Reject(2, push.key, "NON_FINITE", "") if refused else apply(2, 1, push))

    assert list(shard.staged) == [other.key]
    assert not shard.offer(given_up)
    outcome = shard.outcome(given_up.key)
    assert outcome is not None
    assert (outcome.status, outcome.reason) == ("stale", "STALE")
    assert shard.offer(staged(1, 3))


@pytest.mark.parametrize(("reason", "status"), [("STALE", "stale"), ("NON_FINITE", "rejected")])
def test_a_rejected_push_is_answered_with_the_reason(reason: str, status: str) -> None:
    shard, push = begun(), staged(1, 1)
    shard.offer(push)
    carry_out(shard, Reject(2, push.key, reason, "because"))

    outcome = shard.outcome(push.key)
    assert outcome is not None
    assert (outcome.status, outcome.reason, outcome.detail, shard.version) == (
        status,
        reason,
        "because",
        0,
    )


def test_a_stale_push_is_answered_with_its_staleness() -> None:
    shard, old = begun(), staged(2, 1)
    shard.offer(old)
    for number in (1, 2):
        shard.offer(staged(1, number))
        carry_out(shard, apply(number + 1, number, staged(1, number)))
    carry_out(shard, Reject(4, old.key, "STALE", ""))

    outcome = shard.outcome(old.key)
    assert outcome is not None
    assert (outcome.status, outcome.version, outcome.staleness) == ("stale", 2, 2)


def test_an_evicted_worker_is_fenced_with_all_its_pushes() -> None:
    shard = begun()
    shard.offer(staged(1, 1))
    shard.offer(staged(2, 1))
    carry_out(shard, Evict(2, 1, "its lease ended"))

    assert not shard.offer(staged(1, 2))
    assert [o.reason for seq in (1, 2, 99) if (o := shard.outcome(PushKey(1, seq)))] == [
        "FENCED"
    ] * 3
    assert shard.report().staged == (staged(2, 1),)


def test_the_log_of_another_start_is_void() -> None:
    shard = begun()

    assert shard.accept(shard.log_id + 1, [Evict(2, 1, "")]) == []


def test_an_entry_out_of_order_is_an_internal_error() -> None:
    with pytest.raises(LogInvariantError, match="entry 3 done after 1"):
        begun().done(Evict(3, 1, ""))
    with pytest.raises(LogInvariantError, match="cannot apply"):
        begun().done(apply(2, 1, staged(1, 1)))


def test_the_report_has_the_staged_pushes_and_their_decisions() -> None:
    shard = ShardMachine(0)
    assert not shard.is_known(PushKey(1, 0))
    shard = begun()
    assert shard.is_known(PushKey(2, 0)), "there are weights, so none are needed"

    push = staged(1, 1)
    assert not shard.is_known(push.key)
    shard.offer(push)
    assert shard.is_known(push.key)
    carry_out(shard, Reject(2, push.key, "STALE", ""))
    assert shard.is_known(push.key)


def test_a_push_is_answered_once_rejected_or_its_version_is_applied() -> None:
    shard, good, bad = begun(), staged(1, 1), staged(2, 1)
    shard.offer(good)
    shard.offer(bad)
    assert shard.answer(good.key, 0) is None
    assert shard.answer(None, 0) is not None

    carry_out(shard, apply(2, 1, good), Reject(3, bad.key, "NON_FINITE", ""))

    assert shard.answer(good.key, 1) is not None
    assert shard.answer(good.key, 2) is None
    assert shard.answer(bad.key, 2) is not None


def test_a_rollback_drops_all_knowledge_of_earlier_pushes() -> None:
    shard = ShardMachine(0)
    shard.restore(7, 3, 9)

    assert not shard.is_known(PushKey(1, 1))
