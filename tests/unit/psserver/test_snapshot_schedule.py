"""When a snapshot is due and when all its parts are complete."""

from psserver.core.job.snapshot_schedule import PartReport, SnapshotInterval, SnapshotSchedule


def part(version: int, problem: str = "", index: int = 7) -> PartReport:
    return PartReport(version, index, "file", 1, "hash", problem)


def begun(every: SnapshotInterval, shards: int = 1) -> SnapshotSchedule:
    cuts = SnapshotSchedule(every, shards)
    cuts.started(0, 100.0)
    return cuts


def test_a_snapshot_is_due_at_or_after_each_multiple_of_the_step_interval() -> None:
    cuts = begun(SnapshotInterval(steps=5))

    assert [version for version in range(12) if cuts.due(version, 100.0)] == [5, 6, 7, 8, 9, 10, 11]
    cuts.begin(6, 7, 100.0, {})
    cuts.part(0, part(6))
    cuts.finished = None  # the caller has taken the finished snapshot
    assert [version for version in range(12) if cuts.due(version, 100.0)] == [10, 11]


def test_a_snapshot_is_due_by_time_when_something_has_changed() -> None:
    cuts = begun(SnapshotInterval(seconds=60.0))

    assert not cuts.due(1, 159.0)
    assert cuts.due(1, 160.0)
    assert not cuts.due(0, 160.0)


def test_no_snapshot_is_due_without_an_interval() -> None:
    assert not begun(SnapshotInterval()).due(10**6, 1e9)


def test_one_snapshot_runs_at_a_time_and_completes_with_its_last_part() -> None:
    cuts = begun(SnapshotInterval(steps=1), shards=2)
    cuts.begin(1, 7, 100.0, {"a": 1})

    assert not cuts.due(2, 100.0)
    for late_or_double in (part(0), part(1), part(1)):
        cuts.part(0, late_or_double)
    assert cuts.finished is None
    cuts.part(1, part(1, "disk full"))

    assert cuts.finished is not None
    assert (cuts.finished.version, cuts.finished.index, cuts.finished.state) == (1, 7, {"a": 1})
    assert cuts.finished.problem == "shard 1: disk full"
    assert cuts.cutting is None
    # the next snapshot must not finish before the caller has taken this one
    assert not cuts.due(2, 100.0)

    cuts.finished = None
    assert cuts.due(2, 100.0)


def test_a_part_of_an_abandoned_cut_counts_for_no_other_cut() -> None:
    """The cuts have the same version: a shard died in a reshard, and the writer of the part may
    never have reached the second cut.
    """
    cuts = begun(SnapshotInterval(steps=1))
    cuts.begin(1, 7, 100.0, {})
    cuts.abandon()
    cuts.begin(1, 8, 100.0, {})

    cuts.part(0, part(1, index=7))
    assert cuts.finished is None

    cuts.part(0, part(1, index=8))
    assert cuts.finished is not None


def test_a_cut_is_abandoned_with_a_shard_that_has_not_written_its_part() -> None:
    """A shard that has written its part may leave, and so may one that a reshard removes."""
    cuts = begun(SnapshotInterval(steps=1), shards=2)
    cuts.begin(1, 7, 100.0, {})
    cuts.part(0, part(1))

    cuts.shard_lost(0)
    cuts.shard_lost(2)
    assert cuts.cutting is not None

    cuts.shard_lost(1)
    assert cuts.cutting is None
