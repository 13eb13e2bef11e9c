"""Workers of one loop whose order of leases, pushes, waits and losses is drawn from a seed."""

import random
from dataclasses import dataclass, field

from pscommon.core.data_stream import Spec, StreamSpec
from pscommon.core.log_entries import Apply, BatchKey, PushKey, ShardReport, Staged
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from psserver.core.coordinator.data_requests import BatchRequest
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.settings import JobRules

MODEL = ModelSpec((TensorSpec("w", (1,), "float32"),), OptimizerSettings("sgd", ({"lr": 0.1},)))


@dataclass
class Worker:
    """hand: leased batches, each with the number of batches that follow in the same push.

    seq: sequence number of the newest push.
    """

    number: int
    received: int = 0
    seq: int = 0
    hand: list[tuple[BatchKey, int]] = field(default_factory=list)
    at_end: bool = False


class LoopWorkers:
    """Workers of a coordinator.

    lengths: samples in each source of a stream.
    updates: batches of each update, in order, by worker.
    """

    def __init__(
        self, rules: JobRules, spec: Spec, count: int, seed: int, lengths: tuple[int, ...] = ()
    ) -> None:
        self.rng = random.Random(seed)
        self.spec = spec
        self.lengths = lengths
        self.coordinator = CoordinatorMachine(1, rules)
        self.pushed: dict[PushKey, list[BatchKey]] = {}
        self.workers = [self.joined() for _ in range(count)]

    def joined(self) -> Worker:
        worker = Worker(self.coordinator.membership.join(0.0, None, "host", 1, "cpu").worker)
        if self.coordinator.registration.register(worker.number, MODEL, 0.0) == "upload":
            self.report(PushKey(worker.number, 0), [])
            assert self.coordinator.registration.register(worker.number, MODEL, 0.0) == "ready"
        return worker

    def report(self, key: PushKey, batches: list[BatchKey]) -> None:
        staged = Staged(key, len(batches), self.coordinator.job.version, tuple(batches))
        self.coordinator.reports.process(
            ShardReport(0, self.coordinator.job.log_id, 0, (staged,)), 0.0
        )

    def run(self) -> "LoopWorkers":
        steps = 0
        while not all(worker.at_end for worker in self.workers):
            steps += 1
            assert steps < 20_000, "no progress"
            self.step(self.rng.choice([worker for worker in self.workers if not worker.at_end]))
        return self

    def step(self, worker: Worker) -> None:
        """Do one possible operation of a worker: wait for its push, look ahead, push, wait for
        data.
        """
        if self.coordinator.membership.members[worker.number].seq < worker.seq:
            return
        if len(worker.hand) < 4 and self.rng.random() < 0.5:
            self.ask(worker, idle=False)
        elif any(after == 0 for _, after in worker.hand):
            self.push(worker)
        elif not self.ask(worker, idle=False):
            assert not worker.hand, "a part of a push"
            self.ask(worker, idle=True)

    def ask(self, worker: Worker, idle: bool) -> bool:
        count = self.rng.randint(1, 2)
        request = BatchRequest(worker.number, self.spec, worker.received, count, idle)
        answer = self.coordinator.data.lease(request, 0.0)
        if answer is None:
            return False
        worker.received += len(answer.numbers)
        following = answer.following or (0,) * len(answer.numbers)
        for number, after in zip(answer.numbers, following, strict=True):
            key = self.found(number)
            if isinstance(self.spec, StreamSpec) and not key.count:
                self.coordinator.data.give_back(worker.number, [key], 0.0)
            else:
                worker.hand.append((key, after))
        worker.at_end = answer.end and not worker.hand
        return bool(answer.numbers)

    def found(self, number: int) -> BatchKey:
        if not isinstance(self.spec, StreamSpec):
            return BatchKey(0, number)
        left = self.lengths[self.spec.source(number)] - self.spec.offset(number)
        return BatchKey(
            0, number, max(0, min(left, self.spec.batch_size)), left <= self.spec.batch_size
        )

    def push(self, worker: Worker) -> None:
        count = next(place for place, (_, after) in enumerate(worker.hand) if after == 0) + 1
        batches, worker.hand = [key for key, _ in worker.hand[:count]], worker.hand[count:]
        worker.seq += 1
        self.pushed[PushKey(worker.number, worker.seq)] = batches
        self.report(PushKey(worker.number, worker.seq), batches)

    def lose(self, worker: Worker) -> None:
        self.workers.remove(worker)
        self.coordinator.registration.leave(worker.number, "lost", 0.0)

    @property
    def updates(self) -> list[list[list[BatchKey]]]:
        """Batches by update and worker."""
        applies = [entry for entry in self.coordinator.log.after(0) if isinstance(entry, Apply)]
        return [[self.pushed[part.key] for part in apply.contributions] for apply in applies]
