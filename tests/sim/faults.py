"""Faults of simulated workers, invalid requests, and operators' commands."""

import json
import random
from contextlib import suppress
from dataclasses import replace
from functools import partial

from pscommon.core.errors import InvalidRequestError, PSError
from psserver.core.commands.data_commands import LeaseBatches, ReportMetrics
from psserver.core.commands.job_commands import PolicySettings, SetPolicy
from psserver.core.commands.recorder import Recorder
from psserver.core.commands.worker_commands import Join, Leave
from psserver.core.coordinator.machine import CoordinatorMachine
from tests.sim import invalid_requests as invalid_requests
from tests.sim.invariants import check
from tests.sim.scenario import Scenario
from tests.sim.workers import SimWorker
from tests.support.shard_reports import report_to


class WorkerFaults:
    """The part of World that kills, stops and drains workers and sends other requests."""

    rng: random.Random
    scenario: Scenario
    workers: list[SimWorker]
    worker_class: type[SimWorker]
    pending_starts: int
    death_proofs: int
    now: float
    down_servers: set[int]
    coordinator: CoordinatorMachine
    recorder: Recorder
    is_finished: bool

    def kill_worker(self) -> None:
        """Kill a worker. Usually start a successor later, always if no other worker is left."""
        victims = [worker for worker in self.workers if worker.is_alive and not worker.has_finished]
        if not victims:
            return
        victim = self.rng.choice(victims)
        victim.is_alive = False
        if self.scenario.proves_deaths:
            self.after(self.rng.random() * 0.5, lambda: self.report_death(victim.worker))
        others = any(not worker.is_draining for worker in victims if worker is not victim)
        if (
            not others
            or self.scenario.restarts_workers
            or self.rng.random() < 0.5
            or not self.coordinator.job.started
        ):
            attempt = victim.attempt + 1 if self.rng.random() < 0.5 else victim.attempt
            self.pending_starts += 1
            self.after(self.rng.random() * 8, lambda: self.start_worker(victim.rank, attempt))
        self.update_is_finished()

    def report_death(self, worker: int | None) -> None:
        """Give the coordinator a proof that a worker's process has ended.

        Messages of the worker may still be in flight.
        """
        if worker is None or 0 in self.down_servers:
            return
        self.recorder.tick(self.now, {worker: "its process has ended"})
        self.flush()
        self.death_proofs += 1
        member = self.coordinator.membership.members.get(worker)
        waits = member is not None and member.is_current and member.missing_since is None
        check(not waits, "the job waits for worker {}, whose death is proven", worker)

    def update_is_finished(self) -> None:
        self.is_finished = not self.pending_starts and not any(
            worker.is_alive and not worker.has_finished for worker in self.workers
        )

    def restart_missing_workers(self) -> None:
        """Start a worker for each rank without one, as an operator does.

        The coordinator of a promoted standby may not know that the job had started.
        """
        present = {
            worker.rank
            for worker in self.workers
            if worker.is_alive and not worker.has_finished and not worker.is_draining
        }
        for rank in sorted(set(range(self.scenario.workers)) - present):
            self.restart_worker(rank)

    def restart_worker(self, rank: int) -> None:
        attempt = max(worker.attempt for worker in self.workers if worker.rank == rank) + 1
        self.pending_starts += 1
        self.after(self.rng.random() * 8, partial(self.start_worker, rank, attempt))

    def start_worker(self, rank: int, attempt: int) -> None:
        self.pending_starts -= 1
        self.workers.append(self.worker_class(self, rank, attempt))

    def pause_worker(self) -> None:
        """Stop a worker's process for a while, sometimes for longer than its lease."""
        victims = [worker for worker in self.workers if worker.is_alive and not worker.has_finished]
        if victims:
            self.rng.choice(victims).stopped_until = self.now + self.rng.choice([1.0, 4.0, 15.0])

    def hang_worker(self) -> None:
        """Let a worker's script make no call for a while; its heartbeats continue."""
        victims = [
            worker
            for worker in self.workers
            if worker.is_alive and not worker.has_finished and worker.worker
        ]
        if victims:
            victim = self.rng.choice(victims)
            victim.hangs_from, victim.hangs_until = (
                self.now,
                self.now + self.rng.choice([4.0, 30.0]),
            )

    def drain_worker(self) -> None:
        """Ask a worker to leave if other workers remain."""
        victims = [
            worker
            for worker in self.workers
            if worker.is_alive and not worker.has_finished and worker.batches == []
        ]
        if len(victims) > 1 and self.coordinator.job.started:
            self.rng.choice(victims).is_draining = True

    def send_invalid_requests(self) -> None:
        """Join as a worker and send invalid requests, and one that raises a planted error.

        Refused requests must change nothing. The others name only this worker, so they do not
        affect other workers.
        """
        if 0 in self.down_servers:
            return
        rng, coordinator = random.Random(self.rng.random()), self.coordinator
        worker = self.recorder.do(Join(rank=None, host="h", pid=1, device="cpu"), self.now).worker
        for _ in range(5):
            command = invalid_requests.request(rng, [worker, 0, 2**63 - 1])
            if isinstance(command, invalid_requests.JOB_WIDE_REQUESTS) or (
                isinstance(command, LeaseBatches) and command.spec.loop == 0
            ):
                continue  # the first request for loop 0 would define it for all workers
            before = json.dumps(coordinator.job.as_json())
            try:
                self.recorder.do(command, self.now)
            except InvalidRequestError:
                check(
                    json.dumps(coordinator.job.as_json()) == before,
                    "the refused command {} changed the state",
                    command,
                )
            except PSError:
                continue
            invalid_requests.encode(coordinator)
        with suppress(ZeroDivisionError, PSError):
            self.recorder.do(ReportMetrics(worker, {invalid_requests.FAULT: 1.0}), self.now)
        self.report_unfit_push(rng, worker)
        self.recorder.do(Leave(worker, "sent invalid requests"), self.now)
        self.flush()

    def report_unfit_push(self, rng: random.Random, worker: int) -> None:
        """Report a push of this worker from every shard that must not count."""
        before, push = (
            self.coordinator.job.version,
            invalid_requests.unfit_push(self.coordinator, rng, worker),
        )
        for shard in self.shards[: self.coordinator.job.shards]:
            report_to(
                self.recorder,
                replace(shard.machine.report(), staged=(push,), measured=None),
                self.now,
            )
        check(self.coordinator.job.version == before, "push {} was applied", push)
        all_follow = {shard.machine.log_id for shard in self.shards} == {
            self.coordinator.job.log_id
        }
        if all_follow and self.are_shards_ready and self.coordinator.job.reshard is None:
            check(
                not self.coordinator.reports.is_undecided(push.key), "push {} was not refused", push
            )

    def switch_policy(self) -> None:
        if 0 not in self.down_servers:
            settings = self.rng.choice(
                [PolicySettings("sync"), PolicySettings("async"), PolicySettings("ssp", 1)]
            )
            self.recorder.do(SetPolicy(settings), self.now)
            self.flush()
