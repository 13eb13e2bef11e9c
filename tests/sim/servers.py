"""Simulated shards: the shipped engine, state, logs, recovery and standby, with a few floats for
arrays and with disks in memory.

A shard is a process: killing it discards its memory and keeps its disk.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pscommon.core.errors import LayoutError, SnapshotError, UnreachableError
from pscommon.core.log_entries import Cut, Entry, ShardReport, Staged
from psserver.core.job.reshard_phase import ReshardPhase
from psserver.core.job.snapshot_schedule import PartReport
from psserver.core.servers.server_entry import ServerEntry
from psserver.core.servers.shard_directory import ShardDirectory
from psserver.core.shard.state_machine import NO_LOG, ShardMachine
from psserver.durability.shard_log import ShardLog
from psserver.durability.shard_state import LogUnfitError
from psserver.shard.engine import ShardEngine
from tests.sim.arrays import (
    PartitionReader,
    SimSnapshots,
    SimStaging,
    SimStandbyState,
    SimStateFactory,
)
from tests.sim.disks import Disk, SimLink, SimManifest, SimStandby
from tests.sim.invariants import check, violation
from tests.support.coordinators import SilentCoordinator

if TYPE_CHECKING:
    from tests.sim.world import World


@contextmanager
def raise_violations(shard: int) -> Iterator[None]:
    """Raise each error as an InvariantError."""
    try:
        yield
    except Exception as error:
        raise violation("error in shard {}: {!r}", shard, error) from error


class SimShard(SilentCoordinator):
    """The process of one shard: its engine, and its messages to the coordinator.

    is_up: the process has not been killed.
    previous_process: process whose state a recovery must restore; None: not checked.
    has_recovered: the process has tried to recover from its log.
    promoted_state: replicated state with which a promoted standby started.
    part: the newest snapshot part that this process has written.
    sent_reports, received_reports: numbers of the newest report that was sent, and that arrived.
    instance: name of this process.
    directory, server, connection: the connection to the coordinator; directory is None before the
        first report arrives.
    """

    def __init__(self, world: "World", shard: int, shards: int, disk: Disk) -> None:
        self.world, self.disk = world, disk
        self.is_up, self.has_recovered = True, False
        self.previous_process: SimShard | None = None
        self.promoted_state: SimStandbyState | None = None
        self.part: PartReport | None = None
        self.sent_reports = self.received_reports = 0
        self.instance, self.term = f"process {next(world.process_numbers)}", 1
        self.directory: ShardDirectory[SimManifest] | None = None
        self.server, self.connection = ServerEntry(shard), None
        disk.shard_log.is_complete = False  # until this process begins a segment
        log = ShardLog(
            shard,
            disk.shard_log if world.scenario.has_log else None,  # type: ignore[arg-type]
            SimLink(disk),  # type: ignore[arg-type]
        )
        self.states = SimStateFactory(shard, world.rng, SimSnapshots(world), log)  # type: ignore[arg-type]
        traffic: Any = SimpleNamespace(observers=())
        self.engine = ShardEngine(self.states.empty(shards), traffic, self.write_part, self, log)

    @property
    def is_connected(self) -> bool:
        """Whether the current coordinator has the complete report that begins a connection."""
        return self.directory is self.world.directory and self.server.ready

    @property
    def machine(self) -> ShardMachine:
        return self.engine.live.machine

    @property
    def shards(self) -> int:
        return self.engine.live.shards

    @property
    def is_ready(self) -> bool:
        """Whether the shard follows a log."""
        return self.machine.log_id != NO_LOG

    @property
    def weights(self) -> list[float]:
        store: Any = self.engine.live.store
        return store.weights if store is not None else []

    # ---- pushes and entries

    def push(self, staged: Staged, values: Sequence[float], shards: int) -> None:
        """Stage a push that a worker has partitioned for this number of shards."""
        store: Any = self.engine.live.store
        if store is not None and self.is_ready:
            with suppress(LayoutError, UnreachableError):
                self.engine.live.check_shard_count(shards)
                staging: Any = SimStaging(store, values, staged.key.seq == 0)
                self.engine.stage_push(staged, staging)

    def receive_entries(self, log_id: int, entries: list[Entry]) -> None:
        with raise_violations(self.machine.shard):
            self.engine.deliver(log_id, entries)

    def write_part(self, cut: Cut, store: Any, record_part: Callable[[PartReport], None]) -> None:
        self.disk.parts[cut.index] = cut.version, list(store.weights)
        record_part(PartReport(cut.version, cut.index, "", 0, ""))

    # ---- messages to the coordinator

    def request_report(self) -> None:
        self.send_report(only_new=self.is_connected)

    def record_part(self, part: PartReport) -> None:
        self.part = part
        self.send_part()

    def send_report(self, only_new: bool = False) -> None:
        if self.is_up:
            self.sent_reports += 1
            report, number, recovered = (
                self.engine.make_report(only_new),
                self.sent_reports,
                self.has_recovered,
            )
            recorder = self.world.recorder
            self.world.send(
                lambda: (
                    self.world.recorder is recorder
                    and self.deliver_report(report, number, recovered)
                ),
                self,
            )

    def deliver_report(self, report: ShardReport, number: int, recovered: bool) -> None:
        """Deliver a report to the coordinator, unless a later report has arrived.

        A real connection keeps the order.
        """
        if number > self.received_reports:
            self.received_reports = number
            self.world.on_report(report, self, recovered)

    def send_part(self) -> None:
        """Report the newest snapshot part; callers repeat this because messages may be lost."""
        if (part := self.part) is not None:
            self.world.send(lambda: self.world.on_part(self.machine.shard, part), self)

    # ---- catch-up actions; each may arrive twice

    def follow(self, log_id: int, base: int = 0) -> None:
        if self.machine.log_id != log_id:
            shards = self.world.coordinator.job.shards
            self.engine.install(self.states.fresh(log_id, base, shards))

    def load(self, snapshot: SimManifest, log_id: int) -> None:
        if self.machine.log_id != log_id:
            shards = self.world.coordinator.job.shards
            self.engine.install(self.states.from_snapshot(log_id, snapshot, shards))  # type: ignore[arg-type]

    def adopt(self, state: str, reshard: ReshardPhase, log_id: int) -> None:
        if not self.is_ready:
            joining = self.states.joining(
                log_id, json.loads(state), self.world.model, reshard.shards
            )
            self.engine.install(joining)

    def recover(self, snapshot: SimManifest | None, log_id: int) -> None:
        if self.has_recovered:
            return
        self.has_recovered = True
        reshard = self.world.coordinator.job.reshard
        possible = {self.world.coordinator.job.shards, *([reshard.before] if reshard else [])}
        with suppress(LogUnfitError, SnapshotError):
            state = self.states.from_log(log_id, snapshot, possible)  # type: ignore[arg-type]
            self.engine.install(state, continues_log=True)
            self.check_recovered_state()

    def take_over(self, standby: SimStandby) -> None:
        """Start from the state of the standby of the previous process."""
        if standby.lacks_records:
            self.previous_process = None
        elif dropped := standby.drop_unacknowledged(self.world.rng):
            self.previous_process = None  # until the coordinator sends these entries again
            self.disk.shard_log.drop(dropped)  # entries that the previous process wrote
        with raise_violations(self.machine.shard):
            self.promoted_state = SimStandbyState(self.world, self.machine.shard, standby)
        is_complete = not standby.lacks_records
        self.engine.install(self.promoted_state.shard_state, continues_log=is_complete)
        self.check_recovered_state()

    def check_recovered_state(self) -> None:
        if self.previous_process is not None:
            is_resharding = self.machine.is_resharding
            recovered, expected = (
                process.recoverable_state(is_resharding)
                for process in (self, self.previous_process)
            )
            check(recovered == expected, "recovered state {} differs from {}", recovered, expected)

    def recoverable_state(self, is_resharding: bool) -> Any:
        """Return the state that a recovery must restore.

        is_resharding: leave out the new partition, which the reshard builds again.
        """
        state, machine = self.engine.live.state, self.machine
        frozen: Any = state.frozen
        if is_resharding:
            return (
                {**machine.state(), "moving": True},
                (frozen.index, frozen.shards, frozen.store.weights) if frozen else None,
            )
        staged = {  # the log does not contain the gradient of a bad push
            key: bytes(each.staging.contents[0])
            for key, each in state.staged.items()
            if not machine.staged[key].problem
        }
        return machine.state(), machine.staged, staged, self.weights

    # ---- resharding

    def build_partition(self, reshard: ReshardPhase, log_id: int) -> None:
        """Build the new partition if all shards of the previous shard count are up."""
        pending = self.engine.prepare_partition(reshard.index)
        if pending is None:
            return
        parts: list[list[float]] = []
        for source in self.world.shards[: reshard.before]:
            frozen: Any = source.engine.live.state.frozen
            if (
                not source.is_up
                or frozen is None
                or (frozen.log_id, frozen.index) != (log_id, reshard.index)
            ):
                return
            parts.append(frozen.store.weights)
        pending.store.restore(PartitionReader(parts))  # type: ignore[arg-type]
        self.engine.install_partition(pending)
