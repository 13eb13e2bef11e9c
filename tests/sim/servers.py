"""Shards of the simulated world: the shipped engine, state, logs, recovery and standby, over
floats and disks in memory.

A shard is a process: killing it discards its memory and keeps its disk.
"""

import json
from collections.abc import Iterator, Sequence
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
from psserver.durability.record_sink import RecordSink, RecordSource
from psserver.durability.shard_log import ShardLog
from psserver.durability.shard_state import LogUnfitError
from psserver.shard.engine import ShardEngine
from tests.sim.arrays import AllNumbers, SimSnapshots, SimStaging, SimStandbyState, SimStates
from tests.sim.disks import Disk, Saved, SimLink, SimStandby
from tests.sim.invariants import check, violation

if TYPE_CHECKING:
    from tests.sim.world import World


@contextmanager
def violations_only(shard: int) -> Iterator[None]:
    """Raise each error as a violated invariant."""
    try:
        yield
    except Exception as error:
        raise violation("shard {}: {!r}", shard, error) from error


class SimShard:
    """The process of one shard: its engine, and its messages to the coordinator.

    previous: the process before it, whose state a recovery must restore.
    has_recovered: it has tried to read its log.
    promoted: the replicated state that it began with.
    """

    def __init__(self, world: "World", shard: int, shards: int, disk: Disk) -> None:
        self.world, self.disk = world, disk
        self.up, self.has_recovered = True, False
        self.previous: SimShard | None = None
        self.promoted: SimStandbyState | None = None
        self.part: PartReport | None = None
        self.sent_reports = self.received_reports = 0
        self.instance, self.term = f"process {next(world.processes)}", 1
        # its connection to the coordinator begins with the first report that arrives
        self.directory: ShardDirectory[Saved] | None = None
        self.server, self.connection = ServerEntry(shard), None
        disk.shard_log.is_complete = False  # until this process begins a segment
        sink = RecordSink(
            RecordSource.SHARD,
            disk.shard_log if world.scenario.durable else None,  # type: ignore[arg-type]
            SimLink(disk),  # type: ignore[arg-type]
        )
        log = ShardLog(sink, shard)
        self.states = SimStates(shard, world.rng, SimSnapshots(world), log)  # type: ignore[arg-type]
        traffic: Any = SimpleNamespace(observers=())
        self.engine = ShardEngine(self.states.empty(shards), traffic, self.write_part, log)
        self.engine.request_report = self.send_report

    @property
    def machine(self) -> ShardMachine:
        return self.engine.live.machine

    @property
    def shards(self) -> int:
        return self.engine.live.shards

    @property
    def is_ready(self) -> bool:
        """Whether it follows a log."""
        return self.machine.log_id != NO_LOG

    @property
    def weights(self) -> list[float]:
        store: Any = self.engine.live.store
        return store.weights if store is not None else []

    # ---- pushes and entries

    def push(self, staged: Staged, numbers: Sequence[float], shards: int) -> None:
        """Receive a push that is meant for this number of shards."""
        store: Any = self.engine.live.store
        if store is not None and self.is_ready:
            with suppress(LayoutError, UnreachableError):
                self.engine.live.check_layout(shards)
                staging: Any = SimStaging(store, numbers, staged.key.seq == 0)
                self.engine.stage_push(staged, staging)

    def entries(self, log_id: int, entries: list[Entry]) -> None:
        with violations_only(self.machine.shard):
            self.engine.deliver(log_id, entries)

    def write_part(self, cut: Cut, store: Any) -> None:
        self.disk.parts[cut.index] = cut.version, list(store.weights)
        self.part = PartReport(cut.version, cut.index, "", 0, "")
        self.send_part()

    # ---- messages to the coordinator

    def send_report(self) -> None:
        if self.up:
            self.sent_reports += 1
            report, number, recovered = (
                self.engine.make_report(),
                self.sent_reports,
                self.has_recovered,
            )
            recorder = self.world.recorder
            self.world.send(
                lambda: self.world.recorder is recorder and self.arrive(report, number, recovered),
                self,
            )

    def arrive(self, report: ShardReport, number: int, recovered: bool) -> None:
        """Deliver a report to the coordinator, unless a later one has arrived: a connection keeps
        the order.
        """
        if number > self.received_reports:
            self.received_reports = number
            self.world.on_report(report, self, recovered)

    def send_part(self) -> None:
        """Report the part of a snapshot; repeated, because it may be lost on the way."""
        if (part := self.part) is not None:
            self.world.send(lambda: self.world.on_part(self.machine.shard, part), self)

    # ---- catching up; each action may arrive twice

    def follow(self, log_id: int, base: int = 0) -> None:
        if self.machine.log_id != log_id:
            shards = self.world.coordinator.shards
            self.engine.install(self.states.fresh(log_id, base, shards))

    def load(self, saved: Saved, log_id: int) -> None:
        if self.machine.log_id != log_id:
            shards = self.world.coordinator.shards
            self.engine.install(self.states.from_snapshot(log_id, saved, shards))  # type: ignore[arg-type]

    def adopt(self, state: str, reshard: ReshardPhase, log_id: int) -> None:
        if not self.is_ready:
            joining = self.states.joining(
                log_id, json.loads(state), self.world.model, reshard.shards
            )
            self.engine.install(joining)

    def recover(self, saved: Saved | None, log_id: int) -> None:
        if self.has_recovered:
            return
        self.has_recovered = True
        reshard = self.world.coordinator.reshard
        possible = {self.world.coordinator.shards, *([reshard.before] if reshard else [])}
        with suppress(LogUnfitError, SnapshotError):
            state = self.states.from_log(log_id, saved, possible)  # type: ignore[arg-type]
            self.engine.install(state, continues_log=True)
            self.check_is_previous()

    def take_over(self, standby: SimStandby) -> None:
        """Continue as the standby of the previous process."""
        if standby.lacks_records:
            self.previous = None
        elif dropped := standby.drop_unacknowledged(self.world.rng):
            self.previous = None  # until the coordinator sends these entries again
            self.disk.shard_log.drop(dropped)  # the previous process has written them
        with violations_only(self.machine.shard):
            self.promoted = SimStandbyState(self.world, self.machine.shard, standby)
        is_whole = not standby.lacks_records
        self.engine.install(self.promoted.shard_state, continues_log=is_whole)
        self.check_is_previous()

    def check_is_previous(self) -> None:
        if self.previous is not None:
            is_resharding = self.machine.is_resharding
            mine, theirs = (each.everything(is_resharding) for each in (self, self.previous))
            check(mine == theirs, "recovered {} is not {}", mine, theirs)

    def everything(self, is_resharding: bool) -> Any:
        """Return what a recovery must restore.

        is_resharding: leave out the new partition, which the reshard will build again.
        """
        state, machine = self.engine.live.state, self.machine
        frozen: Any = state.frozen
        if is_resharding:
            return (
                {**machine.state(), "moving": True},
                (frozen.index, frozen.shards, frozen.store.weights) if frozen else None,
            )
        staged = {  # the log has no numbers of a push with a problem
            key: bytes(each.staging.contents[0])
            for key, each in state.staged.items()
            if not machine.staged[key].problem
        }
        return machine.state(), machine.staged, staged, self.weights

    # ---- resharding

    def build_partition(self, reshard: ReshardPhase, log_id: int) -> None:
        """Build the new partition, if all shards that held the model before are up."""
        pending = self.engine.prepare_partition(reshard.index)
        if pending is None:
            return
        parts: list[list[float]] = []
        for source in self.world.shards[: reshard.before]:
            frozen: Any = source.engine.live.state.frozen
            if (
                not source.up
                or frozen is None
                or (frozen.log_id, frozen.index) != (log_id, reshard.index)
            ):
                return
            parts.append(frozen.store.weights)
        pending.store.restore(AllNumbers(parts))  # type: ignore[arg-type]
        self.engine.install_partition(pending)
