"""A whole cluster in one thread: the real machines over a network that delays, drops, repeats
and reorders.

A seed decides everything. Gradients are floats of very different sizes, so that another order of
sums gives other bits. Each invariant of ARCHITECTURE.md is checked, as far as possible from the
world's own record of who pushed what.
"""

import heapq
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace

from pscommon.core.data_loop import LoopSpec
from pscommon.core.errors import FencedError, MismatchError
from pscommon.core.log_entries import Apply, Entry, Measure, PushKey, Reject, ShardReport
from psserver.core.commands.data_commands import ReturnBatches
from psserver.core.commands.job_commands import RecordPart
from psserver.core.commands.recorder import RESHARD_SNAPSHOT_RETRY_SECONDS
from psserver.core.commands.waiting import waiting_for
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.settings import JobRules
from psserver.core.job.snapshot_schedule import PartReport, SnapshotInProgress, SnapshotInterval
from psserver.core.reports.collectives import CollectiveValues
from psserver.core.servers.catch_up import CatchUp
from psserver.core.servers.server_entry import DeliveryCursor
from psserver.core.servers.shard_directory import ShardDirectory
from psserver.core.servers.shard_protocol import (
    finish_snapshot,
    process_report,
    replace_process,
    start_reshard,
)
from psserver.core.shard.state_machine import NO_LOG, PushOutcome
from psserver.core.workers.members import WorkerHeartbeat
from psserver.durability.initial_state import InitialState, Origin
from tests.sim import verdict
from tests.sim.arrays import UNITS, model_of
from tests.sim.disks import Disk, Saved
from tests.sim.faults import Faults
from tests.sim.invalid_requests import Faulty
from tests.sim.invariants import InvariantError, check
from tests.sim.scenario import HORIZON, LEASE, Scenario
from tests.sim.server_failures import ServerFailures
from tests.sim.servers import SimShard
from tests.sim.workers import Push, SimWorker


