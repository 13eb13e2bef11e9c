"""Simulated jobs under policy allreduce.

The workers have the weights. They exchange gradients and weights through memory that stands for
their process groups: a part of it arrives at each worker at another time.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from pscommon.core.limits import WORKERS_PER_GENERATION
from pscommon.core.log_entries import BatchKey, PushKey, Staged
from psserver.core.commands.data_commands import CallCollective, LeaseBatches
from psserver.core.commands.recorder import Recorder
from psserver.core.commands.worker_commands import AskForReduce
from psserver.core.job.policy import policy
from psserver.core.job.reduction import NO_WEIGHTS, ReduceRound
from psserver.core.shard.state_machine import PushOutcome
from tests.sim import verdict
from tests.sim.arrays import WEIGHT_COUNT
from tests.sim.invariants import check
from tests.sim.scenario import Scenario
from tests.sim.workers import Push, SimWorker, gradient
from tests.sim.world import World

Weights = tuple[float, ...]

FAILURE_CHANCE = 0.02
"""Chance that the operations of a worker fail, each time that it looks at them."""


def reducing(seed: int) -> Scenario:
    """Return the scenario of a seed under policy allreduce, with what the policy allows."""
    rng = random.Random(f"reduce {seed}")
    return replace(
        Scenario.for_seed(seed),
        policy=policy("allreduce"),
        workers=rng.randint(1, 4),
        has_log=False,
        has_lagging_standbys=False,
        standbys=0,
        reshards=0,
        policy_switches=0,
        bad_batch_interval=0,
        invalid_senders=0,
        clip_norm=None,
        optimizers=("",),
        trainings=1,
        sends_buffers=False,
        snapshot_interval=rng.choice([None, 1, 1, 2]),
        server_kills=rng.choice([0, 0, 0, 1]),
        worker_kills=rng.choice([0, 1, 2, 4]),
    )


class ReducingWorker(SimWorker):
    """A worker that keeps the weights.

    Attributes:
        version, weights: The weights that it has; version NO_WEIGHTS: none.
        ask_count: Number of its requests for reduce rounds.
        worker_before: Its number in its newest membership; 0: none.
        sum: The mean of the round that its push is of.
        blocked: The request that waits for other workers, and what follows its answer.
        after_upload: What follows the outcome of an upload.
        is_uploading: It makes the upload at its end.
        group: Number of its process group; 0: none.
        completed: Number of the newest round of weights that it has carried out.
        gradients, step_batches: The gradient of the current step, and the batches that it commits.
    """

    world: "ReduceWorld"

    def restart(self) -> None:
        if not self.start_count:
            self.forget_weights()
            self.worker_before = 0
        self.ask_count = 0
        self.sum: Weights | None = None
        self.blocked: tuple[Any, Callable[[Any], None]] | None = None
        self.after_upload: Callable[[], None] | None = None
        self.is_uploading = False
        self.group = self.completed = 0
        self.gradients: Weights = ()
        self.step_batches: tuple[BatchKey, ...] = ()
        super().restart()

    def forget_weights(self) -> None:
        self.version, self.weights = NO_WEIGHTS, (0.0,) * WEIGHT_COUNT

    def on_joined(self, member: Any) -> None:
        """Keep the weights after a lost membership, unless the servers have rolled back."""
        before = self.worker_before // WORKERS_PER_GENERATION
        if member.worker // WORKERS_PER_GENERATION != before:
            self.forget_weights()
        self.worker_before = member.worker
        super().on_joined(member)

    # ---- requests

    def request(self, command: Any, then: Callable[[Any], None]) -> None:
        is_wait = isinstance(command, CallCollective) or (
            isinstance(command, LeaseBatches) and command.idle
        )
        self.blocked = (command, then) if is_wait else None
        super().request(command, then)

    def send_request(
        self, number: int, perform: Callable[[Recorder, float], Any], then: Callable[[Any], None]
    ) -> None:
        """Repeat a request; first offer the weights if a worker waits for them."""
        job = self.world.coordinator.job
        is_wanted = job.reduction.wants_weights(job.version) and self.version == job.version
        if number == self.request_number and self.blocked is not None and is_wanted:
            command, following = self.blocked
            return self.ask(0, lambda: self.request(command, following))
        return super().send_request(number, perform, then)

    def ask(self, samples: int, then: Callable[[], None]) -> None:
        """Ask for a reduce round; without samples go on once this worker has the weights."""
        self.ask_count += 1
        command = AskForReduce(
            self.worker, self.ask_count, self.version, samples, completed=self.completed
        )
        self.request(command, partial(self.on_round, samples=samples, then=then))

    def on_round(self, found: ReduceRound, samples: int, then: Callable[[], None]) -> None:
        again = partial(self.ask, samples, then)
        if samples and found.kind != "gradients":
            again = partial(self.ask_for_step, samples)
        if found.kind == "none":
            then()
        elif found.kind == "download":
            self.download(again)
        elif found.kind == "upload":
            self.upload(again)
        else:
            self.connect(found)
            place = found.workers.index(self.worker)
            self.world.parts(found)[place] = found.kind, self.part(found)
            self.collect(found, again, then)

    def connect(self, found: ReduceRound) -> None:
        """Join the process group of a round. Its store keeps the addresses of a failed one."""
        if found.group == self.group:
            return
        key = found.group, self.worker
        check(key not in self.world.connected, "group {} has old addresses of {}", *key)
        self.world.connected.add(key)
        self.group = found.group

    def part(self, found: ReduceRound) -> Any:
        if found.kind == "weights":
            return self.version, self.weights
        job = self.world.coordinator.job
        if job.reduction.open is found:
            check(self.base == job.version, "{} reduces at {}", self.base, job.version)
        return self.gradients

    def collect(
        self, found: ReduceRound, again: Callable[[], None], then: Callable[[], None]
    ) -> None:
        """Wait until the parts of the others are here, or until the round is void."""
        parts, rng = self.world.parts(found), self.world.rng
        places = {worker: place for place, worker in enumerate(found.workers)}
        if rng.random() < FAILURE_CHANCE:
            return self.fail(found, again)
        needed = {places[found.source]} if found.kind == "weights" else {*places.values()}
        if needed <= parts.keys() and rng.random() < 0.7:
            kinds = {kind for kind, _ in parts.values()}
            check(kinds == {found.kind}, "a round of {} has {}", found.kind, kinds)
            if found.kind == "weights":
                _, (self.version, self.weights) = parts[places[found.source]]
                self.completed = found.number
                return again()
            total = sum(request.samples for request in found.requests)
            means = [0.0] * WEIGHT_COUNT
            for request in found.requests:
                share = request.samples / total
                pairs = zip(means, parts[places[request.worker]][1], strict=True)
                means = [mean + value * share for mean, value in pairs]
            self.sum = tuple(means)
            return self.push_round(found)

        def read_state(_: Recorder, now: float) -> tuple[bool]:
            return (self.world.coordinator.job.reduction.open.number == found.number,)

        def on_state(answer: tuple[bool]) -> None:
            if answer[0]:
                self.schedule(rng.random(), lambda: self.collect(found, again, then))
            else:
                self.fail(found, again)

        self.request_number += 1
        return self.send_request(self.request_number, read_state, on_state)

    def fail(self, found: ReduceRound, again: Callable[[], None]) -> None:
        """Go on after a round whose operations failed."""
        self.group = 0
        if found.kind == "weights":
            again()
        else:
            self.give_up()

    # ---- steps

    def step(
        self, optimizer: str, number: int, samples: int, batches: tuple[BatchKey, ...]
    ) -> None:
        self.gradients = tuple(gradient(number, self.base, each) for each in range(WEIGHT_COUNT))
        self.step_batches = batches
        self.ask_for_step(samples)

    def ask_for_step(self, samples: int) -> None:
        """Ask for a round of gradients, unless newer weights have arrived since the gradient."""
        if self.base == self.version:
            return self.ask(samples, self.give_up)
        return self.give_up()

    def push_round(self, found: ReduceRound) -> None:
        """Push without bytes: this worker has the sum of the round."""
        request = found.request_of(self.worker)
        assert request is not None
        self.send_staged(request.samples, self.step_batches, self.gradients, found.number)

    def send_staged(
        self,
        samples: int,
        batches: tuple[BatchKey, ...],
        gradients: Weights,
        number: int = 0,
        upload: bool = False,
    ) -> None:
        seq, _ = self.sequence.open()
        key, base = PushKey(self.worker, seq), self.version if upload else self.base
        staged = Staged(key, samples, base, batches, reduce_round=number, upload=upload)
        push = Push(staged, self.rank, gradients)
        self.world.pushes[key] = push
        self.outcomes.clear()
        self.send_push(push)
        self.await_outcome(push)

    def send_push(self, push: Push) -> None:
        """Send a push; one of a reduce round has no bytes."""
        if not push.staged.reduce_round:
            return super().send_push(push)
        for shard in self.world.shards[: self.shards]:
            self.world.send(partial(shard.push, push.staged, (), self.shards), shard)
        return None

    def give_up(self) -> None:
        """Return the batches of a void round."""
        push = Push(Staged(PushKey(self.worker, 0), 1, 0, self.step_batches), self.rank, ())
        self.world.return_batches(push)
        self.sum = None
        self.pull(self.continue_script)

    def pull(self, then: Callable[[], None]) -> None:
        """Make the step if the push counts; then go on with the newest weights."""
        if self.after_upload is not None:
            following, self.after_upload = self.after_upload, None
            return following()
        outcome = next(iter(self.outcomes.values()), None)
        if self.sum is not None and outcome is not None and outcome.status == "applied":
            check(outcome.version == self.version + 1, "{} steps to {}", self.version, outcome)
            pairs = zip(self.weights, self.sum, strict=True)
            self.weights = tuple(weight - mean for weight, mean in pairs)
            self.version += 1
            self.check_weights()
        self.sum = None
        return self.ask(0, lambda: self.go_on(then))

    def go_on(self, then: Callable[[], None]) -> None:
        self.base = self.version
        self.check_weights()
        then()

    def check_weights(self) -> None:
        """Check the weights against the world's own record of pushes."""
        if self.world.is_current(self):
            expected = self.world.weights_at(self.version)
            check(self.weights == expected, "weights {}, not {}", self.weights, expected)

    # ---- the servers' weights

    def download(self, then: Callable[[], None]) -> None:
        """Pull once the servers have carried out the same upload."""
        world = self.world
        shards = world.shards[: world.shard_count]
        versions = {shard.machine.weights_version for shard in shards}
        if world.are_shards_ready and len(versions) == 1:
            self.version, self.weights = versions.pop(), tuple(world.weights)
            return then()
        return self.schedule(world.rng.random(), lambda: self.download(then))

    def upload(self, then: Callable[[], None]) -> None:
        self.sum, self.after_upload = None, then
        self.send_staged(0, (), self.weights, upload=True)

    def finish(self) -> None:
        """Upload, then leave."""
        if self.version > self.world.coordinator.job.reduction.uploaded and not self.is_uploading:
            self.is_uploading = True
            return self.upload(self.finish)
        return super().finish()


