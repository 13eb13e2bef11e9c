"""Random histories of a ledger: workers lease, push, return, change loops, leave, are replaced."""

import json
import random
from dataclasses import dataclass, field
from typing import TypeVar

from pscommon.core.data_loop import LoopSpec
from pscommon.core.log_entries import BatchKey
from psserver.core.data.data_ledger import DataLedger

T = TypeVar("T")
LOOPS = 3


@dataclass
class Worker:
    """State of a worker. hand: leased batches without a push, also of earlier loops."""

    number: int
    loop: int = 0
    received: dict[int, int] = field(default_factory=dict)
    hand: list[BatchKey] = field(default_factory=list)


class History:
    """Drives one or several ledgers, whose answers must be equal. counted: batches in commit
    order.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.specs = [
            LoopSpec(loop, self.rng.randint(0, 14), self.rng.randint(1, 4), self.rng.randint(1, 2))
            for loop in range(LOOPS)
        ]
        self.ledgers = [DataLedger()]
        self.barrier = self.rng.random() < 0.5
        self.last_number = 0
        self.workers = [self.new_worker() for _ in range(self.rng.randint(1, 4))]
        self.counted: list[BatchKey] = []
        self.thrown: list[BatchKey] = []

    def new_worker(self) -> Worker:
        self.last_number += 1
        return Worker(self.last_number)

    def together(self, worker: Worker) -> list[int]:
        return [w.number for w in self.workers] if self.barrier else [worker.number]

    def step(self) -> None:
        """Perform one random operation of a random worker."""
        act = self.rng.choices(
            [
                self.ask,
                self.push,
                self.give_back,
                self.evaluate,
                self.go_on,
                self.die,
                self.replace,
            ],
            [6, 5, 1, 0.5, 0.3, 0.3, 0.3],
        )[0]
        act(self.rng.choice(self.workers))

    def ask(self, worker: Worker) -> None:
        """Lease batches, sometimes after a lost answer; the second answer starts with the same
        batches.
        """
        received, count = worker.received.get(worker.loop, 0), self.rng.randint(1, 3)
        numbers = self.answer(worker, received, count)
        if self.rng.random() < 0.3:
            assert self.answer(worker, received, count)[: len(numbers)] == numbers
        worker.received[worker.loop] = received + len(numbers)
        worker.hand += [BatchKey(worker.loop, number) for number in numbers]

    def answer(self, worker: Worker, received: int, count: int) -> list[int]:
        return self.same([self.taken(ledger, worker, received, count) for ledger in self.ledgers])

    def taken(self, ledger: DataLedger, worker: Worker, received: int, count: int) -> list[int]:
        loop = ledger.open(worker.number, self.specs[worker.loop])
        return (
            [] if loop.ended else loop.take(worker.number, received, count, self.together(worker))
        )

    def push(self, worker: Worker) -> None:
        """Commit some of the leased batches."""
        count = self.rng.randint(0, len(worker.hand))
        keys, worker.hand = worker.hand[:count], worker.hand[count:]
        if not keys:
            return
        for ledger in self.ledgers:
            ledger.commit(worker.number, keys)
        self.counted += keys
        self.thrown = [key for key in self.thrown if key not in keys]
        # batches of earlier loops stay leased; their script does not push them
        worker.hand = [key for key in worker.hand if key.loop == worker.loop]

    def give_back(self, worker: Worker) -> None:
        mine = [key for key in worker.hand if key.loop == worker.loop]
        keys = self.rng.sample(mine, self.rng.randint(0, len(mine)))
        worker.hand = [key for key in worker.hand if key not in keys]
        for ledger in self.ledgers:
            if worker.loop in ledger.loops:
                ledger.loops[worker.loop].give_back(worker.number, [key.number for key in keys])

    def evaluate(self, worker: Worker) -> None:
        """Report batches as evaluated only, sometimes twice; no push contains them."""
        keys, worker.hand = worker.hand, []
        times = self.rng.choice([1, 2])
        for ledger in self.ledgers * times:
            ledger.use_up(worker.number, keys)
        # batches of earlier loops were discarded when the loop changed
        self.thrown += [key for key in keys if key.loop == worker.loop]

    def go_on(self, worker: Worker) -> None:
        """Open the next loop.

        The next push may contain unpushed batches; other workers get unsent batches.
        """
        if worker.loop < LOOPS - 1:
            sent = self.sent(worker)
            worker.loop += 1
            for ledger in self.ledgers:
                ledger.open(worker.number, self.specs[worker.loop])
            self.thrown += sent

    def sent(self, worker: Worker) -> list[BatchKey]:
        if (loop := self.ledgers[0].loops.get(worker.loop)) is None:
            return []
        ready = loop.leases.ready(worker.number)
        return [
            BatchKey(worker.loop, n) for n in loop.leases.leased_by(worker.number) if n not in ready
        ]

    def die(self, worker: Worker) -> None:
        self.workers[self.workers.index(worker)] = self.new_worker()
        for ledger in self.ledgers:
            ledger.give_back(worker.number)

    def replace(self, worker: Worker) -> None:
        """Replace a worker; the new worker starts at the job's first open loop."""
        successor = self.workers[self.workers.index(worker)] = self.new_worker()
        successor.loop = min(self.same([ledger.open_loop for ledger in self.ledgers]), LOOPS - 1)
        for ledger in self.ledgers:
            ledger.transfer(worker.number, successor.number)
            ledger.give_back(worker.number)

    def recover(self) -> None:
        """Add a ledger that is restored from the state of the first one."""
        twin = DataLedger()
        twin.recover(json.loads(json.dumps(self.ledgers[0].state())))
        self.ledgers.append(twin)

    def same(self, answers: list[T]) -> T:
        assert all(answer == answers[0] for answer in answers), answers
        return answers[0]
