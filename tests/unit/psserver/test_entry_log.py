"""Which shards can follow the job's log: those with the same history and all needed pushes."""

import json
from typing import get_args

import pytest

from pscommon.core.entry_encoding import chained
from pscommon.core.log_entries import (
    Apply,
    Begin,
    Contribution,
    Cut,
    Entry,
    Evict,
    Measure,
    PushKey,
    Reject,
    Reshard,
    SetBuffers,
    ShardReport,
    Staged,
)
from psserver.core.job.entry_log import EntryLog

UPLOAD, FIRST, SECOND = PushKey(1, 0), PushKey(1, 1), PushKey(1, 2)


def apply(index: int, key: PushKey, samples: int = 8) -> Apply:
    return Apply(index, key.seq, (Contribution(key, samples, 0),))


ENTRIES: list[Entry] = [Begin(1, 1), apply(2, FIRST), Evict(3, 7, "gone"), apply(4, SECOND)]


def digest(entries: list[Entry]) -> int:
    value = 0
    for entry in entries:
        value = chained(value, entry)
    return value


def report(entries: list[Entry], *staged: PushKey) -> ShardReport:
    """Return the report of a shard that has applied these entries and holds these pushes."""
    return ShardReport(
        0, 0, len(entries), tuple(Staged(key, 8, 0) for key in staged), digest=digest(entries)
    )


@pytest.fixture
def log() -> EntryLog:
    log = EntryLog(1)
    for entry in ENTRIES:
        log.append(entry)
    return log


@pytest.mark.parametrize("done", range(5))
def test_a_shard_that_is_behind_can_follow(log: EntryLog, done: int) -> None:
    pushes = [UPLOAD, FIRST, SECOND, SECOND][done:] if done < 4 else []

    assert log.can_go_on(report(ENTRIES[:done], *pushes))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param([*ENTRIES, Evict(5, 8, "gone")], id="more than the job's"),
        pytest.param([*ENTRIES[:3], apply(4, SECOND, samples=9)], id="another weight"),
        pytest.param([*ENTRIES[:2], Evict(3, 6, "gone")], id="another worker"),
        pytest.param(
            [ENTRIES[0], Evict(2, 7, "gone"), apply(3, FIRST), ENTRIES[3]], id="another order"
        ),
    ],
)
def test_a_shard_with_another_history_cannot_follow(log: EntryLog, other: list[Entry]) -> None:
    assert not log.can_go_on(report(other, SECOND))


def test_a_shard_that_lost_a_push_cannot_follow(log: EntryLog) -> None:
    assert not log.can_go_on(report(ENTRIES[:1], SECOND))
    assert not log.can_go_on(report([], FIRST, SECOND))


def test_a_shard_before_the_first_retained_entry_cannot_follow(log: EntryLog) -> None:
    log.reached(0, 3)

    assert not log.can_go_on(report(ENTRIES[:2], SECOND))
    assert log.can_go_on(report(ENTRIES[:3], SECOND))


def test_a_shard_that_lost_applied_entries_gets_all_retained_ones() -> None:
    """In a reshard its new process copies the state of another shard, which may be further
    behind.
    """
    log = EntryLog(2)
    for entry in ENTRIES:
        log.append(entry)
    log.reached(0, 2)
    log.reached(1, 4)

    log.back(1)
    log.reached(0, 4)

    assert log.after(2) == ENTRIES[2:]
    log.reached(1, 4)
    assert log.after(2) == []


def test_a_log_that_starts_later_uses_the_given_digest(log: EntryLog) -> None:
    again = EntryLog(1)
    again.start(3, digest(ENTRIES[:3]))
    again.append(ENTRIES[3])

    assert again.digest == log.digest
    assert again.can_go_on(report(ENTRIES))


def test_a_log_with_entries_of_every_kind_is_decoded() -> None:
    """A standby of shard 0 may connect while any of them is retained; Reshard was once missing."""
    kinds = [
        Begin(1, 1),
        apply(2, FIRST),
        Reject(3, SECOND, "STALE", "too late"),
        Evict(4, 7, "gone"),
        Cut(5, 1),
        Reshard(6, 1, 3),
        Measure(7, (Contribution(FIRST, 3, 0, 0.5), Contribution(SECOND, 4, 0))),
        SetBuffers(8, FIRST),
    ]
    assert {type(entry) for entry in kinds} == set(get_args(Entry))
    log, again = EntryLog(2), EntryLog(2)
    for entry in kinds:
        log.append(entry)

    again.recover(json.loads(json.dumps(log.state())))

    assert again.after(0) == kinds
    assert (again.index, again.digest, again.state()) == (log.index, log.digest, log.state())
