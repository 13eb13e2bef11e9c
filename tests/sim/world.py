"""A whole cluster in one thread: the real machines over a network that delays, drops, repeats and reorders.

A seed decides everything. Gradients are floats of very different sizes, so that another order of sums gives other bits.
Each invariant of ARCHITECTURE.md is checked, as far as possible from the world's own record of who pushed what.
"""

import heapq
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from pscommon.core.errors import FencedError
from pscommon.core.log import Apply, Entry, PushKey, Reject, Report
from pscommon.core.loop import LoopSpec
from psserver.core.coordinator import Coordinator
from psserver.core.cuts import Every, PartReport
from psserver.core.following import Way, way_for
from psserver.core.recorder import Recorder
from psserver.core.roster import State
from psserver.core.rules import Rules
from psserver.core.shard import NO_LOG, Outcome, Shard
from psserver.core.waiting import waiting_for
from tests.sim.scenario import HORIZON, LEASE, Scenario
from tests.sim.servers import (
    MODEL,
    Disk,
    InvariantError,
    JobJournal,
    Push,
    Saved,
    SimShard,
    check,
    recovered_coordinator,
    watch,
)
from tests.sim.workers import SimWorker


@dataclass
class World:
    """The cluster, its clock and its network."""

    scenario: Scenario
    coordinator_class: type[Coordinator] = Coordinator
    shard_class: type[SimShard] = SimShard
    machine_class: type[Shard] = Shard
    journal_class: type[JobJournal] = JobJournal
    now: float = 0.0
    queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    pushes: dict[PushKey, Push] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.scenario.seed * 7919 + 1)
        self.loop = LoopSpec(0, self.scenario.batches, 1, self.scenario.epochs, False, True, 0)
        self._count = self.to_come = self.messages = self.restarts = self.rollbacks = 0
        self._flushed = 0
        self.decided: list[Apply] = []
        self.dropped: list[int] = []
        self.saved: Saved | None = None
        self.disks = [Disk() for _ in range(self.scenario.shards)]
        self.down: set[int] = set()
        self.recorder = self.new_recorder(0)
        self.shards = [self.shard_class(self, shard, disk) for shard, disk in enumerate(self.disks)]
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
            (scenario.drains, self.drain_worker),
            (scenario.switches, self.switch_policy),
        ]
        for count, fault in faults:
            for _ in range(count):
                self.after(self.rng.random() * 20, fault)

    def new_coordinator(self, epoch: int) -> Coordinator:
        scenario = self.scenario
        rules = Rules(
            scenario.policy, scenario.workers, LEASE, Every(steps=scenario.every), scenario.on_loss,
            bad_gradients="skip",
        )  # fmt: skip
        return self.coordinator_class(scenario.shards, rules, epoch)

    def new_recorder(self, epoch: int) -> Recorder:
        coordinator = self.new_coordinator(epoch)
        watch(self, coordinator)
        return Recorder(coordinator, self.journal_class(self.disks[0], epoch) if self.scenario.durable else None)

    @property
    def coordinator(self) -> Coordinator:
        return self.recorder.coordinator

    @property
    def all_ready(self) -> bool:
        """Has every shard weights, of the coordinator's epoch?"""
        return not self.down and all(shard.is_ready and shard.machine.begun for shard in self.shards)

    def is_bad(self, number: int) -> bool:
        return self.scenario.bad > 0 and number % self.scenario.bad == 1

    # ---- time and network

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self.queue, (self.now + seconds, self._count, action))

    def send(self, deliver: Callable[[], None], server: SimShard) -> None:
        """To or from a server, over the network: late, perhaps twice, perhaps never; its death breaks the line."""
        rng = self.rng

        def arrive() -> None:
            if server.up:
                deliver()

        self.messages += 1
        if not server.up or rng.random() < self.scenario.loss:
            return
        self.after(rng.random() * 0.2, arrive)
        if rng.random() < self.scenario.loss:
            self.after(rng.random() * 2.0, arrive)

    def run(self) -> None:
        queue, workers = self.queue, self.workers
        while self.to_come or not all(worker.done or not worker.alive for worker in workers):
            if self.now > HORIZON:
                raise InvariantError(f"no progress: {waiting_for(self.coordinator, self.now)}")
            self.now, _, action = heapq.heappop(queue)
            action()
        if self.scenario.durable or not self.down:
            self.settle()
            self.verify()

    def settle(self) -> None:
        """Start what is down, and let every shard catch up over a perfect network."""
        for number in list(self.down):
            self.start_server(number)
        for shard in self.shards:
            while shard.machine.epoch != self.coordinator.epoch or not shard.is_ready:
                self.introduce(shard, shard.machine.report(), direct=True)
            shard.entries(self.coordinator.epoch, self.coordinator.entries_after(shard.machine.index))

    # ---- the shell of the coordinator

    def tick(self) -> None:
        if 0 not in self.down:
            self.recorder.tick(self.now)
            self.flush()
            if self.coordinator.cuts.finished is not None:
                self.on_snapshot()
        for shard in self.shards:
            shard.send_report()
        self.after(0.5, self.tick)

    def on_beat(self, sender: SimWorker, worker: int) -> None:
        try:
            self.coordinator.member(worker, self.now)
        except FencedError:
            self.send(lambda: sender.later(0.0, lambda: sender.fenced(worker)), self.shards[0])

    def on_report(self, report: Report, shard: SimShard) -> None:
        if 0 in self.down or not shard.up or (shard.is_ready and report.epoch == NO_LOG):
            return
        if shard.is_ready and report.epoch == self.coordinator.epoch:
            self.recorder.report(report, self.now)
            self.flush()
            epoch, entries = self.coordinator.epoch, self.coordinator.entries_after(report.index)
            self.send(lambda: shard.entries(epoch, entries), shard)
        else:
            self.introduce(shard, report)

    def introduce(self, shard: SimShard, report: Report, direct: bool = False) -> None:
        """A shard that does not follow the log of now is told how it can."""
        coordinator = self.coordinator
        way = way_for(
            coordinator, report, not shard.is_ready,
            self.scenario.durable and not shard.asked, self.saved is not None and self.rollbacks > 0,
        )  # fmt: skip
        saved, epoch = self.saved, coordinator.epoch
        action: Callable[[], None]
        if way is Way.RECOVER:
            action = lambda: shard.recover(saved, epoch)  # noqa: E731
        elif way is Way.RESTORE:
            assert saved is not None
            action = lambda: shard.load(saved, epoch)  # noqa: E731
        elif way is Way.BEGIN:
            self.recorder.do("shard_lost", self.now, shard=shard.machine.shard)
            base = coordinator.log.base
            action = lambda: shard.follow(epoch, base)  # noqa: E731
        elif way is Way.GO_BACK:
            return self.go_back()
        else:
            return None
        return action() if direct else self.send(action, shard)

    def on_part(self, shard: int, part: PartReport) -> None:
        if 0 not in self.down:
            self.recorder.do("part", self.now, shard=shard, part=part)

    def on_snapshot(self) -> None:
        cutting = self.coordinator.cuts.finished
        assert cutting is not None
        self.saved = Saved(cutting.version, cutting.index, json.dumps(cutting.state))
        self.recorder.do("filed", self.now)
        for disk in self.disks:
            disk.log = [segment for segment in disk.log if segment.version >= cutting.version]
            disk.job = [segment for segment in disk.job if segment.version >= cutting.version]

    def flush(self) -> None:
        """Take note of new decisions and send them to all shards."""
        new, epoch = self.coordinator.entries_after(self._flushed), self.coordinator.epoch
        if not new:
            return
        self._flushed = new[-1].index
        for entry in new:
            self.note(entry)
        for shard in self.shards:
            self.send(lambda shard=shard: shard.entries(epoch, new), shard)

    def note(self, entry: Entry) -> None:
        if isinstance(entry, Apply):
            check(entry.version == len(self.decided) + 1, "version {} after {}", entry.version, len(self.decided))
            self.decided.append(entry)
        elif isinstance(entry, Reject) and entry.reason == "NON_FINITE":
            self.dropped += [batch.number for batch in self.pushes[entry.key].staged.batches]

    def acknowledged(self, push: Push, outcome: Outcome | None) -> None:
        """A worker has been told how its push ended."""
        assert outcome is not None
        if outcome.status == "applied" and outcome.detail != "long ago":
            counted = [c.key for c in self.decided[outcome.version - 1].contributions]
            check(push.staged.key in counted, "{} was acknowledged and did not count", push.staged.key)
        if outcome.status == "stale":
            batches, worker = list(push.staged.batches), push.staged.key.worker
            self.recorder.do("return_batches", self.now, worker=worker, batches=batches)

    # ---- faults

    def kill_worker(self) -> None:
        """A worker dies; another takes its place, or not if others are left."""
        victims = [worker for worker in self.workers if worker.alive and not worker.done]
        if not victims:
            return
        victim = self.rng.choice(victims)
        victim.alive = False
        if len(victims) == 1 or self.scenario.returns or self.rng.random() < 0.5 or not self.coordinator.started:
            attempt = victim.attempt + 1 if self.rng.random() < 0.5 else victim.attempt
            self.to_come += 1
            self.after(self.rng.random() * 8, lambda: self.start_worker(victim.rank, attempt))

    def start_worker(self, rank: int, attempt: int) -> None:
        self.to_come -= 1
        self.workers.append(SimWorker(self, rank, attempt))

    def pause_worker(self) -> None:
        """A worker is stopped, perhaps for longer than its lease, and goes on later."""
        victims = [worker for worker in self.workers if worker.alive and not worker.done]
        if victims:
            self.rng.choice(victims).awake_at = self.now + self.rng.choice([1.0, 4.0, 15.0])

    def drain_worker(self) -> None:
        """A worker is asked to leave, if others are left."""
        victims = [worker for worker in self.workers if worker.alive and not worker.done and worker.used == []]
        if len(victims) > 1 and self.coordinator.started:
            self.rng.choice(victims).draining = True

    def switch_policy(self) -> None:
        if 0 not in self.down:
            row = self.rng.choice([("sync", None, None, 0), ("async", None, None, 0), ("ssp", 1, None, 0)])
            self.recorder.do("set_policy", self.now, row=row)
            self.flush()

    def kill_server(self) -> None:
        """A server dies, and is started again."""
        number = self.rng.randrange(self.scenario.shards)
        if number in self.down or all(worker.done for worker in self.workers):
            return
        self.down.add(number)
        self.restarts += 1
        self.after(self.rng.random() * 4, lambda: self.start_server(number))

    def start_server(self, number: int) -> None:
        if number not in self.down:
            return
        self.down.remove(number)
        old, new = self.shards[number], self.shard_class(self, number, self.disks[number])
        new.before = old if old.is_ready else old.before
        self.shards[number] = new
        if number == 0 and self.scenario.durable:
            self.recover_coordinator()
        elif number == 0:
            self.go_back()
        self.shards[number].send_report()

    def recover_coordinator(self) -> None:
        before = self.coordinator.state()
        self.recorder = recovered_coordinator(self, self.disks[0], self.saved)
        after = self.coordinator.state()
        check(json.dumps(before) == json.dumps(after), "recovered {} is not {}", after, before)
        self.recorder.recovered(self.now, generation=0)
        self.flush()

    def go_back(self) -> None:
        """All shards return to the newest complete snapshot, or to the beginning."""
        check(not self.scenario.durable, "updates are lost in spite of the log")
        self.rollbacks += 1
        saved, epoch = self.saved, self.coordinator.epoch + 1
        self.recorder = self.new_recorder(epoch)
        self.coordinator.min_workers = 1
        self.decided, self._flushed = self.decided[: saved.version if saved else 0], 0
        if saved is not None:
            self.coordinator.restore(json.loads(saved.state), MODEL, self.now)
            self._flushed = saved.index

    # ---- the checks

    def check_decision(self, apply: Apply, coordinator: Coordinator) -> None:
        """At the moment of a decision: is it what the policy promises?"""
        row = coordinator.policy
        active = {m.worker: m.clock for m in coordinator.roster if m.state is State.ACTIVE}
        counted = [c.key.worker for c in apply.contributions]
        check(set(counted) <= set(active), "version {} counts workers {} of {}", apply.version, counted, active)
        if row.barrier:
            least = max(1, len(active) - row.backup)
            check(len(counted) >= least, "round {} has {} of {}", apply.version, counted, list(active))
        elif row.bound is not None:
            for worker in counted:
                active[worker] += 1
            clocks = list(active.values())
            check(max(clocks) - min(clocks) <= row.bound, "clocks {} at bound {}", clocks, row.bound)

    def verify(self) -> None:
        history = [tuple(c.key for c in apply.contributions) for apply in self.decided]
        for shard in self.shards:
            check(shard.history == history, "shard {} counted other pushes", shard.machine.shard)
        counted = [key for keys in history for key in keys]
        check(len(counted) == len(set(counted)), "a push counted twice")
        batches = sorted([b.number for key in counted for b in self.pushes[key].staged.batches] + self.dropped)
        check(batches == list(range(self.loop.total)), "batches that counted: {} of {}", batches, self.loop.total)
        self.verify_sums()
        if self.scenario.is_reproducible and self.scenario.quiet != self.scenario:
            quiet = World(self.scenario.quiet)
            quiet.run()
            mine, theirs = ([shard.weight for shard in world.shards] for world in (self, quiet))
            check(mine == theirs, "disturbed, the weights are {}, else {}", mine, theirs)

    def verify_sums(self) -> None:
        """Replay: the weighted mean in worker order, wherever and whenever the pushes arrived."""
        for shard in self.shards:
            weight = 1.0
            for apply in self.decided:
                pushes = [self.pushes[c.key] for c in apply.contributions]
                pushes.sort(key=lambda p: (p.rank, p.staged.key.worker))
                total, mean = sum(p.staged.samples for p in pushes), 0.0
                for push in pushes:
                    mean += push.gradients[shard.machine.shard] * (push.staged.samples / total)
                weight -= mean
            check(weight == shard.weight, "shard {}: {} is not {}", shard.machine.shard, shard.weight, weight)


def run(seed: int, **classes: type) -> World:
    """One seeded history. Replay a failure with: python -m tests.sim.replay SEED"""
    world = World(Scenario.for_seed(seed), **classes)  # type: ignore[arg-type]
    world.run()
    return world
