"""A whole cluster in one thread: the real machines over a network that delays, drops, repeats and reorders.

A seed decides everything. Gradients are floats of very different sizes, so that another order of sums gives other bits.
Each invariant of ARCHITECTURE.md is checked, as far as possible from the world's own record of who pushed what.
"""

import contextlib
import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pscommon.core.errors import FencedError
from pscommon.core.log import Apply, BatchKey, Begin, Cut, Entry, PushKey, Staged
from pscommon.core.loop import LoopSpec
from pscommon.core.model import ModelSpec, OptimizerSpec, TensorSpec
from psserver.core.coordinator import Coordinator
from psserver.core.cuts import Every, PartReport
from psserver.core.policy import Policy, policy
from psserver.core.roster import State
from psserver.core.shard import Shard

MODEL = ModelSpec((TensorSpec("w", (1,), "float64"),), OptimizerSpec("sgd"))
LEASE = 5.0
RETRY = 0.7
HORIZON = 3000.0


class InvariantError(AssertionError):
    """The machines did what they must never do."""


def check(holds: bool, message: str, *values: object) -> None:
    if not holds:
        raise InvariantError(message.format(*values))


@dataclass(frozen=True)
class Scenario:
    """What a run looks like; `for_seed` draws one."""

    seed: int
    policy: Policy
    workers: int
    shards: int
    batches: int
    epochs: int
    accumulate: int
    loss: float
    crashes: int
    restarts: int
    every: int | None

    @staticmethod
    def for_seed(seed: int) -> "Scenario":
        rng = random.Random(seed)
        row = rng.choice([policy("sync"), policy("async"), policy("ssp", rng.choice([1, 1, 2, 3]))])
        return Scenario(
            seed, row, workers=rng.randint(1, 3), shards=rng.randint(1, 3), batches=rng.randint(2, 5),
            epochs=rng.randint(1, 2), accumulate=rng.choice([1, 1, 1, 2]), loss=rng.choice([0.0, 0.05, 0.15]),
            crashes=rng.choice([0, 0, 1, 2]), restarts=rng.choice([0, 0, 1]), every=rng.choice([None, 2, 3]),
        )  # fmt: skip


@dataclass
class Push:
    """A push as its worker meant it."""

    staged: Staged
    rank: int
    gradients: tuple[float, ...]


def gradient(number: int, base: int, shard: int) -> float:
    """Any deterministic function with a wild range of sizes."""
    return math.sin(number * 12.9898 + base * 4.1414 + shard * 78.233) * 10.0 ** ((number * 7 + shard * 3) % 19)


class SimShard:
    """A Shard with one weight, and the shell's duties: keep bytes, carry out entries, report."""

    def __init__(self, world: "World", shard: int) -> None:
        self.world = world
        self.machine = Shard(shard)
        self.weight = 0.0
        self.kept: dict[PushKey, float] = {}
        self.history: list[tuple[PushKey, ...]] = []
        self.cuts: dict[int, float] = {}

    def push(self, push: Push) -> None:
        if self.machine.offer(push.staged):
            self.kept[push.staged.key] = push.gradients[self.machine.shard]
            self.send_report()

    def send_report(self) -> None:
        report, epoch = self.machine.report(), self.world.epoch
        self.world.send(lambda: self.world.on_report(report, epoch))

    def entries(self, entries: list[Entry]) -> None:
        for entry in self.machine.accept(self.world.epoch, entries):
            self.carry_out(entry)
            self.machine.done(entry)
            self.kept = {key: value for key, value in self.kept.items() if key in self.machine.staged}

    def carry_out(self, entry: Entry) -> None:
        if isinstance(entry, Apply):
            check(not self.machine.missing(entry), "shard {} lacks a push of {}", self.machine.shard, entry)
            self.apply(entry)
        elif isinstance(entry, Begin):
            self.weight = 1.0
        elif isinstance(entry, Cut):
            self.cuts[entry.version] = self.weight
            part = PartReport(entry.version, "", 0, "")
            self.world.send(lambda: self.world.on_part(self.machine.shard, part, entry))

    def apply(self, entry: Apply) -> None:
        total = sum(c.samples for c in entry.contributions)
        self.weight -= self.average(entry, total)
        self.history.append(tuple(c.key for c in entry.contributions))

    def average(self, entry: Apply, total: int) -> float:
        value = 0.0
        for contribution in entry.contributions:
            value += self.kept[contribution.key] * (contribution.samples / total)
        return value


