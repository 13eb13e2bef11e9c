"""The texts of recovery and snapshots: WHAT failed: WHY. Try: HOW.

The subject of a text about a log is the log. Other tests assert reasons, exit
codes and the names of flags. A changed text changes this file.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from prometheus_client import CollectorRegistry

from pscommon.core.errors import PSError
from pscommon.core.log_entries import Apply, Contribution, PushKey, Staged
from pscommon.system.thread_team import ALONE
from psproto.v1 import standby_pb2 as pb
from psserver.core.commands.recorded import RecordedCommand
from psserver.core.commands.worker_commands import Join
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules
from psserver.core.shard.state_machine import LogInvariantError, ShardMachine
from psserver.durability import job_recovery, shard_recovery
from psserver.durability.best_effort_log import BestEffortLog
from psserver.durability.data_formats import check_data_formats
from psserver.durability.record_sink import RecordSink, RecordSource
from psserver.durability.shard_log import LoggedPush, SegmentBase
from psserver.durability.shard_state import LogUnfitError, ShardState
from psserver.durability.snapshots import SnapshotManager
from psserver.durability.state_records import received
from psserver.process.metrics import ServerMetrics
from tests.support.coordinator_job import MODEL
from tests.support.wording import check_form

DETAIL_CHARACTERS = {"unsaved updates": 10}
RULES = JobRules(policy("sync"), 2)
LOG_ID = 9
PUSH = PushKey(1, 1)
APPLY = Apply(1, 1, (Contribution(PUSH, 8, 0),))
JOB_STATE = {
    "epoch": LOG_ID,
    "version": 0,
    "shards": 1,
    "policy": ["sync", None, None, 0],
    "rules": RULES.as_json(),
}


def metrics() -> ServerMetrics:
    return ServerMetrics(CollectorRegistry(), shard=0)


def job_log(*records: Any) -> Callable[[Path], Any]:
    """Return the recovery of shard 0 from these records of the job's log."""
    log = Mock(records_since=lambda version: iter(records))
    return lambda folder: job_recovery.recover_coordinator(log, None, 0)


def log_with_a_gap(folder: Path) -> None:
    """Recover from a log whose second segment has counted more samples."""
    coordinator, _ = job_log(JOB_STATE)(folder)
    job_log(JOB_STATE, {**coordinator.state(), "samples": 8})(folder)


def changed_count(version: int) -> None:
    """Continue a log of 2 servers, which ends at this version, with 3 servers."""
    recovery = job_recovery.JobRecovery.__new__(job_recovery.JobRecovery)
    recovery._layout = Mock(shards=3, configured=3, past=())
    recovery._change_shard_count(Mock(shards=2, version=version), None)


def unsaved_updates() -> None:
    """Continue without --durability log from a log with updates that are in no snapshot."""
    recovery = job_recovery.JobRecovery.__new__(job_recovery.JobRecovery)
    with patch.object(job_recovery, "recover_coordinator", return_value=(Mock(version=5), "job")):
        recovery._check_removable(Mock(), Mock(version=3), 0)


def segment(shards: int = 1, **changed: Any) -> SegmentBase:
    """Return the start of a segment of shard 0's log."""
    machine = ShardMachine(0)
    machine.follow(LOG_ID, 0)
    return SegmentBase(shards, machine.state() | changed)


def shard_log(
    *records: Any, shards: int = 1, shard: int = 0, manifest: Any = None
) -> Callable[[Path], object]:
    """Return the recovery of a shard from these records of its log."""
    log = Mock(records_since=lambda version: iter(records))
    factory = shard_recovery.ShardStateFactory(shard, ALONE, Mock(), log)
    return lambda folder: factory.from_log(LOG_ID, manifest, {shards})


def empty_state() -> ShardState:
    state = ShardState(0, 1, ALONE)
    state.machine.follow(LOG_ID, 0)
    return state


def snapshots(folder: Path | None) -> SnapshotManager:
    return SnapshotManager(folder, 0, 1, metrics())


def data_of_another_shard(folder: Path) -> None:
    (folder / "log-shard-1").mkdir()
    snapshots(folder).check_data_dir()


def damaged_snapshot(folder: Path) -> Path:
    (folder / "snapshots" / "000000000003").mkdir(parents=True)
    (folder / "snapshots" / "000000000003" / "MANIFEST.json").write_text("{}")
    return folder


def unreadable_manifest(folder: Path) -> None:
    (folder / "snapshots" / "000000000003" / "MANIFEST.json").mkdir(parents=True)
    check_data_formats(folder, "auto")


def log_in_a_file(folder: Path) -> None:
    (folder / "log").write_text("")
    BestEffortLog(folder / "log", "no", lambda reason: None)


def torn_record() -> None:
    part = pb.ReplicateResponse(number=1, source=0, kind=1, nbytes=8, data=b"1234")
    list(received([part]))


