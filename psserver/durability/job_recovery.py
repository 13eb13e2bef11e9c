"""How shard 0 begins a log of the job, and its crash recovery: a replay of the logs of the job and
of its own shard.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from pscommon.core.errors import InvalidRequestError, SnapshotError
from pscommon.snapshot import Manifest
from pscommon.telemetry.logs import get_logger
from pscommon.wal.log import LogDamagedError
from psserver.core.commands.recorded import RecordedCommand
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules
from psserver.core.job.trainings import Trainings
from psserver.durability.best_effort_log import BestEffortLog
from psserver.durability.coordinator_log import LOG_FOLDER, CoordinatorLog
from psserver.durability.shard_log import folder_of, logged_version
from psserver.durability.shard_recovery import ShardStateFactory
from psserver.durability.shard_state import LogUnfitError, ShardState
from psserver.process.job_files import ShardCountFile


class Origin(Enum):
    """Where an initial state comes from.

    FRESH: a new job.
    SNAPSHOT: a snapshot; all workers join as new.
    LOG: the write-ahead logs of this server, which go on.
    PROMOTION: what this server replicated as a standby.
    """

    FRESH = "fresh"
    SNAPSHOT = "snapshot"
    LOG = "log"
    PROMOTION = "promotion"


@dataclass(frozen=True, slots=True)
class InitialState:
    """The state with which shard 0 begins.

    origin: where it comes from.
    coordinator: the coordinator's machine.
    shard: the state of this server's own shard. None: it loads `snapshot`, as the other shards
        do, or is installed already (PROMOTION).
    snapshot: the snapshot that the log continues from; None without one.
    newest: the newest snapshot; None without one.
    job: name of the job, as stored with the state; empty if unknown.
    """

    origin: Origin
    coordinator: CoordinatorMachine
    shard: ShardState | None = None
    snapshot: Manifest | None = None
    newest: Manifest | None = None
    job: str = ""

    @property
    def is_recovered(self) -> bool:
        """Whether another process began the log."""
        return self.origin in (Origin.LOG, Origin.PROMOTION)

    def first_record(self, shards: int, generation: int, job: str) -> dict[str, Any]:
        """Return what the coordinator's log begins with, for JSON, at this start of the job."""
        coordinator = self.coordinator
        state = (
            coordinator.complete_state()
            if self.origin is not Origin.FRESH
            else {
                "epoch": coordinator.job.log_id,
                "version": 0,
                "generation": generation,
                "policy": [*coordinator.job.policy_settings()],
                "rules": coordinator.job.rules.as_json(),
                **coordinator.job.trainings.as_json(),
                **coordinator.reported.state(),
            }
        )
        return {"shards": shards, **state, "job": job}


log = get_logger(__name__)

Record = Mapping[str, Any] | RecordedCommand


class JobRecovery:
    """Finds out how the job continues from its logs.

    count_lost: Called with the number of updates that are lost with a log.
    note_disk_error: Called with the name of the errno of a failed operation.
    unusable_version: Last version of a log that could not be used; 0 without one.
    """

    def __init__(
        self,
        data_dir: Path,
        states: ShardStateFactory,
        shard_count: ShardCountFile,
        count_lost: Callable[[int], None],
        note_disk_error: Callable[[str], None],
    ) -> None:
        self.unusable_version = 0
        self._data_dir, self._states, self._shard_count = data_dir, states, shard_count
        self._count_lost, self._note_disk_error = count_lost, note_disk_error

    def recover(
        self, coordinator_log: CoordinatorLog, manifest: Manifest | None, generation: int
    ) -> InitialState | None:
        """Return the state before the crash; None if there is no log or it cannot be used.

        Args:
            manifest: The newest snapshot; None without one.
            generation: Number of the job's start for logs of earlier releases, which lack it.

        Raises InvalidRequestError if the log has newer updates than the snapshot, but not for this
        number of servers.
        """
        problem, reached = "", 0
        try:
            found = recover_coordinator(coordinator_log, manifest, generation)
            if found is not None:
                coordinator, job = found
                self._change_shard_count(coordinator, manifest)
                reached, reshard = coordinator.job.version, coordinator.job.reshard
                possible_shards = {coordinator.job.shards, *([reshard.before] if reshard else [])}
                shard = self._states.from_log(coordinator.job.log_id, manifest, possible_shards)
                if coordinator.log.can_go_on(shard.machine.report()):
                    return InitialState(Origin.LOG, coordinator, shard, manifest, manifest, job)
                problem = (
                    "the logs of shard 0 and of the job do not match: the end of one is missing"
                )
        except (LogUnfitError, SnapshotError) as error:
            problem = str(error)
        self._report_unusable(problem, manifest, reached)
        return None

    def _change_shard_count(
        self, coordinator: CoordinatorMachine, manifest: Manifest | None
    ) -> None:
        """Use the number of shards of the log, if this server may have been started for it."""
        shard_count, wrote = self._shard_count, coordinator.job.shards
        if wrote not in (shard_count.shards, shard_count.configured, *shard_count.past):
            remedy = f"start {wrote} servers, then `ps-ctl reshard --servers {shard_count.shards}`"
            _check_saved(coordinator.job.version, manifest, f"a log of {wrote} servers", remedy)
            raise LogUnfitError(f"{wrote} servers wrote it, and there are {shard_count.shards} now")
        shard_count.change(wrote)

    def _report_unusable(self, problem: str, manifest: Manifest | None, reached: int) -> None:
        """Report that the job cannot continue from its log, and how many updates that costs.

        problem: empty if the coordinator's log has no record since the snapshot.
        reached: version at which that log ends.
        """
        saved = manifest.version if manifest else 0
        reached = max(reached, logged_version(folder_of(self._data_dir, 0)))
        if not problem and reached <= saved:
            return
        folder, lost = self._data_dir / LOG_FOLDER, max(0, reached - saved)
        missing = f"{folder} holds nothing since version {saved}: files of it are missing"
        log.error("job_log_unusable", problem=problem or missing, version=saved, updates_lost=lost)
        self._count_lost(lost)
        self.unusable_version = reached

    def remove_logs(self, manifest: Manifest | None, generation: int, checks: bool) -> None:
        """Remove the logs of an earlier start with --durability log.

        checks: Raise InvalidRequestError if a log has updates that are in no snapshot.
        """
        folders = (self._data_dir / LOG_FOLDER, folder_of(self._data_dir, 0))
        logs = [BestEffortLog(folder, "no", self._note_disk_error) for folder in folders]
        try:
            if checks:
                past = CoordinatorLog(logs[0])
                self._check_removable(past, manifest, generation)
            for each in logs:
                each.clear()
        finally:
            for each in logs:
                each.close()

    def _check_removable(
        self, past: CoordinatorLog, manifest: Manifest | None, generation: int
    ) -> None:
        try:
            found = recover_coordinator(past, manifest, generation)
        except LogUnfitError as error:
            return self._report_unusable(str(error), manifest, 0)
        if found is None:
            return self._report_unusable("", manifest, 0)
        remedy = (
            "start the servers with `--durability log`, then `ps-ctl stop`, which takes a snapshot"
        )
        return _check_saved(found[0].job.version, manifest, "the log of an earlier start", remedy)


