"""A whole cluster in one thread: the real machines over a network that delays, drops, repeats
and reorders.

A seed decides everything. Gradients are floats of very different sizes, so that another order of
sums gives other bits. Each invariant of ARCHITECTURE.md is checked, as far as possible from the
world's own record of who pushed what.
"""

import heapq
import json
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from pscommon.core.data_loop import LoopSpec
from pscommon.core.errors import FencedError
from pscommon.core.log_entries import Apply, Entry, Measure, PushKey, Reject, ShardReport
from psserver.core.commands.data_commands import ReturnBatches
from psserver.core.commands.job_commands import FinishSnapshot, RecordPart
from psserver.core.commands.recorder import Recorder
from psserver.core.commands.shard_commands import (
    DropShardReports,
    FinishReshard,
    RestartShard,
    StartReshard,
)
from psserver.core.commands.waiting import waiting_for
from psserver.core.coordinator.catch_up import CatchUp, choose_catch_up
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.settings import JobRules
from psserver.core.job.snapshot_schedule import PartReport, SnapshotInterval
from psserver.core.shard.state_machine import NO_LOG, PushOutcome, ShardMachine
from psserver.core.workers.members import WorkerHeartbeat
from tests.sim import verdict
from tests.sim.disks import Disk, JobJournal, Saved
from tests.sim.faults import Faults
from tests.sim.invalid_requests import Faulty
from tests.sim.scenario import HORIZON, LEASE, Scenario
from tests.sim.server_failures import ServerFailures
from tests.sim.servers import (
    UNITS,
    InvariantError,
    Push,
    SimShard,
    check,
    model_of,
    watch,
)
from tests.sim.workers import SimWorker


