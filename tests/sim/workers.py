"""Workers of a simulated job.

A worker joins, registers the model, and uploads the initial weights if the coordinator asks for
them. Then it leases batches and pushes gradients until its loop ends, makes its collective calls,
and leaves.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pscommon.core.errors import FencedError, TrainingOver
from pscommon.core.log_entries import BatchKey, PushKey, Staged
from psserver.core.commands.command import Command
from psserver.core.commands.data_commands import CallCollective, LeaseBatches
from psserver.core.commands.recorder import Recorder
from psserver.core.commands.worker_commands import Join, Leave, Register
from psserver.core.shard.state_machine import PushOutcome
from psworker.core.push_sequence import PushSequence
from tests.sim.arrays import WEIGHT_COUNT, partition_of, weights_of
from tests.sim.invariants import check
from tests.sim.script_parts import ScriptParts

if TYPE_CHECKING:
    from tests.sim.world import World

RETRY_SECONDS = 0.7
COLLECTIVE_CALL_COUNT = 3
TEST_BATCHES = 3


@dataclass
class Push:
    """A push as its worker sent it.

    rank: rank of the worker.
    gradients: the gradient of each weight.
    """

    staged: Staged
    rank: int
    gradients: tuple[float, ...]


def gradient(number: int, base: int, weight: int) -> float:
    """Return a deterministic value whose magnitude varies widely between its arguments.

    number: sum of the batch numbers.
    base: version of the weights.
    weight: index of the weight.
    """
    return math.sin(number * 12.9898 + base * 4.1414 + weight * 78.233) * 10.0 ** (
        (number * 7 + weight * 3) % 19
    )


class SimWorker(ScriptParts):
    """The process of a worker.

    attempt: number of earlier starts of this rank that `ps-run` made.
    is_alive: the process has not been killed.
    has_finished: the script has made its last call.
    is_draining: the worker was asked to leave.
    stopped_until: time until which the process is stopped.
    hangs_from, hangs_until: time in which the script makes no call; heartbeats continue.
    collective_count: number of collective calls that have returned.
    worker: number of the worker; 0 before it joins.
    shards: number of shards that the worker knows of.
    request_number: number of the current request; answers to earlier ones are dropped.
    start_count: number of times that the worker has joined.
    max_batch_seconds: longest duration of one batch.
    base: version of the weights that the worker computes with.
    min_version: lowest version that the worker may pull.
    received_count: number of batches that the worker has received.
    loop: number of the pass over the training data.
    batches: numbers of the batches of the next push.
    training: number of the training that the script is in.
    push_count: number of pushes since the worker has joined.
    test_count, tested, received_test_count: passes over the test data, and of the current one the
        batches and the number of received batches.
    next_steps: steps of the other optimizers that follow for the batches of the last push.
    outcomes: outcome of the newest push, by shard.
    """

    def __init__(self, world: "World", rank: int, attempt: int = 0) -> None:
        self.world = world
        self.rank = rank
        self.attempt = attempt
        self.is_alive = True
        self.has_finished = False
        self.is_draining = False
        self.stopped_until = 0.0
        self.hangs_from = self.hangs_until = 0.0
        self.collective_count = 0
        self.worker = self.training = 0
        self.shards = world.shard_count
        self.request_number = self.start_count = 0
        self.max_batch_seconds = world.rng.choice([0.1, 0.1, 0.3, 3.0])
        self.restart()

    def restart(self) -> None:
        """Join the job as a new worker."""
        self.start_count += 1
        self.worker = self.base = self.min_version = self.received_count = 0
        self.sequence = PushSequence()
        self.batches: list[int] = []
        self.loop = 0
        self.push_count = self.test_count = self.received_test_count = 0
        self.tested: list[BatchKey] = []
        self.next_steps: list[Callable[[], None]] = []
        self.outcomes: dict[int, PushOutcome] = {}
        join = Join(self.rank, "h", 1, "cpu", self.attempt, str(self.training))
        self.request(join, self.on_joined)

    def begin_next_training(self) -> None:
        """Go on to the script's next training, or end the script after the last one."""
        if self.training + 1 == self.world.scenario.trainings or self.is_draining:
            self.has_finished = True
            return self.world.update_is_finished()
        self.training, self.collective_count = self.training + 1, 0
        return self.restart()

    # ---- time and messages

    def schedule(self, seconds: float, action: Callable[[], None], script: bool = True) -> None:
        """Run an action after this time, or later if the process is stopped then.

        The action does not run if the process is killed or the worker joins again before.

        script: the action belongs to the script, so it also waits while the script hangs.
        """
        start_count = self.start_count

        def act() -> None:
            if start_count != self.start_count:
                return
            stopped_until = max(self.stopped_until, self.hangs_until if script else 0.0)
            if self.is_alive and stopped_until > self.world.now:
                self.world.after(stopped_until - self.world.now, act)
            elif self.is_alive:
                action()

        self.world.after(seconds, act)

    def request(self, command: Command[Any], then: Callable[[Any], None]) -> None:
        """Send a command to the coordinator, and repeat it until the answer is not None."""

        def perform(recorder: Recorder, now: float) -> Any:
            if isinstance(command, Register):
                registration = recorder.coordinator.registration
                if registration.unresolved_peer(command.worker, now):
                    return None
                return recorder.do(command, now), recorder.coordinator.job.version
            if isinstance(command, Join):
                return self.world.admit(command)
            if isinstance(command, CallCollective):
                result = recorder.do(command, now)
                return result and (result, self.world.generation)
            return recorder.do(command, now)

        self.request_number += 1
        self.send_request(self.request_number, perform, then)

    def send_request(
        self, number: int, perform: Callable[[Recorder, float], Any], then: Callable[[Any], None]
    ) -> None:
        if number != self.request_number:
            return
        world = self.world

        def serve() -> None:
            try:
                answer = perform(world.recorder, world.now)
            except (FencedError, TrainingOver) as error:
                answer = error
            world.flush()
            if answer is not None:
                world.send(
                    lambda: self.schedule(0.0, lambda: self.receive_answer(number, answer, then)),
                    world.shards[0],
                )

        world.send(serve, world.shards[0])
        self.schedule(RETRY_SECONDS, lambda: self.send_request(number, perform, then))

    def receive_answer(self, number: int, answer: Any, then: Callable[[Any], None]) -> None:
        if number != self.request_number:
            return
        self.request_number += 1
        if isinstance(answer, FencedError):
            self.restart()
        elif isinstance(answer, TrainingOver):
            self.begin_next_training()
        else:
            then(answer)

    # ---- membership

    def on_joined(self, member: Any) -> None:
        self.worker = member.worker
        self.send_heartbeat()
        self.register()

    def send_heartbeat(self) -> None:
        if self.worker and not self.has_finished:
            worker, now = self.worker, self.world.now
            no_call = now - self.hangs_from if now < self.hangs_until else 0.0
            self.world.send(
                lambda: self.world.on_heartbeat(self, worker, no_call), self.world.shards[0]
            )
            self.schedule(1.0, self.send_heartbeat, script=False)

    def on_fenced(self, worker: int) -> None:
        """Join again because the answer to a heartbeat says that this worker is fenced."""
        if worker == self.worker and not self.has_finished:
            self.request_number += 1
            self.restart()

    def register(self) -> None:
        seed = self.worker * 2**40  # another one for each worker
        self.request(Register(self.worker, self.world.model, seed), self.on_registered)

    def on_registered(self, answer: tuple[str, int]) -> None:
        state, self.min_version = answer
        if state == "ready":
            self.pull(lambda: self.request_batch(idle=False))
        elif state == "upload":
            self.shards = self.world.shard_count
            self.send_push(
                Push(Staged(PushKey(self.worker, 0), 1, 0), self.rank, (1.0,) * WEIGHT_COUNT)
            )
            self.schedule(RETRY_SECONDS, self.register)
        else:
            self.schedule(RETRY_SECONDS, self.register)

    def pull(self, then: Callable[[], None]) -> None:
        """Pull the newest weights once all shards are ready and follow the same log."""
        base = min(shard.machine.version for shard in self.world.shards[: self.world.shard_count])
        if self.world.are_shards_ready and base >= self.min_version:
            self.base = base
            then()
        else:
            self.schedule(RETRY_SECONDS, lambda: self.pull(then))

    # ---- data and steps

    def request_batch(self, idle: bool) -> None:
        if self.is_draining and not self.batches:
            return self.finish()
        command = LeaseBatches(
            self.worker, self.world.loop, self.received_count, 1, idle, place=self.place("train", 0)
        )
        return self.request(command, lambda lease: self.on_batch(lease, idle))

    def on_batch(self, lease: Any, idle: bool) -> None:
        if lease.numbers:
            self.loop = lease.spec.loop
            self.batches += lease.numbers
            self.received_count += len(lease.numbers)
            self.pull(self.compute) if idle else self.compute()
        elif not lease.end:
            self.request_batch(idle=True)
        elif self.batches:
            self.push()
        else:
            self.call_collectives()

    def compute(self) -> None:
        self.schedule(self.max_batch_seconds * self.world.rng.random(), self.on_gradient)

    def on_gradient(self) -> None:
        if len(self.batches) < self.world.scenario.accumulate and not self.is_draining:
            self.request_batch(idle=False)
        else:
            self.push()

    def push(self) -> None:
        """Make a step of each optimizer; the first one commits the batches.

        In every second job, workers with an odd rank step the optimizers in the opposite order.
        """
        batches, self.batches = tuple(BatchKey(self.loop, number) for number in self.batches), []
        number, samples = sum(batch.number for batch in batches), len(batches)
        is_reversed = self.world.scenario.seed % 2 and self.rank % 2
        first, *others = self.world.scenario.optimizers[:: -1 if is_reversed else 1]
        self.next_steps = [partial(self.step, other, number, samples, ()) for other in others]
        self.step(first, number, samples, batches)

    def step(
        self, optimizer: str, number: int, samples: int, batches: tuple[BatchKey, ...]
    ) -> None:
        seq, _ = self.sequence.open()
        key = PushKey(self.worker, seq)
        problem = "NON_FINITE: tensor w" if self.world.has_bad_gradient(number) else ""
        staged = Staged(key, samples, self.base, batches, problem, optimizer=optimizer)
        updated = weights_of(optimizer)
        gradients = tuple(
            gradient(number, self.base, weight) if weight in updated else 0.0
            for weight in range(WEIGHT_COUNT)
        )
        push = Push(staged, self.rank, gradients)
        self.world.pushes[key] = push
        self.outcomes.clear()
        self.send_push(push)
        self.await_outcome(push)

    def send_buffers(self) -> None:
        """Send the buffers of the newest weights that this worker has pulled."""
        seq, _ = self.sequence.open()
        key = PushKey(self.worker, seq)
        push = Push(Staged(key, 0, self.base), self.rank, (0.0,) * WEIGHT_COUNT)
        self.world.pushes[key] = push
        self.outcomes.clear()
        self.send_push(push)
        self.await_outcome(push)

    def continue_script(self) -> None:
        """Make the next step for the same batches, or ask for a batch."""
        if self.next_steps:
            return self.next_steps.pop(0)()
        self.push_count += 1
        if self.world.scenario.sends_buffers and self.push_count % 4 == 3:
            return self.send_buffers()
        interval = (
            self.world.scenario.test_interval and self.world.scenario.test_interval + self.rank
        )
        if interval and self.push_count % interval == 0 and not self.is_draining:
            return self.test()
        return self.request_batch(idle=False)

    def send_push(self, push: Push) -> None:
        """Send a push to the shards that have not answered, partitioned for the number of shards
        that this worker knows of.
        """
        shards = self.shards
        for number, shard in enumerate(self.world.shards[:shards]):
            if number in self.outcomes:
                continue
            part = partition_of(push.gradients, number, shards)
            self.world.send(
                lambda shard=shard, part=part: shard.push(push.staged, part, shards), shard
            )

    def await_outcome(self, push: Push) -> None:
        """Wait until each shard has an outcome of the push; sometimes send the push again."""
        self.collect_outcomes(push)
        outcomes = list(self.outcomes.values())
        if any(outcome.reason == "FENCED" for outcome in outcomes):
            self.restart()
        elif len(outcomes) == self.world.shard_count:
            check(
                len({(o.status, o.version) for o in outcomes}) == 1,
                "shards have different outcomes of push {}",
                push.staged.key,
            )
            self.sequence.close()
            self.min_version = max(self.min_version, *(outcome.version for outcome in outcomes))
            self.world.on_acknowledgement(push, outcomes[0])
            self.pull(self.continue_script)
        else:
            if self.world.rng.random() < 0.3:
                self.send_push(push)
            self.schedule(self.world.rng.random() * RETRY_SECONDS, lambda: self.await_outcome(push))

    def collect_outcomes(self, push: Push) -> None:
        """Collect the shards' outcomes of a push, some of which are lost.

        An outcome stays valid when the shard restarts. After a reshard the worker asks all shards
        again.
        """
        if self.shards != self.world.shard_count and self.world.rng.random() < 0.3:
            self.shards = self.world.shard_count  # an answer contained the new number
            self.outcomes.clear()
            self.send_push(push)
        for number, shard in enumerate(self.world.shards[: self.shards]):
            outcome = (
                shard.machine.outcome(push.staged.key) if shard.is_ready and shard.is_up else None
            )
            if outcome is not None and self.world.rng.random() < 0.7:
                self.outcomes.setdefault(number, outcome)

    def finish(self) -> None:
        is_last = self.training + 1 == self.world.scenario.trainings or self.is_draining
        self.has_finished = is_last
        # the script hung while the ranks without a worker were started again
        if self.world.takeovers and not self.world.coordinator.job.started:
            self.world.restart_worker(self.rank)
        self.world.update_is_finished()
        worker, self.worker = self.worker, self.worker if is_last else 0
        self.request_number += 1
        self.send_request(
            self.request_number,
            lambda recorder, now: recorder.do(Leave(worker, ""), now) or True,
            _ignore if is_last else lambda _: self.begin_next_training(),
        )


def _ignore(answer: Any) -> None: ...
