"""Workers of the simulated world: join, register, upload if told to, then batches and pushes
until the data ends.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pscommon.core.errors import FencedError
from pscommon.core.log_entries import BatchKey, PushKey, Staged
from psserver.core.commands.command import Command
from psserver.core.commands.data_commands import CallCollective, LeaseBatches
from psserver.core.commands.recorder import Recorder
from psserver.core.commands.worker_commands import Join, Leave, Register
from psserver.core.reports.collectives import CollectiveValues
from psserver.core.shard.state_machine import PushOutcome
from psworker.core.push_sequence import PushSequence
from tests.sim.arrays import UNITS, part_of
from tests.sim.invariants import check

if TYPE_CHECKING:
    from tests.sim.world import World

RETRY = 0.7
COLLECTIVE_CALLS = 3


@dataclass
class Push:
    """A push as its worker meant it."""

    staged: Staged
    rank: int
    gradients: tuple[float, ...]


def gradient(number: int, base: int, unit: int) -> float:
    """Return a number of a deterministic function whose values differ widely in size."""
    return math.sin(number * 12.9898 + base * 4.1414 + unit * 78.233) * 10.0 ** (
        (number * 7 + unit * 3) % 19
    )


class SimWorker:
    """A worker's process. It may be killed (alive), stopped for a while (awake_at), or asked to
    leave (draining); its script may hang for a while (hangs_until, since hangs_from), and its
    heartbeats go on."""

    def __init__(self, world: "World", rank: int, attempt: int = 0) -> None:
        self.world = world
        self.rank = rank
        self.attempt = attempt
        self.alive = True
        self.done = False
        self.draining = False
        self.awake_at = 0.0
        self.hangs_from = self.hangs_until = 0.0
        self.calls = 0
        self.worker = 0
        self.shards = world.layout
        self.asked = self.begun = 0
        self.speed = world.rng.choice([0.1, 0.1, 0.3, 3.0])
        self.restart()

    def restart(self) -> None:
        """(Back) to the beginning, as new."""
        self.begun += 1
        self.worker = self.base = self.at_least = self.received = 0
        self.numbers = PushSequence()
        self.used: list[int] = []
        self.outcomes: dict[int, PushOutcome] = {}
        self.call(Join(self.rank, "h", 1, "cpu", self.attempt), self.joined)

    # ---- time and messages

    def later(self, seconds: float, action: Callable[[], None], script: bool = True) -> None:
        """Act then, or when this process is woken; never after its death, or after it has begun
        again.

        script: its script acts, which may hang.
        """
        begun = self.begun

        def act() -> None:
            if begun != self.begun:
                return
            awake_at = max(self.awake_at, self.hangs_until if script else 0.0)
            if self.alive and awake_at > self.world.now:
                self.world.after(awake_at - self.world.now, act)
            elif self.alive:
                action()

        self.world.after(seconds, act)

    def call(self, command: Command[Any], then: Callable[[Any], None]) -> None:
        """A request to the coordinator, repeated until it is answered (not None); late answers
        are dropped.
        """

        def request(recorder: Recorder, now: float) -> Any:
            if isinstance(command, Register):
                registration = recorder.coordinator.registration
                if registration.unresolved_peer(command.worker, now):
                    return None
                return recorder.do(command, now), recorder.coordinator.version
            if isinstance(command, CallCollective):
                result = recorder.do(command, now)
                return result and (result, self.world.generation)
            return recorder.do(command, now)

        self.asked += 1
        self.ask(self.asked, request, then)

    def ask(
        self, number: int, request: Callable[[Recorder, float], Any], then: Callable[[Any], None]
    ) -> None:
        if number != self.asked:
            return
        world = self.world

        def serve() -> None:
            try:
                answer = request(world.recorder, world.now)
            except FencedError as error:
                answer = error
            world.flush()
            if answer is not None:
                world.send(
                    lambda: self.later(0.0, lambda: self.answer(number, answer, then)),
                    world.shards[0],
                )

        world.send(serve, world.shards[0])
        self.later(RETRY, lambda: self.ask(number, request, then))

    def answer(self, number: int, answer: Any, then: Callable[[Any], None]) -> None:
        if number != self.asked:
            return
        self.asked += 1
        if isinstance(answer, FencedError):
            self.restart()
        else:
            then(answer)

    # ---- membership

    def joined(self, member: Any) -> None:
        self.worker = member.worker
        self.beat()
        self.register()

    def beat(self) -> None:
        if not self.done:
            worker, now = self.worker, self.world.now
            no_call = now - self.hangs_from if now < self.hangs_until else 0.0
            self.world.send(lambda: self.world.on_beat(self, worker, no_call), self.world.shards[0])
            self.later(1.0, self.beat, script=False)

    def fenced(self, worker: int) -> None:
        """A heartbeat was answered so."""
        if worker == self.worker and not self.done:
            self.asked += 1
            self.restart()

    def register(self) -> None:
        self.call(Register(self.worker, self.world.model), self.registered)

    def registered(self, answer: tuple[str, int]) -> None:
        state, self.at_least = answer
        if state == "ready":
            self.pull(lambda: self.want(idle=False))
        elif state == "upload":
            self.shards = self.world.layout
            self.deliver(Push(Staged(PushKey(self.worker, 0), 1, 0), self.rank, (1.0,) * UNITS))
            self.later(RETRY, self.register)
        else:
            self.later(RETRY, self.register)

    def pull(self, then: Callable[[], None]) -> None:
        """The newest weights of all shards, once all are there and have weights of one epoch."""
        base = min(shard.machine.version for shard in self.world.shards[: self.world.layout])
        if self.world.all_ready and base >= self.at_least:
            self.base = base
            then()
        else:
            self.later(RETRY, lambda: self.pull(then))

    # ---- data and steps

    def want(self, idle: bool) -> None:
        if self.draining and not self.used:
            return self.finish()
        command = LeaseBatches(self.worker, self.world.loop, self.received, 1, idle)
        return self.call(command, lambda batches: self.got(batches, idle))

    def got(self, batches: Any, idle: bool) -> None:
        if batches.numbers:
            self.used += batches.numbers
            self.received += len(batches.numbers)
            compute = lambda: self.later(self.speed * self.world.rng.random(), self.computed)  # noqa: E731
            self.pull(compute) if idle else compute()
        elif not batches.end:
            self.want(idle=True)
        elif self.used:
            self.push()
        else:
            self.call_collectives()

    def computed(self) -> None:
        if len(self.used) < self.world.scenario.accumulate and not self.draining:
            self.want(idle=False)
        else:
            self.push()

    def push(self) -> None:
        seq, _ = self.numbers.open()
        key, number = PushKey(self.worker, seq), sum(self.used)
        problem = "NON_FINITE: tensor w" if self.world.is_bad(number) else ""
        staged = Staged(
            key, len(self.used), self.base, tuple(BatchKey(0, n) for n in self.used), problem
        )
        push = Push(
            staged, self.rank, tuple(gradient(number, self.base, unit) for unit in range(UNITS))
        )
        self.world.pushes[key] = push
        self.used = []
        self.outcomes.clear()
        self.deliver(push)
        self.await_outcome(push)

    def deliver(self, push: Push) -> None:
        """To those that have not answered; cut for the shards that there were when it heard of
        them last.
        """
        shards = self.shards
        for number, shard in enumerate(self.world.shards[:shards]):
            if number in self.outcomes:
                continue
            part = part_of(push.gradients, number, shards)
            self.world.send(
                lambda shard=shard, part=part: shard.push(push.staged, part, shards), shard
            )

    def await_outcome(self, push: Push) -> None:
        """Ask each shard until it has decided; a push that may not have come is sent again."""
        self.listen(push)
        outcomes = list(self.outcomes.values())
        if any(outcome.reason == "FENCED" for outcome in outcomes):
            self.restart()
        elif len(outcomes) == self.world.layout:
            check(
                len({(o.status, o.version) for o in outcomes}) == 1,
                "shards disagree on {}",
                push.staged.key,
            )
            self.numbers.close()
            self.at_least = max(self.at_least, *(outcome.version for outcome in outcomes))
            self.world.acknowledged(push, outcomes[0])
            self.pull(lambda: self.want(idle=False))
        else:
            if self.world.rng.random() < 0.3:
                self.deliver(push)
            self.later(self.world.rng.random() * RETRY, lambda: self.await_outcome(push))

    def listen(self, push: Push) -> None:
        """Collect the shards' answers. An answer holds after the shard's restart; after a reshard
        all shards are asked again.
        """
        if self.shards != self.world.layout and self.world.rng.random() < 0.3:
            self.shards = self.world.layout  # it was told that there are others
            self.outcomes.clear()
            self.deliver(push)
        for number, shard in enumerate(self.world.shards[: self.shards]):
            outcome = (
                shard.machine.outcome(push.staged.key) if shard.is_ready and shard.up else None
            )
            if outcome is not None and self.world.rng.random() < 0.7:
                self.outcomes.setdefault(number, outcome)

    def call_collectives(self) -> None:
        """Make the collective calls that are left, then leave."""
        if not self.world.scenario.collectives or self.calls == COLLECTIVE_CALLS:
            return self.finish()
        number, value = self.calls + 1, 0.1 * self.rank + self.world.rng.random()
        given = CollectiveValues("all_reduce", ("loss",), (value,), self.rank + 1)
        return self.call(CallCollective(self.worker, number, given, 1), self.take_result)

    def take_result(self, answer: tuple[CollectiveValues, int]) -> None:
        result, generation = answer
        self.calls += 1
        known = self.world.results.setdefault((generation, self.calls), result)
        check(known == result, "collective call {} gave {} and {}", self.calls, known, result)
        self.call_collectives()

    def finish(self) -> None:
        self.done = True
        # its script had hung over all that
        if self.world.takeovers and not self.world.coordinator.started:
            self.world.bring_back_one(self.rank)
        self.world.worker_ended()
        worker = self.worker
        self.asked += 1
        self.ask(
            self.asked,
            lambda recorder, now: recorder.do(Leave(worker, ""), now) or True,
            _ignore,
        )


def _ignore(answer: Any) -> None: ...