FAILURES: dict[str, Callable[[Path], object]] = {
    # the job's log
    "job log without a state": job_log(RecordedCommand(Join(None, "host", 1, "cpu"), 1.0)),
    "job log of another version": job_log({**JOB_STATE, "version": 3}),
    "job log without a snapshot": job_log({**JOB_STATE, "log": []}),
    "job log with a gap": lambda folder: log_with_a_gap(folder),
    "other number of servers": lambda folder: changed_count(0),
    "updates of other servers": lambda folder: changed_count(5),
    "unsaved updates": lambda folder: unsaved_updates(),
    # a shard's log
    "no shard log": shard_log(),
    "shard log without a state": shard_log(MODEL),
    "log of another start": shard_log(segment(epoch=8)),
    "shard log of another version": shard_log(segment(version=3)),
    "shard log without a snapshot": shard_log(segment(begun=True)),
    "segment of other servers": shard_log(segment(), segment(2)),
    "shard log with a gap": shard_log(segment(), segment(index=2)),
    "shard log of other servers": shard_log(segment(), shards=2),
    "shard of more servers": shard_log(segment(), shard=3, manifest=Mock(version=0, index=0)),
    "no model": lambda folder: empty_state().loaded_store,
    "missing pushes": lambda folder: empty_state().compute(APPLY),
    "pushes without a model": lambda folder: empty_state().replay(
        LoggedPush(Staged(PUSH, 8, 0), (), "", False, memoryview(b""))
    ),
    "entry": lambda folder: empty_state().machine.done(APPLY),
    "entry out of order": lambda folder: empty_state().machine.done(Apply(3, 1, ())),
    # files
    "log folder": log_in_a_file,
    "manifest": unreadable_manifest,
    "torn record": lambda folder: torn_record(),
    "no log": lambda folder: list(RecordSink(RecordSource.JOB, None).records_since(None)),
    # snapshots
    "data directory of another shard": data_of_another_shard,
    "no valid snapshot": lambda folder: snapshots(damaged_snapshot(folder)).choose_start("auto"),
    "no data directory": lambda folder: snapshots(None).find(3),
    "no data directory to read": lambda folder: snapshots(None).reader(Mock(), 1),
    "missing version": lambda folder: snapshots(damaged_snapshot(folder)).find(4),
}
TEXTS: dict[str, str] = {
    "job log without a state": "it does not begin with a state",
    "job log of another version": "it begins at version 3, the snapshot is of 0",
    "job log without a snapshot": "it continues a snapshot that does not exist",
    "job log with a gap": "commands before version 0 are missing: samples",
    "other number of servers": "2 servers wrote it, and there are 3 now",
    "updates of other servers": (
        "updates 1 to 5 are in no snapshot, only in a log of 2 servers. Try: start 2 servers, "
        "then `ps-ctl reshard --servers 3`; to discard these updates: `--resume never`"
    ),
    "unsaved updates": (
        "updates 4 to 5 are in no snapshot, only in the log of an earlier start. Try: start "
        "the servers with `--durability log`, then `ps-ctl stop`, which takes a snapshot; to "
        "discard these updates: `--resume 3`"
    ),
    "no shard log": "there is none since version 0",
    "shard log without a state": "it does not begin with a state",
    "log of another start": "it belongs to another start of the job",
    "shard log of another version": "it begins at version 3, the snapshot is of 0",
    "shard log without a snapshot": "it continues a snapshot that does not exist",
    "segment of other servers": "2 servers wrote it, and there were 1 before",
    "shard log with a gap": "entries 1 to 2 are missing",
    "shard log of other servers": "1 servers wrote it, and there are 2 now",
    "shard of more servers": "the job was resharded to 1 servers",
    "no model": "it uses weights before a model exists",
    "missing pushes": "it lacks pushes [PushKey(worker=1, seq=1)]",
    "pushes without a model": "it contains pushes before a model exists",
    "entry": (
        "shard 0 at version 0 cannot apply Apply(index=1, version=1, "
        "contributions=(Contribution(key=PushKey(worker=1, seq=1), samples=8, base=0, "
        "scale=1.0),))"
    ),
    "entry out of order": "shard 0: entry 3 done after 0",
    "log folder": "cannot read the log in DIR/log: Not a directory",
    "manifest": "cannot read DIR/snapshots/000000000003/MANIFEST.json: Is a directory",
    "torn record": "record 1 ended after 4 of 8 bytes",
    "no log": "this server keeps no log",
    "data directory of another shard": (
        "data directory DIR is not that of shard 0: DIR/log-shard-1 belongs to another shard. "
        "Try: start each server with its own earlier `--data-dir`, or `--resume never` to "
        "begin a new job here"
    ),
    "no valid snapshot": (
        "none of the snapshots in DIR/snapshots is valid: "
        "DIR/snapshots/000000000003/MANIFEST.json: damaged: its checksum does not match its "
        "content"
    ),
    "no data directory": "these servers have no --data-dir",
    "no data directory to read": "shard 0 has no --data-dir",
    "missing version": "no snapshot of version 4 in DIR/snapshots; there are [3]",
}


def text_of(name: str, folder: Path) -> str:
    errors = (PSError, LogUnfitError, LogInvariantError, FileNotFoundError)
    with pytest.raises(errors) as caught:
        FAILURES[name](folder)
    return str(caught.value).replace(str(folder), "DIR")


@pytest.mark.parametrize("name", FAILURES)
def test_text(name: str, tmp_path: Path) -> None:
    assert text_of(name, tmp_path) == TEXTS[name]


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_has_at_most_one_remedy_and_is_short(name: str) -> None:
    check_form(TEXTS[name], DETAIL_CHARACTERS.get(name, 0))
