"""What happens to workers of the simulated world, and what people do to it."""

import json
import random
from contextlib import suppress
from dataclasses import replace
from functools import partial

from pscommon.core.errors import InvalidRequestError, PSError
from psserver.core.commands.data_commands import LeaseBatches, ReportMetrics
from psserver.core.commands.job_commands import PolicyRow, SetPolicy
from psserver.core.commands.recorder import Recorder
from psserver.core.commands.worker_commands import Join, Leave
from psserver.core.coordinator.machine import CoordinatorMachine
from tests.sim import invalid_requests as absurd
from tests.sim.invariants import check
from tests.sim.scenario import Scenario
from tests.sim.workers import SimWorker


class Faults:
    """Part of the world."""

    rng: random.Random
    scenario: Scenario
    workers: list[SimWorker]
    to_come: int
    proofs: int
    now: float
    down: set[int]
    coordinator: CoordinatorMachine
    recorder: Recorder
    is_over: bool

    def kill_worker(self) -> None:
        """A worker dies; another takes its place, or not if others are left."""
        victims = [worker for worker in self.workers if worker.alive and not worker.done]
        if not victims:
            return
        victim = self.rng.choice(victims)
        victim.alive = False
        if self.scenario.proven:
            self.after(self.rng.random() * 0.5, lambda: self.prove_dead(victim.worker))
        others = any(not worker.draining for worker in victims if worker is not victim)
        if (
            not others
            or self.scenario.returns
            or self.rng.random() < 0.5
            or not self.coordinator.started
        ):
            attempt = victim.attempt + 1 if self.rng.random() < 0.5 else victim.attempt
            self.to_come += 1
            self.after(self.rng.random() * 8, lambda: self.start_worker(victim.rank, attempt))
        self.worker_ended()

    def prove_dead(self, worker: int | None) -> None:
        """The system of a worker says that its process is gone, though what it sent may still be
        on the way.
        """
        if worker is None or 0 in self.down:
            return
        self.recorder.tick(self.now, {worker: "its process has ended"})
        self.flush()
        self.proofs += 1
        member = self.coordinator.membership.members.get(worker)
        waits = member is not None and member.is_current and member.missing_since is None
        check(not waits, "others wait for worker {}, which is dead", worker)

    def worker_ended(self) -> None:
        self.is_over = not self.to_come and not any(
            worker.alive and not worker.done for worker in self.workers
        )

    def bring_back(self) -> None:
        """Start the ranks without a worker again, as an operator does: the coordinator no longer
        knows that the job had started.
        """
        here = {
            worker.rank
            for worker in self.workers
            if worker.alive and not worker.done and not worker.draining
        }
        for rank in sorted(set(range(self.scenario.workers)) - here):
            self.bring_back_one(rank)

    def bring_back_one(self, rank: int) -> None:
        attempt = max(worker.attempt for worker in self.workers if worker.rank == rank) + 1
        self.to_come += 1
        self.after(self.rng.random() * 8, partial(self.start_worker, rank, attempt))

    def start_worker(self, rank: int, attempt: int) -> None:
        self.to_come -= 1
        self.workers.append(SimWorker(self, rank, attempt))

    def pause_worker(self) -> None:
        """A worker is stopped, perhaps for longer than its lease, and goes on later."""
        victims = [worker for worker in self.workers if worker.alive and not worker.done]
        if victims:
            self.rng.choice(victims).awake_at = self.now + self.rng.choice([1.0, 4.0, 15.0])

    def hang_worker(self) -> None:
        """A worker's script makes no call for a while; its heartbeats go on."""
        victims = [
            worker for worker in self.workers if worker.alive and not worker.done and worker.worker
        ]
        if victims:
            victim = self.rng.choice(victims)
            victim.hangs_from, victim.hangs_until = (
                self.now,
                self.now + self.rng.choice([4.0, 30.0]),
            )

    def drain_worker(self) -> None:
        """A worker is asked to leave, if others are left."""
        victims = [
            worker
            for worker in self.workers
            if worker.alive and not worker.done and worker.used == []
        ]
        if len(victims) > 1 and self.coordinator.started:
            self.rng.choice(victims).draining = True

    def send_absurd_requests(self) -> None:
        """A process that is no correct worker joins and sends what it should not, or what raises
        a planted error.

        What is refused changes nothing. Its numbers are its own, so what it asks for harms only
        itself.
        """
        if 0 in self.down:
            return
        rng, coordinator = random.Random(self.rng.random()), self.coordinator
        worker = self.recorder.do(Join(rank=None, host="h", pid=1, device="cpu"), self.now).worker
        for _ in range(5):
            command = absurd.request(rng, [worker, 0, 2**64 - 1])
            if isinstance(command, absurd.OF_OPERATORS) or (
                isinstance(command, LeaseBatches) and command.spec.loop == 0
            ):
                continue  # the loop of the others is what its first worker says that it is
            before = json.dumps(coordinator.state())
            try:
                self.recorder.do(command, self.now)
            except InvalidRequestError:
                check(
                    json.dumps(coordinator.state()) == before,
                    "a refused {} changed something",
                    command,
                )
            except PSError:
                continue
        with suppress(ZeroDivisionError, PSError):
            self.recorder.do(ReportMetrics(worker, {absurd.FAULT: 1.0}), self.now)
        self.push_unfit(rng, worker)
        self.recorder.do(Leave(worker, "it was absurd"), self.now)
        self.flush()

    def push_unfit(self, rng: random.Random, worker: int) -> None:
        """Every shard reports a push of it that must not count."""
        before, push = self.coordinator.version, absurd.unfit_push(self.coordinator, rng, worker)
        for shard in self.shards[: self.coordinator.shards]:
            self.recorder.report(
                replace(shard.machine.report(), staged=(push,), measured=None), self.now
            )
        check(self.coordinator.version == before, "{} was applied", push)
        here = {shard.machine.log_id for shard in self.shards} == {self.coordinator.log_id}
        if here and self.all_ready and self.coordinator.reshard is None:
            check(not self.coordinator.reports.is_undecided(push.key), "{} was not refused", push)

    def switch_policy(self) -> None:
        if 0 not in self.down:
            row = self.rng.choice([PolicyRow("sync"), PolicyRow("async"), PolicyRow("ssp", 1)])
            self.recorder.do(SetPolicy(row), self.now)
            self.flush()