def recover_coordinator(
    coordinator_log: CoordinatorLog, manifest: Manifest | None, generation: int
) -> tuple[CoordinatorMachine, str] | None:
    """Return the coordinator's machine at the end of its log, and the job's name; None without a
    log. Raises LogUnfitError if the log does not continue the snapshot.
    """
    found: tuple[CoordinatorMachine, str] | None = None
    try:
        for record in coordinator_log.records_since(manifest.version if manifest else None):
            if found is None and manifest is not None and _is_before(record, manifest):
                continue
            if found is None:
                found = _begin(record, manifest, generation)
            elif isinstance(record, RecordedCommand):
                CoordinatorLog.replay(found[0], record)
            else:
                _check_continues(record, found[0])
    except (LogDamagedError, OSError, KeyError, ValueError, TypeError) as error:
        raise LogUnfitError(str(error)) from error
    return found


def _is_before(record: Record, manifest: Manifest) -> bool:
    """Return whether a record at the snapshot's version was written before the snapshot was cut.

    This happens if a reshard ended with the snapshot.
    """
    return isinstance(record, RecordedCommand) or (
        record["version"] == manifest.version
        and record.get("index", manifest.index) < manifest.index
    )


def _begin(
    record: Record, manifest: Manifest | None, generation: int
) -> tuple[CoordinatorMachine, str]:
    """Return the machine and the job's name at the start of the first segment."""
    if isinstance(record, RecordedCommand):
        raise LogUnfitError("it does not begin with a state")
    version = manifest.version if manifest else 0
    if record["version"] != version:
        raise LogUnfitError(
            f"it begins at version {record['version']}, the snapshot is of {version}"
        )
    if "log" in record and manifest is None:
        raise LogUnfitError("it continues a snapshot that does not exist")
    if (counted := record.get("generation")) is not None:
        generation = counted
    coordinator = CoordinatorMachine(
        record["shards"], JobRules.from_json(record["rules"]), generation, record["epoch"]
    )
    coordinator.job.policy = policy(*record["policy"])
    coordinator.job.trainings = Trainings.from_json(record)
    if "metrics" in record:  # values of earlier trainings
        coordinator.reported.recover(record)
    if "log" in record:
        assert manifest is not None
        coordinator.load_state(record, manifest.model, time.monotonic(), manifest.index)
    return coordinator, record.get("job") or (manifest.job if manifest else "")


def _check_continues(base: Mapping[str, Any], coordinator: CoordinatorMachine) -> None:
    """Raise LogUnfitError unless a segment begins where the commands before it ended."""
    state = json.loads(json.dumps(coordinator.job.as_json()))
    if differing := [key for key in state if base.get(key) != state[key]]:
        raise LogUnfitError(
            f"commands before version {base.get('version')} are missing: {', '.join(differing)}"
        )


def _check_saved(version: int, manifest: Manifest | None, where: str, remedy: str) -> None:
    """Raise InvalidRequestError if an unusable log, which ends at `version`, has newer updates than
    the newest snapshot.
    """
    saved = manifest.version if manifest else 0
    if version > saved:
        raise InvalidRequestError(
            f"updates {saved + 1} to {version} are in no snapshot, only in {where}. Try: {remedy}; "
            f"to discard these updates: `--resume {saved if manifest else 'never'}`"
        )
