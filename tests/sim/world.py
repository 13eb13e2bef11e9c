"""A whole cluster in one thread: the real machines over a network that delays, drops, repeats and reorders.

A seed decides everything. Gradients are floats of very different sizes, so that another order of sums gives other bits.
Each invariant of ARCHITECTURE.md is checked, as far as possible from the world's own record of who pushed what.
"""

import contextlib
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pscommon.core.errors import FencedError
from pscommon.core.log import Apply, Cut, Entry, PushKey
from pscommon.core.loop import LoopSpec
from psserver.core.coordinator import Coordinator
from psserver.core.cuts import Every, PartReport
from psserver.core.policy import Policy, policy
from psserver.core.roster import State
from psserver.core.shard import Shard
from psserver.core.waiting import waiting_for
from tests.sim.actors import MODEL, Push, SimShard, SimWorker, check

LEASE = 5.0
HORIZON = 3000.0


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
            check(bool(self.queue) and self.now < HORIZON, "no progress: {}", waiting_for(self.coordinator, self.now))
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
