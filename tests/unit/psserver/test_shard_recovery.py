"""A shard recovers exactly its state from its log, or refuses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from pscommon.core.log_entries import (
    Apply,
    Begin,
    Contribution,
    Cut,
    Entry,
    Evict,
    Measure,
    Measured,
    PushKey,
    Reshard,
    Staged,
)
from pscommon.core.model_spec import ModelSpec, TensorSpec
from pscommon.core.partition import PartitionPlan
from pscommon.snapshot import Manifest
from pscommon.snapshot.manifest import SnapshotPart, part_file
from pscommon.system.thread_team import ALONE
from psserver.core.job.entry_log import EntryLog
from psserver.core.shard.state_machine import ShardMachine
from psserver.durability.best_effort_log import BestEffortLog
from psserver.durability.shard_log import FrozenNumbers, SegmentBase, ShardLog
from psserver.durability.shard_recovery import ShardStateFactory
from psserver.durability.shard_state import LogUnfitError, ShardState
from psserver.durability.snapshots import SnapshotManager
from psserver.parameters.frozen_shard import FrozenShard
from psserver.parameters.staging import Staging
from psserver.parameters.store import ParameterStore, PartReader
from psserver.peers.resharding import ReshardReader, needed_by
from psserver.process.metrics import ServerMetrics
from tests.support.stores import SGD, Shards

MODEL = ModelSpec((TensorSpec("w", (4,), "float32"),), SGD)
LOG_ID = 9
UPLOAD, FIRST, SECOND = PushKey(1, 0), PushKey(1, 1), PushKey(1, 2)


def begin() -> Begin:
    return Begin(1, worker=1)


def apply(index: int, key: PushKey) -> Apply:
    return Apply(index, key.seq, (Contribution(key, 8, 0),))


def shard_log(folder: Path) -> ShardLog:
    return ShardLog(0, BestEffortLog(folder / "log", "no", lambda reason: None))


class PartsInMemory(SnapshotManager):
    """Snapshots whose parts are the stores of other shards."""

    def __init__(self, shard: int = 0, job: Shards | None = None) -> None:
        super().__init__(None, shard, 1, ServerMetrics(CollectorRegistry(), shard=shard))
        self._shard, self._job = shard, job

    def reader(self, manifest: Manifest, shards: int) -> PartReader:
        assert self._job is not None
        stores = self._job.stores
        frozen = [FrozenShard(LOG_ID, 0, len(stores), store) for store in stores]
        needed = needed_by(PartitionPlan(PAIR, shards), self._shard)
        return ReshardReader(self._job.plan, frozen, needed)


def recovered(log: ShardLog, shards: set[int], log_id: int = LOG_ID) -> ShardState:
    return ShardStateFactory(0, ALONE, PartsInMemory(), log).from_log(log_id, None, shards)


class LogWriter:
    """A shard's log and the shard state that writes it. Weights begin as 0; a push of 1 subtracts
    1.
    """

    def __init__(self, folder: Path) -> None:
        self.log = shard_log(folder)
        self._shards = Shards(MODEL, 1)
        self.log.begin_segment(SegmentBase(1, self.state()), None, ())
        self.log.write_model(MODEL)

    @staticmethod
    def state(**changed: Any) -> dict[str, Any]:
        machine = ShardMachine(0)
        machine.follow(LOG_ID, 0)
        return machine.state() | changed

    def staging(self, value: float, initial: bool = False) -> Staging:
        (staging,) = self._shards.stage({"w": torch.full((4,), value)}, initial=initial)
        return staging

    def push(self, key: PushKey, value: float = 1.0) -> None:
        self.log.write_push(Staged(key, 8, 0), self.staging(value, initial=key.seq == 0))

    def write(self, *things: PushKey | Entry) -> None:
        """Write pushes and entries in this order; the upload of weights is of zeros."""
        for thing in things:
            if isinstance(thing, PushKey):
                self.push(thing, 1.0 if thing.seq else 0.0)
            else:
                self.log.write_entry(thing)

    def read(self, shards: int = 1, log_id: int = LOG_ID) -> ShardState:
        return recovered(self.log, {shards}, log_id)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[LogWriter]:
    writer = LogWriter(tmp_path)
    yield writer
    writer.log.close()


def weights(state: ShardState) -> list[float]:
    assert state.store is not None
    return numbers(state.store)[:4]


def numbers(store: ParameterStore) -> list[float]:
    reading = store.read(everything=True)
    recovered_state = torch.frombuffer(bytearray(b"".join(reading.views())), dtype=torch.float32)
    reading.close()
    return recovered_state.tolist()


def test_recovery_restores_the_exact_state(writer: LogWriter) -> None:
    writer.write(UPLOAD, begin(), FIRST, apply(2, FIRST), SECOND)

    recovery = writer.read()

    assert (recovery.machine.version, recovery.machine.index) == (1, 2)
    assert weights(recovery) == [-1.0] * 4
    assert recovery.staged.keys() == recovery.machine.staged.keys() == {SECOND}


def test_the_recovered_digest_is_that_of_the_jobs_log(writer: LogWriter) -> None:
    """The coordinator compares the two."""
    job = EntryLog(1)
    for entry in (begin(), apply(2, FIRST)):
        job.append(entry)
    writer.write(UPLOAD, begin(), FIRST, apply(2, FIRST))

    assert job.can_go_on(writer.read().machine.report())


def test_a_push_that_was_written_twice_counts_once(writer: LogWriter) -> None:
    """Its first append failed, but reached the disk, and the worker sent it again."""
    writer.write(UPLOAD, begin(), FIRST)
    writer.push(FIRST, 5.0)
    writer.write(apply(2, FIRST))
    writer.push(FIRST, 5.0)  # the log has already decided it
    writer.push(UPLOAD, 5.0)

    recovery = writer.read()

    assert weights(recovery) == [-1.0] * 4
    assert recovery.staged == {}


def test_an_entry_that_was_written_twice_is_applied_once(writer: LogWriter) -> None:
    writer.write(UPLOAD, begin(), FIRST, apply(2, FIRST), apply(2, FIRST))

    assert writer.read().machine.version == 1


def test_a_measured_norm_is_recovered_until_its_pushes_count(
    writer: LogWriter,
) -> None:
    measure = Measure(2, (Contribution(FIRST, 8, 0, 0.5),))
    writer.write(UPLOAD, begin(), FIRST, measure)

    recovery = writer.read()
    assert recovery.machine.report().measured == Measured(2, 4 * 0.5**2)
    assert recovery.staged.keys() == {FIRST}
    assert weights(recovery) == [0.0] * 4

    writer.write(apply(3, FIRST))
    recovery = writer.read()
    assert recovery.machine.report().measured is None
    assert weights(recovery) == [-1.0] * 4


def test_the_pushes_of_an_evicted_worker_are_dropped(writer: LogWriter) -> None:
    writer.write(UPLOAD, begin(), FIRST, Evict(2, 1, "gone"))

    assert writer.read().staged == {}


@pytest.mark.parametrize(
    ("things", "problem"),
    [
        ((UPLOAD, begin(), apply(2, FIRST)), "it lacks pushes"),
        ((begin(),), r"it lacks pushes .*seq=0"),
    ],
)
def test_an_entry_without_its_pushes_is_refused(
    writer: LogWriter, things: tuple[PushKey | Entry, ...], problem: str
) -> None:
    writer.write(*things)

    with pytest.raises(LogUnfitError, match=problem):
        writer.read()


def test_entries_missing_between_segments_are_detected(writer: LogWriter) -> None:
    writer.write(UPLOAD, begin())
    writer.log.begin_segment(SegmentBase(1, writer.state(index=5, begun=True)), MODEL, ())

    with pytest.raises(LogUnfitError, match="entries 2 to 5 are missing"):
        writer.read()


def test_the_log_of_another_job_or_size_is_refused(writer: LogWriter) -> None:
    with pytest.raises(LogUnfitError, match="another start"):
        writer.read(log_id=LOG_ID + 1)
    with pytest.raises(LogUnfitError, match="1 servers wrote it, and there are 2 now"):
        writer.read(shards=2)


def test_an_empty_folder_is_no_log(tmp_path: Path) -> None:
    log = shard_log(tmp_path)

    with pytest.raises(LogUnfitError, match="there is none since version 0"):
        recovered(log, {1})


# ---- a reshard at the version of the newest snapshot: several segments have this version, and
# recovery reads from the last one

PAIR = ModelSpec((TensorSpec("w", (1024,), "float32"), TensorSpec("v", (1024,), "float32")), SGD)
VALUES = {"w": torch.arange(1024.0), "v": torch.arange(1024.0) + 5000}
CUT, RESHARD, CUT_AGAIN = 7, 8, 9


def resharded(folder: Path, shard: int, before: int, after: int, of: int = CUT) -> ShardState:
    """Recover a shard that died at the cut that ends a reshard, from the snapshot before it or
    this.
    """
    job = Shards(PAIR, before)
    job.begin(VALUES)
    state = LogWriter.state(shard=shard, version=5, begun=True)
    log = shard_log(folder)
    log.begin_segment(SegmentBase(before, state | {"index": CUT}), PAIR, ())
    log.write_entry(Reshard(RESHARD, 5, after))
    log.write_entry(Cut(CUT_AGAIN, 5))
    log.begin_segment(
        SegmentBase(
            after,
            state | {"index": CUT_AGAIN, "moving": shard >= after},
            FrozenNumbers(RESHARD, before),
        ),
        PAIR,
        (),
    )

    parts = tuple(
        SnapshotPart(part_file(number, before, "0" * 64), 0, "0" * 64) for number in range(before)
    )
    manifest = Manifest(
        job="job",
        version=5,
        index=of,
        shards=before,
        created="2026-01-01T00:00:00+00:00",
        model=PAIR,
        parts=parts,
    )
    states = ShardStateFactory(shard, ALONE, PartsInMemory(shard, job), log)
    try:
        return states.from_log(LOG_ID, manifest, {before, after})
    finally:
        log.close()


@pytest.mark.parametrize(("shard", "before", "after"), [(0, 2, 1), (1, 2, 1), (0, 1, 2), (2, 3, 1)])
def test_a_shard_that_died_in_a_reshard_recovers_its_former_partition(
    tmp_path: Path, shard: int, before: int, after: int
) -> None:
    recovery = resharded(tmp_path, shard, before, after)

    job = Shards(PAIR, before)
    job.begin(VALUES)
    assert recovery.frozen is not None
    assert (recovery.frozen.log_id, recovery.frozen.index, recovery.frozen.shards) == (
        LOG_ID,
        RESHARD,
        before,
    )
    assert numbers(recovery.frozen.store) == numbers(job.stores[shard])
    assert (recovery.shards, recovery.store, recovery.machine.is_resharding) == (after, None, True)


def test_the_snapshot_that_ends_a_reshard_completes_it(tmp_path: Path) -> None:
    recovery = resharded(tmp_path, 0, 2, 1, of=CUT_AGAIN)

    assert (recovery.shards, recovery.frozen, recovery.machine.is_resharding) == (1, None, False)
    assert recovery.store is not None
    assert numbers(recovery.store) == [*VALUES["w"].tolist(), *VALUES["v"].tolist()]


def test_a_shard_without_a_part_in_that_snapshot_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogUnfitError, match="the job was resharded to 1 servers"):
        resharded(tmp_path, 1, 2, 1, of=CUT_AGAIN)


def test_a_log_that_continues_from_weights_in_no_snapshot_is_refused(writer: LogWriter) -> None:
    """So begins the log of a standby that took over before there was a snapshot."""
    writer.log.clear()
    writer.log.begin_segment(SegmentBase(1, writer.state(index=1, begun=True)), MODEL, ())

    with pytest.raises(LogUnfitError, match="a snapshot that does not exist"):
        writer.read()