class SimWorker:
    """A worker's life: join, register, upload if told to, then batches and pushes until the data ends."""

    def __init__(self, world: "World", rank: int) -> None:
        self.world = world
        self.rank = rank
        self.alive = True
        self.done = False
        self.worker = 0
        self.asked = 0
        self.speed = world.rng.choice([0.1, 0.1, 0.3, 3.0])
        self.restart()

    def restart(self) -> None:
        """(Back) to the beginning, as new."""
        self.worker = self.seq = self.base = self.received = 0
        self.used: list[int] = []
        self.call(lambda c, now: c.join(now, self.rank, "h", 1, "cpu").worker, self.joined)

    def call(self, method: Callable[[Coordinator, float], Any], then: Callable[[Any], None]) -> None:
        """A request to the coordinator, repeated until it is answered (not None); late answers are dropped."""
        self.asked += 1
        self.ask(self.asked, method, then)

    def ask(self, number: int, method: Callable[[Coordinator, float], Any], then: Callable[[Any], None]) -> None:
        if not self.alive or number != self.asked:
            return
        world = self.world

        def serve() -> None:
            try:
                answer = method(world.coordinator, world.now)
            except FencedError as error:
                answer = error
            world.flush()
            if answer is not None:
                world.send(lambda: self.answer(number, answer, then))

        world.send(serve)
        world.after(RETRY, lambda: self.ask(number, method, then))

    def answer(self, number: int, answer: Any, then: Callable[[Any], None]) -> None:
        if not self.alive or number != self.asked:
            return
        self.asked += 1
        if isinstance(answer, FencedError):
            self.restart()
        else:
            then(answer)

    def joined(self, worker: int) -> None:
        self.worker = worker
        self.beat(worker)
        self.register()

    def beat(self, worker: int) -> None:
        if self.alive and worker == self.worker and not self.done:
            self.world.send(lambda: self.world.on_beat(worker))
            self.world.after(1.0, lambda: self.beat(worker))

    def register(self) -> None:
        worker = self.worker
        self.call(lambda c, now: c.register(worker, MODEL, now), self.registered)

    def registered(self, state: str) -> None:
        if state == "ready":
            self.want(idle=False)
        elif state == "upload":
            self.deliver(Push(Staged(PushKey(self.worker, 0), 1, 0), self.rank, (0.0,) * self.world.scenario.shards))
            self.world.after(RETRY, self.register)
        else:
            self.world.after(RETRY, self.register)

    def want(self, idle: bool) -> None:
        worker, spec, received = self.worker, self.world.loop, self.received
        self.call(
            lambda c, now: c.next_batches(worker, spec, received, 1, idle, now), lambda batches: self.got(batches, idle)
        )

    def got(self, batches: Any, idle: bool) -> None:
        if batches.numbers:
            self.used += batches.numbers
            self.received += len(batches.numbers)
            worker = self.worker
            self.world.after(self.speed * self.world.rng.random(), lambda: self.computed(worker))
        elif not batches.end:
            self.want(idle=True)
        elif self.used:
            self.push()
        else:
            self.finish()

    def computed(self, worker: int) -> None:
        if not self.alive or worker != self.worker:
            return
        if len(self.used) < self.world.scenario.accumulate:
            self.want(idle=False)
        else:
            self.push()

    def push(self) -> None:
        self.seq += 1
        key, number = PushKey(self.worker, self.seq), sum(self.used)
        staged = Staged(key, len(self.used), self.base, tuple(BatchKey(0, n) for n in self.used))
        shards = self.world.scenario.shards
        push = Push(staged, self.rank, tuple(gradient(number, self.base, s) for s in range(shards)))
        self.world.pushes[key] = push
        self.used = []
        self.deliver(push)
        self.await_outcome(push)

    def deliver(self, push: Push) -> None:
        for shard in self.world.shards:
            self.world.send(lambda shard=shard: shard.push(push))

    def await_outcome(self, push: Push) -> None:
        """Ask all shards until each has decided; a push that may not have come is sent again."""
        if not self.alive or push.staged.key.worker != self.worker:
            return
        outcomes = [shard.machine.outcome(push.staged.key) for shard in self.world.shards]
        if any(o is not None and o.reason == "FENCED" for o in outcomes):
            self.restart()
        elif all(outcomes):
            check(len({o.version for o in outcomes if o}) == 1, "shards disagree on {}", push.staged.key)
            self.base = min(shard.machine.version for shard in self.world.shards)
            self.want(idle=False)
        else:
            if self.world.rng.random() < 0.3:
                self.deliver(push)
            self.world.after(self.world.rng.random() * RETRY, lambda: self.await_outcome(push))

    def finish(self) -> None:
        self.done = True
        worker = self.worker
        self.call(lambda c, now: c.leave(worker, "", now) or True, lambda _: None)