@dataclass
class World(Faults, ServerFailures):
    """The cluster, its clock and its network."""

    scenario: Scenario
    coordinator_class: type[CoordinatorMachine] = Faulty
    shard_class: type[SimShard] = SimShard
    machine_class: type[ShardMachine] = ShardMachine
    journal_class: type[JobJournal] = JobJournal
    now: float = 0.0
    queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    pushes: dict[PushKey, Push] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.scenario.seed * 7919 + 1)
        self.model = model_of(self.scenario.clip_norm)
        self.loop = LoopSpec(0, self.scenario.batches, 1, self.scenario.epochs, False, True, 0)
        self._count = self.to_come = self.messages = self.restarts = self.rollbacks = (
            self.takeovers
        ) = 0
        self.proofs = 0
        self.generation = self._flushed = 0
        self.decided: list[Apply] = []
        self.dropped: list[Reject] = []
        self.saved: Saved | None = None
        self.perfect = self.is_over = False
        self.is_measuring = False
        # what has come between a Measure and the next update
        self.amid_measures: Counter[str] = Counter()
        self.layout = self.scenario.shards
        self.moves = 0
        self.disks = [Disk() for _ in range(UNITS)]
        self.down: set[int] = set()
        self.recorder = self.new_recorder(0)
        self.shards = [self.new_shard(shard) for shard in range(self.layout)]
        for shard in self.shards:
            shard.follow(0)
        self.workers = [SimWorker(self, rank) for rank in range(self.scenario.workers)]
        self.tick()
        self.plan_faults()

    def plan_faults(self) -> None:
        scenario = self.scenario
        faults: list[tuple[int, Callable[[], None]]] = [
            (scenario.worker_kills, self.kill_worker),
            (scenario.server_kills, self.kill_server),
            (scenario.pauses, self.pause_worker),
            (scenario.hangs, self.hang_worker),
            (scenario.drains, self.drain_worker),
            (scenario.switches, self.switch_policy),
            (scenario.standbys, self.attach_standby),
            (scenario.reshards, self.reshard),
            (scenario.absurd, self.send_absurd_requests),
        ]
        for count, fault in faults:
            for _ in range(count):
                self.after(self.rng.random() * 20, fault)

    def new_shard(self, number: int) -> SimShard:
        return self.shard_class(self, number, self.layout, self.disks[number])

    def new_coordinator(self, epoch: int, shards: int) -> CoordinatorMachine:
        scenario = self.scenario
        # some may have ended before all went back
        wanted = 1 if self.rollbacks else scenario.workers
        rules = JobRules(
            scenario.policy,
            wanted,
            LEASE,
            SnapshotInterval(steps=scenario.every),
            scenario.on_loss,
            bad_gradients="skip",
            progress_timeout=scenario.progress_timeout,
        )
        return self.coordinator_class(shards, rules, epoch)

    def new_recorder(self, epoch: int) -> Recorder:
        coordinator = self.new_coordinator(epoch, self.layout)
        watch(coordinator)
        journal = (
            self.journal_class(self.disks[0], epoch, self.layout) if self.scenario.durable else None
        )
        return Recorder(coordinator, journal)

    @property
    def coordinator(self) -> CoordinatorMachine:
        return self.recorder.coordinator

    @property
    def all_ready(self) -> bool:
        """Has every shard weights, of the coordinator's epoch?"""
        machines = [shard.machine for shard in self.shards[: self.layout] if shard.is_ready]
        fit = [m.begun and not m.moving and m.epoch == self.coordinator.epoch for m in machines]
        return not self.down and len(fit) == self.layout and all(fit)

    @property
    def weights(self) -> list[float]:
        return [weight for shard in self.shards for weight in shard.weights]

    @property
    def is_inexact(self) -> bool:
        """May bits differ from a run with another number of shards? A norm is the sum of what
        each shard measures.
        """
        return self.scenario.clip_norm is not None and self.moves > 0

    def is_bad(self, number: int) -> bool:
        return self.scenario.bad > 0 and number % self.scenario.bad == 1

    # ---- time and network

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self.queue, (self.now + seconds, self._count, action))

    def send(self, deliver: Callable[[], None], server: SimShard) -> None:
        """To or from a server, over the network: late, perhaps twice, perhaps never; its death
        breaks the line.
        """
        rng = self.rng

        def arrive() -> None:
            if server.up:
                deliver()

        self.messages += 1
        if self.perfect:
            return arrive()
        if not server.up or rng.random() < self.scenario.loss:
            return None
        self.after(rng.random() * 0.2, arrive)
        if rng.random() < self.scenario.loss:
            self.after(rng.random() * 2.0, arrive)
        return None

    def run(self) -> None:
        queue = self.queue
        while not self.is_over:
            if self.now > HORIZON:
                raise InvariantError(f"no progress: {waiting_for(self.coordinator, self.now)}")
            self.now, _, action = heapq.heappop(queue)
            action()
        if self.scenario.durable or not (
            self.down or any(not shard.is_ready for shard in self.shards)
        ):
            self.settle()
            self.verify()

    def settle(self) -> None:
        """Start what is down, and let every shard catch up over a perfect network."""
        for number in list(self.down):
            self.start_server(number)
        self.perfect = True
        for _ in range(20):
            self.look()
            if self.is_settled:
                return
        raise InvariantError(f"no rest: {self.coordinator.move}")

    @property
    def is_settled(self) -> bool:
        """Does every shard stand where the log ends?"""
        where = self.coordinator.epoch, self.coordinator.log.index
        there = all(
            shard.is_ready and (shard.machine.epoch, shard.machine.index) == where
            for shard in self.shards
        )
        return there and self.coordinator.move is None

    # ---- the shell of the coordinator

    def tick(self) -> None:
        self.look()
        self.after(1.0, self.tick)

    def look(self) -> None:
        """What everybody does once a second."""
        if 0 not in self.down:
            self.recorder.tick(self.now)
            self.flush()
            if self.coordinator.cuts.finished is not None:
                self.on_snapshot()
        for shard in list(self.shards):
            shard.send_report()
            if self.coordinator.cuts.cutting is not None:
                shard.send_part()

    def on_beat(self, sender: SimWorker, worker: int, no_call_seconds: float) -> None:
        try:
            self.coordinator.job.member(worker, self.now).update(
                WorkerHeartbeat(no_call_seconds=no_call_seconds)
            )
        except FencedError:
            self.send(lambda: sender.later(0.0, lambda: sender.fenced(worker)), self.shards[0])

    def on_report(self, report: ShardReport, shard: SimShard) -> None:
        if 0 in self.down or not shard.up or (shard.is_ready and report.epoch == NO_LOG):
            return
        if (
            shard.is_ready
            and report.epoch == self.coordinator.epoch
            and self.goes_on(shard, report)
        ):
            self.recorder.report(report, self.now)
            self.flush()
            self.tell(shard, self.coordinator.entries_after(report.index))
            if (
                (move := self.coordinator.move) is not None
                and report.moving
                and report.shard < move.shards
            ):
                self.send(lambda: shard.move_in(move), shard)
        else:
            self.introduce(shard, report)

    def goes_on(self, shard: SimShard, report: ShardReport) -> bool:
        """Does what it has belong to the log of now? Asked when the two meet."""
        if shard.met is not self.recorder and self.coordinator.log.can_go_on(report):
            shard.met = self.recorder
            if not shard.is_known:
                shard.is_known = True
                self.recorder.do(RestartShard(report.shard), self.now)
            if self.scenario.lag:
                self.recorder.do(DropShardReports(report.shard), self.now)
        return shard.met is self.recorder

    def introduce(self, shard: SimShard, report: ShardReport) -> None:
        """A shard that does not follow the log of now is told how it can."""
        coordinator = self.coordinator
        if not shard.is_ready and not shard.is_known:
            shard.is_known = True
            self.recorder.do(RestartShard(report.shard), self.now)
        way = choose_catch_up(
            coordinator,
            report,
            not shard.is_ready,
            self.scenario.durable and not shard.asked,
            self.saved is not None and self.rollbacks > 0,
        )
        saved, epoch = self.saved, coordinator.epoch
        action: Callable[[], None]
        if way is CatchUp.RECOVER:
            action = lambda: shard.recover(saved, epoch)  # noqa: E731
        elif way is CatchUp.RESTORE:
            assert saved is not None
            action = lambda: shard.load(saved, epoch)  # noqa: E731
        elif way is CatchUp.BEGIN:
            self.recorder.do(DropShardReports(shard.machine.shard), self.now)
            base = coordinator.log.base
            action = lambda: shard.follow(epoch, base)  # noqa: E731
        elif way is CatchUp.ADOPT:
            donor, move = self.shards[0], coordinator.move
            assert move is not None
            if donor.machine.index < move.index:
                return None
            state, history = json.dumps(donor.machine.state()), list(donor.history)
            action = lambda: shard.adopt(state, history, move)  # noqa: E731
        elif way is CatchUp.GO_BACK:
            return self.go_back()
        else:
            return None
        return self.send(action, shard)

    def on_part(self, shard: int, part: PartReport) -> None:
        if 0 not in self.down:
            self.recorder.do(RecordPart(shard, part), self.now)

    def on_snapshot(self) -> None:
        cutting = self.coordinator.cuts.finished
        assert cutting is not None
        self.saved = Saved(
            cutting.version,
            cutting.index,
            json.dumps(cutting.state),
            self.coordinator.shards,
            tuple(self.decided[: cutting.version]),
            tuple(reject for reject in self.dropped if reject.index <= cutting.index),
        )
        self.recorder.do(FinishSnapshot(), self.now)
        if self.coordinator.move is not None:
            self.recorder.do(FinishReshard(), self.now)
        for number, disk in enumerate(self.disks):
            # who still reads its log, hears of it later
            if number >= len(self.shards) or self.shards[number].is_ready:
                disk.log = [
                    segment for segment in disk.log if segment.version >= cutting.version
                ] or disk.log[-1:]
            disk.job = [segment for segment in disk.job if segment.version >= cutting.version]
        self.flush()

    def flush(self) -> None:
        """Take note of new decisions and send them to all shards. Who is not needed any more,
        ends.
        """
        coordinator = self.coordinator
        if len(self.shards) > self.layout and coordinator.move is None:
            self.end_servers()
        if coordinator.log.index == self._flushed:
            return
        new = coordinator.entries_after(self._flushed)
        self._flushed = new[-1].index
        for entry in new:
            self.note(entry)
        for shard in self.shards:
            if shard.met is self.recorder:
                self.tell(shard, new)

    def tell(self, shard: SimShard, entries: list[Entry]) -> None:
        """What comes over the line to a coordinator that has died comes before the next line, or
        not at all.
        """
        recorder, epoch = self.recorder, self.coordinator.epoch

        def hear() -> None:
            if self.recorder is recorder or self.coordinator.epoch != epoch:
                shard.entries(epoch, entries)

        self.send(hear, shard)

    def note(self, entry: Entry) -> None:
        if self.is_measuring:
            self.amid_measures[type(entry).__name__.lower()] += 1
        if isinstance(entry, Apply | Measure):
            self.is_measuring = isinstance(entry, Measure)
        if isinstance(entry, Apply):
            check(
                entry.version == len(self.decided) + 1,
                "version {} after {}",
                entry.version,
                len(self.decided),
            )
            self.decided.append(entry)
        elif isinstance(entry, Reject) and entry.reason == "NON_FINITE":
            self.dropped.append(entry)

    def acknowledged(self, push: Push, outcome: PushOutcome | None) -> None:
        """A worker has been told how its push ended."""
        assert outcome is not None
        verdict.check_outcome(self, push, outcome)
        if outcome.status == "stale":
            batches, worker = list(push.staged.batches), push.staged.key.worker
            with suppress(FencedError):  # by now it may be out: it hears of that soon
                self.recorder.do(ReturnBatches(worker, batches), self.now)

    # ---- faults

    def reshard(self) -> None:
        """The model moves to another number of servers; those that come are up already. Somebody
        may die meanwhile.
        """
        if self.perfect or all(worker.done for worker in self.workers):
            return None
        shards = self.rng.choice(
            [number for number in range(1, UNITS + 1) if number != self.layout]
        )
        keeps = self.scenario.durable or self.rng.random() < 0.5
        if not self.all_ready or not self.recorder.do(StartReshard(shards, keeps), self.now):
            return self.after(0.5, self.reshard)
        self.layout, self.moves = shards, self.moves + 1
        self.shards += [self.new_shard(number) for number in range(len(self.shards), shards)]
        self.flush()
        if self.scenario.server_kills and self.rng.random() < 0.5:
            self.after(self.rng.random() * 3, self.kill_server)
        return None

    # ---- the checks

    def verify(self) -> None:
        """At the end."""
        verdict.verify(self)


def run(seed: int, **classes: type) -> World:
    """One seeded history. Replay a failure with: python -m tests.sim.replay SEED"""
    world = World(Scenario.for_seed(seed), **classes)  # type: ignore[arg-type]
    world.run()
    return world
