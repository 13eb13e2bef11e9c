"""One shard's side of the log: what it keeps, and how it answers for each push."""

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
    for entry in shard.accept(shard.epoch, entries):
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


def test_a_push_that_comes_again_is_not_new() -> None:
    shard, push = begun(), staged(1, 1)

    assert shard.offer(push)
    assert not shard.offer(push)
    carry_out(shard, apply(2, 1, push))
    assert not shard.offer(push)


def test_initial_weights_that_come_late_are_not_kept() -> None:
    shard = begun()

    assert not shard.offer(staged(1, 0))
    assert not shard.offer(staged(2, 0))
    assert shard.report().staged == ()


def test_outcomes_that_are_long_ago_still_count_as_known() -> None:
    shard = begun()
    for number in range(1, OUTCOMES_PER_WORKER + 3):
        shard.offer(staged(1, number))
        carry_out(shard, apply(number + 1, number, staged(1, number)))

    assert not shard.offer(staged(1, 1))
    outcome = shard.outcome(PushKey(1, 1))
    assert outcome is not None
    assert outcome.status == "applied"


@pytest.mark.parametrize("refused", [True, False])
def test_what_a_worker_gave_up_goes_with_the_next_push_that_is_decided(refused: bool) -> None:
    """Nobody else may have it, so no entry would speak of it; and it may come when the next one
    is decided.
    """
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
def test_a_push_that_is_refused_says_why(reason: str, status: str) -> None:
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


def test_a_stale_push_says_by_how_much() -> None:
    shard, old = begun(), staged(2, 1)
    shard.offer(old)
    for number in (1, 2):
        shard.offer(staged(1, number))
        carry_out(shard, apply(number + 1, number, staged(1, number)))
    carry_out(shard, Reject(4, old.key, "STALE", ""))

    outcome = shard.outcome(old.key)
    assert outcome is not None
    assert (outcome.status, outcome.version, outcome.staleness) == ("stale", 2, 2)


def test_an_evicted_worker_is_fenced_with_all_that_it_sent() -> None:
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

    assert shard.accept(shard.epoch + 1, [Evict(2, 1, "")]) == []


def test_an_entry_out_of_turn_is_a_bug() -> None:
    with pytest.raises(LogInvariantError, match="entry 3 done after 1"):
        begun().done(Evict(3, 1, ""))
    with pytest.raises(LogInvariantError, match="cannot apply"):
        begun().done(apply(2, 1, staged(1, 1)))


def test_it_knows_what_it_holds_and_what_was_decided() -> None:
    shard = ShardMachine(0)
    assert not shard.is_known(PushKey(1, 0))
    shard = begun()
    assert shard.is_known(PushKey(2, 0)), "there are weights, so nobody's are needed"

    push = staged(1, 1)
    assert not shard.is_known(push.key)
    shard.offer(push)
    assert shard.is_known(push.key)
    carry_out(shard, Reject(2, push.key, "STALE", ""))
    assert shard.is_known(push.key)


def test_it_answers_for_a_push_once_it_is_rejected_or_its_version_is_here() -> None:
    shard, good, bad = begun(), staged(1, 1), staged(2, 1)
    shard.offer(good)
    shard.offer(bad)
    assert not shard.can_answer(good.key, 0)
    assert shard.can_answer(None, 0)

    carry_out(shard, apply(2, 1, good), Reject(3, bad.key, "NON_FINITE", ""))

    assert shard.can_answer(good.key, 1)
    assert not shard.can_answer(good.key, 2)
    assert shard.can_answer(bad.key, 2)


def test_it_knows_nothing_of_what_was_before_it_went_back() -> None:
    shard = ShardMachine(0)
    shard.restore(7, 3, 9)

    assert not shard.is_known(PushKey(1, 1))
