"""Servers of the simulated world: the real machines, the duties of the shells around them, and their disks.

A server is a process: killing it takes its memory, its disk stays. Server 0 is a shard and the coordinator.
"""

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pscommon.core.log import Apply, Begin, Cut, Entry, PushKey, Report, Staged
from pscommon.core.model import ModelSpec, OptimizerSpec, TensorSpec
from psserver.core.coordinator import Coordinator
from psserver.core.cuts import PartReport
from psserver.core.recorder import Command, Recorder, replay

if TYPE_CHECKING:
    from tests.sim.world import World

MODEL = ModelSpec((TensorSpec("w", (1,), "float64"),), OptimizerSpec("sgd"))


class InvariantError(AssertionError):
    """The machines did what they must never do."""


def check(holds: bool, message: str, *values: object) -> None:
    if not holds:
        raise InvariantError(message.format(*values))


@dataclass
class Push:
    """A push as its worker meant it."""

    staged: Staged
    rank: int
    gradients: tuple[float, ...]


def gradient(number: int, base: int, shard: int) -> float:
    """Any deterministic function with a wild range of sizes."""
    return math.sin(number * 12.9898 + base * 4.1414 + shard * 78.233) * 10.0 ** ((number * 7 + shard * 3) % 19)


@dataclass
class Segment:
    """A stretch of a log: the state that it goes on from, and what came then."""

    version: int
    base: str
    records: list[Any] = field(default_factory=list)


@dataclass
class Disk:
    """What survives a server. parts: by version, weight and history; log and job: of the shard and the coordinator."""

    parts: dict[int, tuple[float, list[tuple[PushKey, ...]]]] = field(default_factory=dict)
    log: list[Segment] = field(default_factory=list)
    job: list[Segment] = field(default_factory=list)


@dataclass
class Saved:
    """A complete snapshot: what the manifest says."""

    version: int
    index: int
    state: str


class JobJournal:
    """The coordinator's part of a disk."""

    def __init__(self, disk: Disk, epoch: int) -> None:
        self.disk = disk
        disk.job = [Segment(0, json.dumps({"epoch": epoch}))]

    def write(self, command: Command) -> None:
        self.disk.job[-1].records.append(json.dumps(command.as_json()))

    def rotate(self, coordinator: Coordinator) -> None:
        cutting = coordinator.cuts.cutting
        assert cutting is not None
        self.disk.job.append(Segment(cutting.version, json.dumps(cutting.state)))


