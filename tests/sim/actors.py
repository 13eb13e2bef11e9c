"""Servers and workers of the simulated world: the real machines, and the duties of the shells around them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pscommon.core.errors import FencedError
from pscommon.core.log import Apply, BatchKey, Begin, Cut, Entry, PushKey, Staged
from pscommon.core.model import ModelSpec, OptimizerSpec, TensorSpec
from psserver.core.coordinator import Coordinator
from psserver.core.cuts import PartReport
from psserver.core.shard import Shard
from psworker.core.pushes import Pushes

if TYPE_CHECKING:
    from tests.sim.world import World

MODEL = ModelSpec((TensorSpec("w", (1,), "float64"),), OptimizerSpec("sgd"))
RETRY = 0.7


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
        self.worker = self.base = self.received = 0
        self.numbers = Pushes()
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
        seq, _ = self.numbers.open()
        key, number = PushKey(self.worker, seq), sum(self.used)
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
            self.numbers.close()
            self.want(idle=False)
        else:
            if self.world.rng.random() < 0.3:
                self.deliver(push)
            self.world.after(self.world.rng.random() * RETRY, lambda: self.await_outcome(push))

    def finish(self) -> None:
        self.done = True
        worker = self.worker
        self.call(lambda c, now: c.leave(worker, "", now) or True, lambda _: None)