@dataclass
class ReduceWorld(World):
    """A job under policy allreduce.

    Attributes:
        exchanged: What the workers of each round have exchanged, by place in the round. Only the
            numbers of process group and round tell rounds apart.
        connected: Each process group with each worker that has joined it.
        failures: Number of times that all workers with the newest weights were lost.
    """

    exchanged: dict[tuple[int, int], dict[int, Any]] = field(default_factory=dict)
    connected: set[tuple[int, int]] = field(default_factory=set)
    failures: int = 0
    worker_class: ClassVar[type[SimWorker]] = ReducingWorker

    def parts(self, found: ReduceRound) -> dict[int, Any]:
        return self.exchanged.setdefault((found.group, found.number), {})

    def is_current(self, worker: ReducingWorker) -> bool:
        """Return whether a worker belongs to the newest start of the servers."""
        return worker.worker > WORKERS_PER_GENERATION * self.generation

    def weights_at(self, version: int) -> Weights:
        """Return the weights of a version, from the record of pushes."""
        weights = [1.0] * WEIGHT_COUNT
        for apply in self.updates[:version]:
            total = sum(each.samples for each in apply.contributions)
            means = [0.0] * WEIGHT_COUNT
            for each in apply.contributions:
                pairs = zip(means, self.pushes[each.key].gradients, strict=True)
                means = [mean + value * (each.samples / total) for mean, value in pairs]
            weights = [weight - mean for weight, mean in zip(weights, means, strict=True)]
        return tuple(weights)

    def return_batches(self, push: Push) -> None:
        """Return the batches of a push that its worker does not make."""
        self.on_acknowledgement(push, PushOutcome("stale", 0))

    def report_death(self, worker: int | None) -> None:
        if self.coordinator.job.failure is None:  # else the job waits for no worker
            super().report_death(worker)

    def advance(self) -> None:
        super().advance()
        if self.coordinator.job.failure is not None and 0 not in self.down_servers:
            self.failures += 1
            made = {each.key.worker for each in self.updates[-1].contributions}
            here = made & {*self.coordinator.membership.current_workers()}
            check(not here, "the job fails although workers {} have its weights", here)
            self.roll_back()  # as an operator does, who restarts the servers

    def verify(self) -> None:
        """Check batches, the weights of all workers, and those that the servers have."""
        have_all_left = verdict.verify_batches(self)
        if have_all_left and not self.coordinator.job.begun:
            return
        verdict.verify_counts(self)
        for worker in self.workers:
            assert isinstance(worker, ReducingWorker)
            if worker.is_alive and worker.version != NO_WEIGHTS:
                worker.check_weights()
        uploaded = self.coordinator.job.reduction.uploaded
        check(tuple(self.weights) == self.weights_at(uploaded), "the servers lack {}", uploaded)
