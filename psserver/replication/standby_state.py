"""What a standby holds: the shard, and of shard 0 the coordinator, as far as its primary's
records go.
"""

import json
from typing import Any, NamedTuple

from pscommon.core.errors import MismatchError, PSError
from pscommon.core.model_spec import model_from_json
from pscommon.optim import check_same_optimizers
from pscommon.snapshot import Manifest
from pscommon.system.thread_team import ThreadTeam
from pscommon.telemetry.http import MetricsServer
from pscommon.wal.log import Record
from psserver.core.commands.recorder import RecordedCommand
from psserver.core.job.coordinator import CoordinatorMachine
from psserver.core.shard.primary_lease import PrimaryRecord
from psserver.durability.coordinator_log import CoordinatorLog
from psserver.durability.coordinator_log import CoordinatorRecordKind as JobKind
from psserver.durability.record_sink import RecordSource
from psserver.durability.shard_log import SegmentBase, logged
from psserver.durability.shard_state import ShardState
from psserver.durability.state_records import ReceivedState, StateRecord, StateRecordKind, checksum
from psserver.process.config import ServerConfig


class DivergedError(PSError):
    """The numbers here are not the primary's."""


class StandbyState:
    """Made of one whole state and what comes after it. hello: what the primary says of itself
    and the job.

    coordinator: of shard 0, else None. loaded: the whole state is here.
    """

    def __init__(self, config: ServerConfig, team: ThreadTeam, hello: dict[str, Any]) -> None:
        self.hello = hello
        self.shard_state = ShardState(config.shard, config.shards, team)
        self.coordinator: CoordinatorMachine | None = None
        self.loaded = False
        self._config = config
        self._numbers = ReceivedState()
        check_settings(config, hello)

    def take(self, record: StateRecord) -> None:
        """The next record. DivergedError, LogUnfitError, and what damaged records raise: load
        everything anew.
        """
        match record.source:
            case RecordSource.LINE:
                self._take_line(record)
            case RecordSource.SHARD:
                read = logged(_as_written(record))
                if isinstance(read, SegmentBase):
                    self.shard_state.become(read.shards, read.state)
                else:
                    self.shard_state.take(read)
            case RecordSource.JOB:
                self._take_job(json.loads(record.header), JobKind(record.kind))

    def _take_line(self, record: StateRecord) -> None:
        match StateRecordKind(record.kind):
            case StateRecordKind.NUMBERS:
                self._numbers.add(record)
            case StateRecordKind.OPTIMIZER:
                self._numbers.add(record)
                self.shard_state.numbers.restore(self._numbers)
                self._numbers = ReceivedState()
            case StateRecordKind.LOADED:
                self.loaded = True
            case StateRecordKind.CHECKSUM:
                self._compare(**json.loads(record.header))
            case StateRecordKind.SNAPSHOT:
                self.hello["snapshots"][1] = record.header.decode()

    def _take_job(self, values: dict[str, Any], kind: JobKind) -> None:
        if kind is JobKind.BASE:
            self.coordinator = CoordinatorMachine(self.shard_state.shards, self._config.rules())
            model = model_from_json(values["model"]) if values["model"] else None
            self.coordinator.become(values, model, 0.0)
        elif self.coordinator is not None:
            CoordinatorLog.replay(self.coordinator, RecordedCommand.from_json(values))

    def _compare(self, version: int, checksum: int) -> None:
        mine = self.checksum()
        if (version, checksum) != (self.version, mine):
            raise DivergedError(
                f"the numbers here, at version {self.version}, are not the primary's at {version}: "
                f"checksums {mine:08x} and {checksum:08x}"
            )

    def checksum(self) -> int:
        return checksum(self.shard_state.numbers)

    @property
    def version(self) -> int:
        return self.shard_state.machine.version

    @property
    def snapshots(self) -> tuple[Manifest | None, Manifest | None]:
        """The one that the log of now goes on from, and the newest one."""
        first, newest = self.hello["snapshots"]
        return Manifest.from_json(first) if first else None, Manifest.from_json(
            newest
        ) if newest else None


class Promotion(NamedTuple):
    """What a standby that is primary from now on has: its tenure, and what it has of its
    predecessor.

    whole: that is all that the predecessor has told anybody. monitor: what probes and Prometheus
    know it by, if any.
    """

    primary_record: PrimaryRecord
    standby_state: StandbyState
    whole: bool
    monitor: MetricsServer | None


def settings(config: ServerConfig) -> dict[str, Any]:
    """What a primary and its standby must have in common, JSON-ready. Shard 0 decides; it tells
    the others.
    """
    return dict(json.loads(json.dumps(config.rules().as_json()))) if config.shard == 0 else {}


def check_settings(config: ServerConfig, hello: dict[str, Any]) -> None:
    """MismatchError that names what differs."""
    check_same_optimizers("its primary", hello.get("optimizers", ""), "this standby")
    mine, theirs = settings(config), hello["settings"]
    differing = [key for key in mine if mine[key] != theirs.get(key)]
    if differing:
        text = "; ".join(f"{key} (here {mine[key]}, there {theirs.get(key)})" for key in differing)
        raise MismatchError(
            f"this standby was started with other settings than its primary: {text}",
            "SHARD_MISMATCH",
        )


def _as_written(record: StateRecord) -> Record:
    payload = memoryview(record.payload[0]) if record.payload else memoryview(b"")
    return Record(record.kind, record.header, payload)
