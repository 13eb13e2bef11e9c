"""What a standby has replicated: the shard, and for shard 0 the coordinator."""

import json
from typing import Any, NamedTuple

from pscommon.core.errors import PSError
from pscommon.core.model_spec import model_from_json
from pscommon.snapshot import Manifest
from pscommon.system.thread_team import ThreadTeam
from pscommon.telemetry.http import MetricsServer
from pscommon.wal.log import Record
from psserver.core.commands.recorded import RecordedCommand
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.shard.failover import PrimaryRecord
from psserver.durability.coordinator_log import CoordinatorLog
from psserver.durability.coordinator_log import CoordinatorRecordKind as JobKind
from psserver.durability.record_sink import RecordSource
from psserver.durability.shard_log import SegmentBase, logged
from psserver.durability.shard_state import ShardState
from psserver.durability.state_records import ReceivedState, StateRecord, StateRecordKind, checksum
from psserver.process.config import ServerConfig
from psserver.replication.hello import Hello


class DivergedError(PSError):
    """The replicated weights differ from the primary's."""


class StandbyState:
    """Built from one complete state and the records after it.

    Attributes:
        hello: The primary's first record: facts about itself and the job.
        newest: The newest snapshot, on shard 0; None without one.
        coordinator: The coordinator's machine on shard 0; None on other shards.
        is_loaded: The complete state has arrived.
    """

    def __init__(self, config: ServerConfig, team: ThreadTeam, hello: Hello) -> None:
        self.hello = hello
        self.newest = hello.facts.newest if hello.facts is not None else None
        self.shard_state = ShardState(config.shard, config.shards, team)
        self.coordinator: CoordinatorMachine | None = None
        self.is_loaded = False
        self._config = config
        self._received = ReceivedState()
        hello.check_settings(config)

    def take(self, record: StateRecord) -> None:
        """Apply the next record.

        Raises:
            DivergedError, LogUnfitError: The state must be loaded again; so for errors of damaged
                records.
        """
        match record.source:
            case RecordSource.LINE:
                self._take_line(record)
            case RecordSource.SHARD:
                read = logged(_as_written(record))
                if isinstance(read, SegmentBase):
                    self.shard_state.load(read)
                else:
                    self.shard_state.replay(read)
            case RecordSource.JOB:
                self._take_job(json.loads(record.header), JobKind(record.kind))

    def _take_line(self, record: StateRecord) -> None:
        match StateRecordKind(record.kind):
            case StateRecordKind.NUMBERS:
                self._received.add(record)
            case StateRecordKind.OPTIMIZER:
                self._received.add(record)
                self.shard_state.loaded_store.restore(self._received)
                self._received = ReceivedState()
            case StateRecordKind.LOADED:
                self.is_loaded = True
            case StateRecordKind.CHECKSUM:
                self._compare(**json.loads(record.header))
            case StateRecordKind.SNAPSHOT:
                self.newest = Manifest.from_json(record.header.decode())

    def _take_job(self, values: dict[str, Any], kind: JobKind) -> None:
        if kind is JobKind.BASE:
            self.coordinator = CoordinatorMachine(self.shard_state.shards, self._config.rules())
            model = model_from_json(values["model"]) if values["model"] else None
            self.coordinator.load_state(values, model, 0.0)
        elif self.coordinator is not None:
            CoordinatorLog.replay(self.coordinator, RecordedCommand.from_json(values))

    def _compare(self, version: int, checksum: int) -> None:
        mine = self.checksum()
        if (version, checksum) != (self.version, mine):
            raise DivergedError(
                f"the weights at version {self.version} differ from the primary's at version "
                f"{version}: checksums {mine:08x} and {checksum:08x}"
            )

    def checksum(self) -> int:
        return checksum(self.shard_state.loaded_store)

    @property
    def version(self) -> int:
        return self.shard_state.machine.version


class Promotion(NamedTuple):
    """What a standby has when it becomes primary.

    Attributes:
        primary_record: The record by which it is primary.
        is_complete: The replicated state has everything that the former primary has acknowledged.
        monitor: The metrics endpoint, which keeps its port; None without one.
    """

    primary_record: PrimaryRecord
    standby_state: StandbyState
    is_complete: bool
    monitor: MetricsServer | None


def _as_written(record: StateRecord) -> Record:
    payload = memoryview(record.payload[0]) if record.payload else memoryview(b"")
    return Record(record.kind, record.header, payload)