@dataclass
class World(Faults, ServerFailures):
    """The cluster, its clock and its network."""

    scenario: Scenario
    coordinator_class: type[CoordinatorMachine] = Faulty
    shard_class: type[SimShard] = SimShard
    now: float = 0.0
    queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    pushes: dict[PushKey, Push] = field(default_factory=dict)
    results: dict[tuple[int, int], CollectiveValues] = field(default_factory=dict)

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
        self.processes = itertools.count()
        self.counts = SimpleNamespace(shards=self.scenario.shards, changes=0, past=set[int]())
        self.moves = 0
        self.disks = [Disk() for _ in range(UNITS)]
        self.down: set[int] = set()
        self.directory = self.new_directory()
        self.install(InitialState(Origin.FRESH, self.new_coordinator(0, self.layout)))
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

    def rules(self) -> JobRules:
        scenario = self.scenario
        # some may have ended before all went back
        wanted = 1 if self.rollbacks else scenario.workers
        return JobRules(
            scenario.policy,
            wanted,
            LEASE,
            SnapshotInterval(steps=scenario.every),
            scenario.on_loss,
            bad_gradients="skip",
            progress_timeout=scenario.progress_timeout,
        )

    def new_coordinator(self, log_id: int, shards: int) -> CoordinatorMachine:
        return self.coordinator_class(shards, self.rules(), log_id)

    def new_directory(self) -> ShardDirectory[Saved]:
        """Return what a new process of server 0 knows of the others."""
        return ShardDirectory[Saved](self.counts, "server 0")

    @property
    def layout(self) -> int:
        """Number of shards that the job has, or will have after a move."""
        return int(self.counts.shards)

    def store_count(self, shards: int) -> None:
        self.counts.past |= {self.counts.shards}
        self.counts.shards, self.counts.changes = shards, self.counts.changes + 1

    @property
    def coordinator(self) -> CoordinatorMachine:
        return self.recorder.coordinator

    @property
    def all_ready(self) -> bool:
        """Has every shard weights, of the coordinator's epoch?"""
        machines = [shard.machine for shard in self.shards[: self.layout] if shard.is_ready]
        fit = [
            m.begun and not m.is_resharding and m.log_id == self.coordinator.log_id
            for m in machines
        ]
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
            if self.coordinator.reshard is not None:
                self.now += RESHARD_SNAPSHOT_RETRY_SECONDS  # its snapshot may have failed
            self.advance()
            if self.is_settled:
                return
        raise InvariantError(f"no rest: {self.coordinator.reshard}")

    @property
    def is_settled(self) -> bool:
        """Does every shard stand where the log ends?"""
        where = self.coordinator.log_id, self.coordinator.log.index
        there = all(
            shard.is_ready and (shard.machine.log_id, shard.machine.index) == where
            for shard in self.shards
        )
        return there and self.coordinator.reshard is None

    # ---- the shell of the coordinator

    def tick(self) -> None:
        self.advance()
        self.after(1.0, self.tick)

    def advance(self) -> None:
        """Run what coordinator and shards do once a second."""
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

    def connect(self, shard: SimShard) -> None:
        """A server comes to the coordinator, which may not know its process yet."""
        self.directory.release_leavers(self.coordinator)
        number, followed = shard.machine.shard, shard.machine.log_id != NO_LOG
        shard.directory, replaces = self.directory, False
        if number == 0:
            shard.server, shard.connection = self.directory[0], None
        else:
            shard.server, replaces = self.directory.connect(
                number, self.layout, f"server {number}", shard.instance, followed, shard.term
            )
            shard.connection = shard.server.connection
        if replaces:
            replace_process(self.recorder, self.directory, shard.server, self.now)

    def on_report(self, report: ShardReport, shard: SimShard, has_recovered: bool) -> None:
        if 0 in self.down or not shard.up:
            return None
        if shard.directory is not self.directory:
            try:
                self.connect(shard)
            except MismatchError:  # a standby that took over does not know of its reshard
                return self.end_servers()
        server = shard.server
        if has_recovered and server.catch_up is CatchUp.RECOVER:
            self.directory.end_catch_up(server)
        catch_up = process_report(
            self.recorder,
            self.directory,
            server,
            shard.connection,
            report,
            self.now,
            self.scenario.durable,
        )
        if catch_up is CatchUp.GO_BACK:
            return self.go_back()
        self.flush()
        return self.deliver(shard, DeliveryCursor(report.log_id, report.index))

    def set_model(self) -> None:
        """Tell each shard the model; a push that arrives first waits for it."""
        model = self.coordinator.model
        for shard in self.shards if model is not None else ():
            if shard.up and shard.is_ready and shard.engine.live.state.model is None:
                shard.engine.set_model(model)

    def deliver(self, shard: SimShard, cursor: DeliveryCursor) -> None:
        """Send a server what it has not received yet."""
        coordinator, recorder, reshard = self.coordinator, self.recorder, self.coordinator.reshard
        delivery = self.directory.next_delivery(shard.server, cursor, coordinator)
        if delivery is None:
            return
        action = self.action(shard, delivery.catch_up)
        log_id, entries = coordinator.log_id, delivery.entries

        def hear() -> None:
            """What comes over the line to a coordinator that has died comes before the next line,
            or not at all.
            """
            action()
            if self.recorder is recorder or self.coordinator.log_id == log_id:
                shard.entries(log_id, entries)
                if (
                    reshard is not None
                    and reshard is self.coordinator.reshard
                    and (shard.machine.shard < reshard.shards)
                ):
                    shard.build_partition(reshard, log_id)

        self.send(hear, shard)

    def action(self, shard: SimShard, catch_up: CatchUp) -> Callable[[], None]:
        """What a server does before it follows the log, with what is sent for it."""
        log_id, base = self.coordinator.log_id, self.coordinator.log.base
        newest, first, reshard = self.saved, self.directory.snapshot, self.coordinator.reshard
        donor = self.shards[0]
        if catch_up is CatchUp.RECOVER:
            return lambda: shard.recover(newest, log_id)
        if catch_up is CatchUp.RESTORE and first is not None:
            return lambda: shard.load(first, log_id)
        if catch_up is CatchUp.BEGIN:
            return lambda: shard.follow(log_id, base)
        if (
            catch_up is CatchUp.ADOPT
            and reshard is not None
            and donor.machine.index >= reshard.index
        ):
            state = json.dumps(donor.machine.state())
            return lambda: shard.adopt(state, reshard, log_id)
        return lambda: None

    def on_part(self, shard: int, part: PartReport) -> None:
        if 0 not in self.down:
            self.recorder.do(RecordPart(shard, part), self.now)

    def on_snapshot(self) -> None:
        """All parts are written. The manifest is, too, unless the disk refuses it."""
        cutting = self.coordinator.cuts.finished
        assert cutting is not None
        is_written = self.perfect or self.rng.random() < 0.9
        if is_written:
            self.save(cutting)
        finish_snapshot(self.recorder, self.now, is_written, self.scenario.durable)
        self.flush()

    def save(self, cutting: SnapshotInProgress) -> None:
        self.saved = Saved(
            cutting.version,
            cutting.index,
            json.loads(json.dumps(cutting.state)),
            self.model,
            self.coordinator.shards,
            tuple(self.decided[: cutting.version]),
            tuple(reject for reject in self.dropped if reject.index <= cutting.index),
        )
        for number, disk in enumerate(self.disks):
            # a shard that still reads its log learns of the snapshot later
            if number >= len(self.shards) or self.shards[number].is_ready:
                disk.shard_log.remove_before(cutting.version)
            disk.job_log.remove_before(cutting.version)

    def flush(self) -> None:
        """Take note of new decisions and send them to all shards. Who is not needed any more,
        ends.
        """
        coordinator, before = self.coordinator, self._flushed
        if self.directory.release_leavers(coordinator):
            self.end_servers()
        self.set_model()
        if coordinator.log.index == before:
            return
        new = coordinator.entries_after(before)
        self._flushed = new[-1].index
        for entry in new:
            self.note(entry)
        for shard in list(self.shards):
            if shard.directory is self.directory and shard.server.ready:
                self.deliver(
                    shard, DeliveryCursor(coordinator.log_id, before, shard.server.catch_up)
                )

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
        """Reshard the job; new servers are up already. A server may be killed meanwhile."""
        if self.perfect or all(worker.done for worker in self.workers):
            return None
        shards = self.rng.choice(
            [number for number in range(1, UNITS + 1) if number != self.layout]
        )
        keeps = self.scenario.durable or self.rng.random() < 0.5
        if 0 in self.down or not start_reshard(
            self.recorder, self.directory, shards, keeps, self.store_count, self.now
        ):
            return self.after(0.5, self.reshard)
        self.moves += 1
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