class SimShard:
    """A Shard with one weight, and the shell's duties: keep bytes, write them down, carry out entries, report."""

    def __init__(self, world: "World", shard: int, disk: Disk) -> None:
        self.world = world
        self.machine = world.machine_class(shard)
        self.disk = disk
        self.weight = 0.0
        self.kept: dict[PushKey, float] = {}
        self.history: list[tuple[PushKey, ...]] = []
        self.replaying = False
        self.before: SimShard | None = None
        self.is_ready = self.asked = False
        self.said = self.heard = 0

    @property
    def up(self) -> bool:
        """Does this process live? Another one may have taken its place."""
        number = self.machine.shard
        return number not in self.world.down and self.world.shards[number] is self

    def start_log(self, version: int) -> None:
        """A new segment: the machine as it is, and what is staged."""
        if self.world.scenario.durable and not self.replaying:
            records = [self.push_record(self.machine.staged[key], self.kept[key]) for key in self.machine.staged]
            self.disk.log.append(Segment(version, json.dumps(self.machine.state()), records))

    def write(self, record: Any) -> None:
        if self.world.scenario.durable and not self.replaying:
            self.disk.log[-1].records.append(record)

    def push_record(self, staged: Staged, gradient: float) -> Any:
        return staged, gradient

    def push(self, staged: Staged, gradient: float) -> None:
        if not self.is_ready or not self.machine.offer(staged):
            return
        self.write(self.push_record(staged, gradient))
        self.kept[staged.key] = gradient
        self.send_report()

    def send_report(self) -> None:
        if self.up and not self.replaying:
            self.said += 1
            report, number = self.machine.report(), self.said
            self.world.send(lambda: self.hear_report(report, number), self)

    def hear_report(self, report: Report, number: int) -> None:
        """A line keeps the order of what is said on it."""
        if number > self.heard:
            self.heard = number
            self.world.on_report(report, self)

    def entries(self, epoch: int, entries: list[Entry]) -> None:
        for entry in self.machine.accept(epoch, entries):
            self.write(entry)
            self.carry_out(entry)
            self.machine.done(entry)
            self.kept = {key: value for key, value in self.kept.items() if key in self.machine.staged}
            if isinstance(entry, Cut):
                self.start_log(entry.version)

    def carry_out(self, entry: Entry) -> None:
        if isinstance(entry, Apply):
            check(not self.machine.missing(entry), "shard {} lacks a push of {}", self.machine.shard, entry)
            self.apply(entry)
        elif isinstance(entry, Begin):
            self.weight = 1.0
        elif isinstance(entry, Cut) and not self.replaying:
            self.disk.parts[entry.version] = (self.weight, list(self.history))
            part = PartReport(entry.version, "", 0, "")
            self.world.send(lambda: self.world.on_part(self.machine.shard, part), self)

    def apply(self, entry: Apply) -> None:
        total = sum(c.samples for c in entry.contributions)
        self.weight -= self.average(entry, total)
        self.history.append(tuple(c.key for c in entry.contributions))

    def average(self, entry: Apply, total: int) -> float:
        value = 0.0
        for contribution in entry.contributions:
            value += self.kept[contribution.key] * (contribution.samples / total)
        return value

    # ---- starting

    def load(self, saved: Saved, epoch: int) -> None:
        """Go on from a snapshot; the log of before is void."""
        if self.is_ready and self.machine.epoch == epoch:
            return  # told twice
        self.weight, history = self.disk.parts[saved.version]
        self.history = list(history)
        self.machine = self.world.machine_class(self.machine.shard)
        self.machine.restore(epoch, saved.version, saved.index)
        self.kept.clear()
        self.disk.log.clear()
        self.is_ready = True
        self.start_log(saved.version)

    def follow(self, epoch: int, base: int = 0) -> None:
        """A log that begins, as far as this shard goes."""
        if self.is_ready and self.machine.epoch == epoch:
            return  # told twice
        self.weight, self.history = 0.0, []
        self.machine = self.world.machine_class(self.machine.shard)
        self.machine.follow(epoch, base)
        self.kept.clear()
        self.disk.log.clear()
        self.is_ready = True
        self.start_log(0)

    def recover(self, saved: Saved | None, epoch: int) -> None:
        """Be what this shard was: the snapshot, and its own log on top of it, if the log goes with it."""
        version = saved.version if saved else 0
        segments = [segment for segment in self.disk.log if segment.version >= version]
        if self.asked:
            return  # told twice
        self.asked = True
        if not segments or segments[0].version != version or json.loads(segments[0].base)["epoch"] != epoch:
            return
        self.weight, history = self.disk.parts[version] if saved else (0.0, [])
        self.history = list(history)
        self.recover_machine(json.loads(segments[0].base))
        self.replaying = self.is_ready = True
        for segment in segments:
            for record in segment.records:
                if isinstance(record, tuple):
                    self.push(*record)
                else:
                    self.entries(epoch, [record])
        self.replaying = False
        if self.before is not None:
            mine, theirs = self.everything(), self.before.everything()
            check(mine == theirs, "recovered {} is not {}", mine, theirs)

    def everything(self) -> Any:
        """What a shard that is made again from its log has to be."""
        return self.machine.state(), self.machine.staged, self.kept, self.weight, self.history

    def recover_machine(self, state: dict[str, Any]) -> None:
        self.machine.recover(state)


def watch(world: "World", coordinator: Coordinator) -> None:
    """Let the world check each decision as it is made."""
    append = coordinator.log.append

    def watched(entry: Entry) -> None:
        if isinstance(entry, Apply):
            world.check_decision(entry, coordinator)
        append(entry)

    coordinator.log.append = watched  # type: ignore[method-assign]


def recovered_coordinator(world: "World", disk: Disk, saved: Saved | None) -> Recorder:
    """The coordinator made again from the snapshot and what was asked of it since."""
    version = saved.version if saved else 0
    segments = [segment for segment in disk.job if segment.version >= version]
    coordinator = world.new_coordinator(json.loads(disk.job[0].base)["epoch"])
    if saved is not None:
        coordinator.recover(json.loads(saved.state), MODEL, world.now)
    for segment in segments:
        replay(coordinator, (Command.from_json(json.loads(record)) for record in segment.records))
    watch(world, coordinator)
    return Recorder(coordinator, world.recorder.journal)