@dataclass
class World:
    """The cluster, its clock and its network. epoch counts restarts of the servers; messages of an old one are void."""

    scenario: Scenario
    coordinator_class: type[Coordinator] = Coordinator
    shard_class: type[SimShard] = SimShard
    machine_class: type[Shard] = Shard
    now: float = 0.0
    epoch: int = 0
    queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    pushes: dict[PushKey, Push] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.scenario.seed * 7919 + 1)
        self.loop = LoopSpec(0, self.scenario.batches, 1, self.scenario.epochs, False, True, 0)
        self._count = self.messages = 0
        self._flushed = 0
        self.decided: list[Apply] = []
        self.saved: tuple[dict[str, Any], dict[int, float], int] | None = None
        self.coordinator = self.new_coordinator()
        self.shards = self.new_shards()
        self.workers = [SimWorker(self, rank) for rank in range(self.scenario.workers)]
        self.tick()
        for _ in range(self.scenario.crashes):
            self.after(self.rng.random() * 20, self.crash)
        for _ in range(self.scenario.restarts):
            self.after(2 + self.rng.random() * 20, self.restart)

    def new_coordinator(self) -> Coordinator:
        scenario = self.scenario
        every = Every(steps=scenario.every)
        coordinator = self.coordinator_class(
            scenario.shards, scenario.policy, scenario.workers, LEASE, every, generation=self.epoch
        )
        append = coordinator._append

        def watched(entry: Entry) -> None:
            if isinstance(entry, Apply):
                self.check_decision(entry, coordinator)
            append(entry)

        coordinator._append = watched  # type: ignore[method-assign]
        return coordinator

    def new_shards(self) -> list[SimShard]:
        shards = [self.shard_class(self, shard) for shard in range(self.scenario.shards)]
        for shard in shards:
            shard.machine = self.machine_class(shard.machine.shard)
            shard.machine.follow(self.epoch, 0)
        return shards

    # ---- time and network

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self.queue, (self.now + seconds, self._count, action))

    def send(self, deliver: Callable[[], None]) -> None:
        """Over the network: late, perhaps twice, perhaps never; never across a restart of the servers."""
        rng, epoch = self.rng, self.epoch

        def arrive() -> None:
            if epoch == self.epoch:
                deliver()

        self.messages += 1
        if rng.random() < self.scenario.loss:
            return
        self.after(rng.random() * 0.2, arrive)
        if rng.random() < self.scenario.loss:
            self.after(rng.random() * 2.0, arrive)

    def run(self) -> None:
        while not all(worker.done or not worker.alive for worker in self.workers):
            check(bool(self.queue) and self.now < HORIZON, "no progress: {}", self.coordinator.waiting_for(self.now))
            self.now, _, action = heapq.heappop(self.queue)
            action()
        self.settle()
        self.verify()

    def settle(self) -> None:
        """Let every shard catch up over a perfect network."""
        for shard in self.shards:
            shard.entries(self.coordinator.entries_after(shard.machine.index))

    # ---- the shell of the coordinator

    def tick(self) -> None:
        self.coordinator.tick(self.now)
        self.flush()
        for shard in self.shards:
            shard.send_report()
        if self.coordinator.cuts.finished is not None:
            self.on_snapshot()
        self.after(0.5, self.tick)

    def on_beat(self, worker: int) -> None:
        with contextlib.suppress(FencedError):
            self.coordinator.member(worker, self.now)

    def on_report(self, report: Any, epoch: int) -> None:
        if epoch != self.epoch:
            return
        self.coordinator.report(report, self.now)
        self.flush()
        shard = self.shards[report.shard]
        entries = self.coordinator.entries_after(report.index)
        self.send(lambda: shard.entries(entries))

    def on_part(self, shard: int, part: PartReport, entry: Cut) -> None:
        self.coordinator.cuts.part(shard, part)

    def on_snapshot(self) -> None:
        cutting = self.coordinator.cuts.finished
        assert cutting is not None
        self.coordinator.cuts.finished = None
        weights = {shard.machine.shard: shard.cuts[cutting.version] for shard in self.shards}
        self.saved = (cutting.state, weights, len(self.decided[: cutting.version]))

    def flush(self) -> None:
        """Take note of new decisions, check them, and send them to all shards."""
        new = self.coordinator.entries_after(self._flushed)
        if not new:
            return
        self._flushed = new[-1].index
        for entry in new:
            if isinstance(entry, Apply):
                self.decided.append(entry)
        for shard in self.shards:
            self.send(lambda shard=shard: shard.entries(new))

    # ---- faults

    def crash(self) -> None:
        """A worker dies; another takes its place, or not if others are left."""
        victims = [worker for worker in self.workers if worker.alive and not worker.done]
        if not victims:
            return
        victim = self.rng.choice(victims)
        victim.alive = False
        if len(victims) == 1 or self.rng.random() < 0.5 or not self.coordinator.started:
            self.workers.append(SimWorker(self, victim.rank))

    def restart(self) -> None:
        """All servers die and come back from the newest complete snapshot, or from nothing."""
        if all(worker.done for worker in self.workers):
            return
        self.epoch += 1
        self.coordinator, self.shards = self.new_coordinator(), self.new_shards()
        self.coordinator.min_workers = 1
        self.decided, self._flushed = self.decided[: self.saved[2] if self.saved else 0], 0
        if self.saved is None:
            return
        state, weights, _ = self.saved
        self.coordinator.restore(state, MODEL, self.now)
        self._flushed = state["index"]
        for shard in self.shards:
            shard.machine.restore(self.epoch, state["version"], state["index"])
            shard.weight = weights[shard.machine.shard]
            shard.history = [tuple(c.key for c in apply.contributions) for apply in self.decided]

    # ---- the checks

    def check_decision(self, apply: Apply, coordinator: Coordinator) -> None:
        """At the moment of a decision: is it what the policy promises?"""
        row = self.scenario.policy
        active = {m.worker: m.clock for m in coordinator.roster if m.state is State.ACTIVE}
        counted = [c.key.worker for c in apply.contributions]
        check(set(counted) <= set(active), "version {} counts workers {} of {}", apply.version, counted, active)
        if row.barrier:
            check(len(counted) == len(active), "round {} has {} of {}", apply.version, counted, list(active))
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
        batches = sorted(b.number for key in counted for b in self.pushes[key].staged.batches)
        check(batches == list(range(self.loop.total)), "batches that counted: {} of {}", batches, self.loop.total)
        self.verify_sums()

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
