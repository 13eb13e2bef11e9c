"""Servers of the simulated world: the real machines, the duties of the shells around them, and
their disks.

A server is a process: killing it takes its memory, its disk stays. Server 0 is a shard and the
coordinator.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pscommon.core.log_entries import (
    Apply,
    Begin,
    Contribution,
    Cut,
    Entry,
    Measure,
    PushKey,
    Reshard,
    ShardReport,
    Staged,
)
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from psserver.core.commands.recorded import RecordedCommand
from psserver.core.commands.recorder import Recorder, replay
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.coordinator.server_entry import ServerEntry
from psserver.core.coordinator.shard_directory import ShardDirectory
from psserver.core.job.reshard_phase import ReshardPhase
from psserver.core.job.snapshot_schedule import PartReport
from psserver.core.workers.members import WorkerState
from tests.sim.disks import Disk, History, Saved, Segment, since
from tests.sim.mirror import Mirror

if TYPE_CHECKING:
    from tests.sim.world import World

UNITS = 3
"""Numbers in the model: each shard has as many as the others, or one more."""


def model_of(clip_norm: float | None) -> ModelSpec:
    return ModelSpec(
        (TensorSpec("w", (1,), "float64"),), OptimizerSettings("sgd", clip_norm=clip_norm)
    )


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


def gradient(number: int, base: int, unit: int) -> float:
    """Any deterministic function with a wild range of sizes."""
    return math.sin(number * 12.9898 + base * 4.1414 + unit * 78.233) * 10.0 ** (
        (number * 7 + unit * 3) % 19
    )


def part_of(whole: Sequence[float], shard: int, shards: int) -> list[float]:
    """What a shard has of it."""
    return list(whole[UNITS * shard // shards : UNITS * (shard + 1) // shards])


class SimShard:
    """A Shard with a few weights, and the shell's duties: keep bytes, write them down, carry out
    entries, report.

    shards: how many have its numbers; frozen: those from before a move, as long as others may
    need them.
    """

    def __init__(self, world: "World", shard: int, shards: int, disk: Disk) -> None:
        self.world = world
        self.machine = world.machine_class(shard)
        self.disk = disk
        self.shards = shards
        self.weights: list[float] = []
        self.frozen: tuple[int, int, list[float]] | None = (
            None  # index of the Reshard, shards, weights
        )
        self.kept: dict[PushKey, list[float]] = {}
        self.history: History = []
        self.part: PartReport | None = None
        self.replaying = False
        self.before: SimShard | None = None
        self.is_ready = self.has_recovered = False
        self.said = self.heard = 0
        self.instance, self.term = f"process {next(world.processes)}", 1
        # its line to the coordinator: it comes with the first report that arrives
        self.directory: ShardDirectory[Saved] | None = None
        self.server, self.connection = ServerEntry(shard), None
        self.up = True

    def start_log(self, version: int) -> None:
        """A new segment: the machine as it is, and what is staged."""
        if self.world.scenario.durable and not self.replaying:
            records = [
                self.push_record(self.machine.staged[key], self.kept[key])
                for key in self.machine.staged
            ]
            held = self.frozen[:2] if self.frozen is not None else None
            self.disk.log.append(
                Segment(version, json.dumps(self.machine.state()), records, self.shards, held)
            )

    def clear_log(self) -> None:
        """What came before is void, for a standby too."""
        self.disk.log.clear()
        self.void()

    def void(self) -> None:
        """What this shard holds now came by another way than the records that its standby has."""
        self.disk.mirror = None

    def write(self, record: Any) -> None:
        if self.world.scenario.durable and not self.replaying:
            self.disk.log[-1].records.append(record)
            if self.disk.mirror is not None:
                self.disk.mirror.tell("record", record)

    def push_record(self, staged: Staged, gradient: list[float]) -> Any:
        return staged, gradient

    def push(self, staged: Staged, gradient: list[float], shards: int) -> None:
        if self.fits(shards) and self.is_ready:
            if self.looks_at_norms():
                staged = replace(staged, square_norm=sum(value * value for value in gradient))
            self.stage(staged, gradient)

    def looks_at_norms(self) -> bool:
        """A shard that was just told of the model may not know yet that it is to."""
        return self.world.scenario.clip_norm is not None and self.world.rng.random() < 0.9

    def fits(self, shards: int) -> bool:
        """Is it cut for so many shards as there are?"""
        return shards == self.shards

    def stage(self, staged: Staged, gradient: list[float]) -> None:
        if not self.machine.offer(staged):
            return
        self.write(self.push_record(staged, gradient))
        self.kept[staged.key] = gradient
        self.send_report()

    def send_report(self) -> None:
        if self.up and not self.replaying:
            self.said += 1
            report, number, recovered = self.machine.report(), self.said, self.has_recovered
            recorder = self.world.recorder
            self.world.send(
                lambda: (
                    self.world.recorder is recorder and self.hear_report(report, number, recovered)
                ),
                self,
            )

    def send_part(self) -> None:
        """Its file of a snapshot is written. Said again and again: it may be lost on the way."""
        if (part := self.part) is not None:
            self.world.send(lambda: self.world.on_part(self.machine.shard, part), self)

    def hear_report(self, report: ShardReport, number: int, recovered: bool) -> None:
        """A line keeps the order of what is said on it."""
        if number > self.heard:
            self.heard = number
            self.world.on_report(report, self, recovered)

    def entries(self, log_id: int, entries: list[Entry]) -> None:
        for entry in self.machine.accept(log_id, entries):
            self.write(entry)
            self.carry_out(entry)
            self.machine.done(entry, self.measured(entry) if isinstance(entry, Measure) else 0.0)
            self.kept = {
                key: value for key, value in self.kept.items() if key in self.machine.staged
            }
            if isinstance(entry, Cut):
                self.start_log(entry.version)

    def carry_out(self, entry: Entry) -> None:
        if isinstance(entry, Apply):
            check(
                not self.machine.missing(entry),
                "shard {} lacks a push of {}",
                self.machine.shard,
                entry,
            )
            check(
                not self.machine.is_resharding,
                "shard {} has no numbers for {}",
                self.machine.shard,
                entry,
            )
            self.apply(entry)
            self.frozen = None  # every shard holds its new part
        elif isinstance(entry, Begin):
            self.weights = part_of([1.0] * UNITS, self.machine.shard, self.shards)
        elif isinstance(entry, Reshard):
            self.frozen = entry.index, self.shards, self.weights
            self.shards, self.weights = entry.shards, []
        elif isinstance(entry, Cut) and not self.replaying and not self.machine.is_resharding:
            self.disk.parts[entry.index] = list(self.weights), list(self.history)
            self.part = PartReport(entry.version, entry.index, "", 0, "")
            self.send_part()

    def measured(self, entry: Measure) -> float:
        check(
            not self.machine.missing(entry),
            "shard {} lacks a push of {}",
            self.machine.shard,
            entry,
        )
        check(
            not self.machine.is_resharding,
            "shard {} has no numbers for {}",
            self.machine.shard,
            entry,
        )
        return sum(mean * mean for mean in self.averages(entry.contributions))

    def apply(self, entry: Apply) -> None:
        means = self.averages(entry.contributions)
        check(
            len(means) == len(self.weights),
            "{} gradients for {} weights",
            len(means),
            len(self.weights),
        )
        self.weights = [weight - mean for weight, mean in zip(self.weights, means, strict=True)]
        self.history.append(tuple(c.key for c in entry.contributions))

    def averages(self, contributions: Sequence[Contribution]) -> list[float]:
        total = sum(c.samples for c in contributions)
        shares = [(self.kept[c.key], c.samples / total * c.scale) for c in contributions]
        check(
            len({len(gradient) for gradient, _ in shares}) == 1,
            "pushes of different layouts in {}",
            contributions,
        )
        means = [0.0] * len(shares[0][0])
        for gradient, share in shares:
            means = [mean + value * share for mean, value in zip(means, gradient, strict=True)]
        return means

    # ---- another number of shards

    def move_in(self, reshard: ReshardPhase) -> None:
        """Make the new part of what the shards had before, if all who had it are there."""
        if not self.machine.is_resharding or self.machine.index < reshard.index:
            return
        if self.frozen is not None and self.frozen[0] != reshard.index:
            return  # of an earlier move: a line is in order, so no shard hears of one that late
        whole: list[float] = []
        for source in self.world.shards[: reshard.before]:
            if (
                not source.up
                or source.frozen is None
                or source.frozen[:2] != (reshard.index, reshard.before)
            ):
                return
            whole += source.frozen[2]
        self.weights = part_of(whole, self.machine.shard, self.shards)
        self.machine.finish_reshard()
        self.void()
        self.send_report()

    def adopt(self, state: str, history: History, reshard: ReshardPhase) -> None:
        """This shard is new: it knows what another one knows."""
        if self.is_ready:
            return  # told twice
        self.machine.adopt(json.loads(state))
        self.shards, self.history, self.is_ready = reshard.shards, list(history), True
        self.kept.clear()
        self.clear_log()
        self.start_log(self.machine.version)

    # ---- starting

    def load(self, saved: Saved, log_id: int) -> None:
        """Go on from a snapshot; the log of before is void."""
        if self.is_ready and self.machine.log_id == log_id:
            return  # told twice
        self.take_snapshot(saved, self.world.coordinator.shards)
        self.machine = self.world.machine_class(self.machine.shard)
        self.machine.restore(log_id, saved.version, saved.index)
        self.kept.clear()
        self.frozen = self.part = None
        self.clear_log()
        self.is_ready = True
        self.start_log(saved.version)

    def take_snapshot(self, saved: Saved, shards: int) -> None:
        """Its part of what any number of shards have written."""
        parts = [disk.parts[saved.index] for disk in self.world.disks[: saved.shards]]
        whole = [weight for weights, _ in parts for weight in weights]
        self.shards, self.weights = shards, part_of(whole, self.machine.shard, shards)
        self.history = list(parts[0][1])

    def follow(self, log_id: int, base: int = 0) -> None:
        """A log that begins, as far as this shard goes."""
        if self.is_ready and self.machine.log_id == log_id:
            return  # told twice
        self.weights, self.history, self.shards = [], [], self.world.coordinator.shards
        self.machine = self.world.machine_class(self.machine.shard)
        self.machine.follow(log_id, base)
        self.kept.clear()
        self.frozen = self.part = None
        self.clear_log()
        self.is_ready = True
        self.start_log(0)

    def recover(self, saved: Saved | None, log_id: int) -> None:
        """Be what this shard was: the snapshot, and its own log on top of it, if the log goes
        with it.
        """
        if self.has_recovered:
            return  # told twice
        self.has_recovered = True
        segments = since(self.disk.log, saved.version if saved else None)
        if not segments:
            return
        first, base = segments[0], json.loads(segments[0].base)
        if base["epoch"] != log_id or (saved is None and base["begun"]):
            return
        if saved is not None:
            in_move = first.held is not None and first.held[0] > saved.index
            self.take_snapshot(saved, first.held[1] if in_move else first.shards)
            if in_move:
                self.frozen, self.weights = (*first.held, self.weights), []
            base["moving"] = in_move
        records = [record for segment in segments for record in segment.records]
        self.replay(json.dumps(base), first.shards, records)

    def take_over(self, mirror: Mirror) -> None:
        """Be the standby, which now is the shard. It may lack entries that were carried out and
        not reported yet.
        """
        if mirror.lacks:
            return self.go_on_as(mirror)
        records, told = (
            mirror.told("record"),
            self.world.coordinator.log.reached_by(self.machine.shard),
        )
        while records and not isinstance(records[-1], (tuple, Cut)) and records[-1].index > told:
            if self.world.rng.random() < 0.5:
                break
            records.pop()
            self.disk.log[-1].records.pop()  # what the dead one has written is not this one's log
            # the coordinator will tell them again: until then this is not what the dead one was
            self.before = None
        self.weights, self.history = list(mirror.weights), list(mirror.history)
        return self.replay(mirror.state, mirror.shards, [*mirror.staged, *records])

    def go_on_as(self, mirror: Mirror) -> None:
        """Whatever it lacks; what the dead one has written is of no use then, before there is
        another snapshot.
        """
        self.before = None
        self.weights, self.history = list(mirror.weights), list(mirror.history)
        self.disk.log = []
        self.replay(mirror.state, mirror.shards, [*mirror.staged, *mirror.told("record")])

    def replay(self, base: str, shards: int, records: list[Any]) -> None:
        """From this state on, of so many shards, all of this."""
        self.shards = shards
        self.recover_machine(json.loads(base))
        self.replaying = self.is_ready = True
        for record in records:
            if isinstance(record, tuple):
                self.stage(*record)
            else:
                self.entries(self.machine.log_id, [record])
        self.replaying = False
        self.start_log(self.machine.version)
        if self.before is not None:
            mine, theirs = (
                shard.everything(self.machine.is_resharding) for shard in (self, self.before)
            )
            check(mine == theirs, "recovered {} is not {}", mine, theirs)

    def everything(self, is_resharding: bool) -> Any:
        """Return what recovery from the log must restore.

        is_resharding: leave out the new partition, which the reshard will build again.
        """
        state = self.machine.state()
        if is_resharding:
            return {**state, "moving": True}, self.frozen, self.history
        return state, self.machine.staged, self.kept, self.weights, self.history

    def recover_machine(self, state: dict[str, Any]) -> None:
        self.machine.recover(state)


def check_decision(apply: Apply, coordinator: CoordinatorMachine) -> None:
    """Is it what the policy promises?"""
    row = coordinator.policy
    active = {m.worker: m.clock for m in coordinator.membership if m.state is WorkerState.ACTIVE}
    counted = [c.key.worker for c in apply.contributions]
    check(
        set(counted) <= set(active),
        "version {} counts workers {} of {}",
        apply.version,
        counted,
        active,
    )
    if row.barrier:
        least = max(1, len(active) - row.backup)
        check(len(counted) >= least, "round {} has {} of {}", apply.version, counted, list(active))
    elif row.bound is not None:
        for worker in counted:
            active[worker] += 1
        clocks = list(active.values())
        check(max(clocks) - min(clocks) <= row.bound, "clocks {} at bound {}", clocks, row.bound)


def watch(coordinator: CoordinatorMachine) -> None:
    """Check each decision as it is made."""
    append = coordinator.log.append

    def watched(entry: Entry) -> None:
        if isinstance(entry, Apply):
            check_decision(entry, coordinator)
        append(entry)

    coordinator.log.append = watched  # type: ignore[method-assign]


def recovered_coordinator(world: "World", disk: Disk, saved: Saved | None) -> Recorder:
    """The coordinator made again from the snapshot and what was asked of it since."""
    segments = since(disk.job, saved.version if saved else None)
    coordinator = world.new_coordinator(json.loads(segments[0].base)["epoch"], segments[0].shards)
    if saved is not None:
        coordinator.load_state(json.loads(segments[0].base), world.model, world.now, saved.index)
    for segment in segments:
        replay(
            coordinator,
            (RecordedCommand.from_json(json.loads(record)) for record in segment.records),
        )
    watch(coordinator)
    return Recorder(coordinator, world.recorder.journal)


def promoted_coordinator(world: "World", mirror: Mirror) -> Recorder:
    """The coordinator that the standby of shard 0 has followed."""
    coordinator = world.new_coordinator(-1, mirror.shards)
    whole = json.loads(mirror.whole)
    coordinator.load_state(whole, world.model if whole["model"] else None, world.now)
    replay(
        coordinator,
        (RecordedCommand.from_json(json.loads(command)) for command in mirror.told("command")),
    )
    watch(coordinator)
    return Recorder(coordinator, world.recorder.journal)
