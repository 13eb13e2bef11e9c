"""Failures of simulated servers: kills, restarts, failovers and rollbacks."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from unittest.mock import patch

from pscommon.core.errors import UnreachableError
from pscommon.core.log_entries import Apply, Reject
from pscommon.core.model_spec import model_to_json
from psserver.core.commands.recorder import Recorder
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.settings import JobRules
from psserver.core.servers.catch_up import promotion_needs_rollback
from psserver.core.servers.shard_directory import ShardDirectory
from psserver.durability import job_recovery
from psserver.durability.coordinator_log import CoordinatorLog
from psserver.durability.job_recovery import InitialState, Origin, recover_coordinator
from psserver.durability.shard_state import LogUnfitError
from psserver.durability.state_records import job_state
from psserver.replication import standby_state
from tests.sim.disks import Disk, SimLink, SimManifest, SimStandby
from tests.sim.invariants import check, check_each_collective, check_each_update
from tests.sim.scenario import Scenario
from tests.sim.servers import SimShard


class ServerFailures:
    """The part of World that kills, restarts and promotes servers."""

    rng: random.Random
    scenario: Scenario
    recorder: Recorder
    coordinator: CoordinatorMachine
    shards: list[SimShard]
    disks: list[Disk]
    directory: ShardDirectory[SimManifest]
    down_servers: set[int]
    shard_count: int
    snapshot: SimManifest | None
    now: float
    generation: int
    coordinator_class: type[CoordinatorMachine]
    new_coordinator: Callable[[int, int], CoordinatorMachine]
    rules: Callable[[], JobRules]
    updates: list[Apply]
    rejections: list[Reject]
    measure_interruptions: Counter[str]

    def kill_server(self, number: int | None = None) -> None:
        """Kill a server and start it again later."""
        number = self.rng.randrange(len(self.shards)) if number is None else number
        is_down = number in self.down_servers or number >= len(self.shards)
        if is_down or all(worker.has_finished for worker in self.workers):
            return
        self.down_servers.add(number)
        shard = self.shards[number]
        shard.is_up = False
        if shard.directory is self.directory and shard.connection is not None:
            self.directory.disconnect(shard.server, shard.connection)
        if self.coordinator.pending.measurement is not None:
            self.measure_interruptions[
                "takeover" if self.disks[number].standby is not None else "restart"
            ] += 1
        self.restarts += 1
        self.after(self.rng.random() * 4, lambda: self.start_server(number))

    def end_removed_servers(self) -> None:
        """End the servers that a reshard has removed."""
        for number, shard in enumerate(self.shards[self.shard_count :], self.shard_count):
            shard.is_up, shard.disk.standby = False, None
            self.down_servers.discard(number)
        del self.shards[self.shard_count :]

    def start_server(self, number: int) -> None:
        if number not in self.down_servers:
            return
        self.down_servers.remove(number)
        old, new = self.shards[number], self.new_shard(number)
        new.previous_process = old if old.is_ready else old.previous_process
        new.term = old.term
        self.shards[number] = new
        standby = self.disks[number].standby
        if standby is not None:
            if self.scenario.has_lagging_standbys:
                standby.lose_newest(self.rng.choice([0, 1, 2, 3, 6]))
            new.take_over(standby)
            new.term += 1
            self.takeovers += 1
        if number == 0:
            self.directory = self.new_directory()
        if number == 0 and self.scenario.has_log:
            self.recover_coordinator(standby)
        elif number == 0:
            self.roll_back()
        was_following = old.machine.log_id == self.coordinator.job.log_id
        if (
            was_following
            and standby is not None
            and not standby.lacks_records
            and 0 not in self.down_servers
        ):
            check(
                self.coordinator.log.can_go_on(new.machine.report()),
                "shard {} cannot follow the log after the failover",
                number,
            )
        self.disks[number].standby = None
        self.shards[number].send_report()

    def attach_standby(self) -> None:
        """Give a server a new standby, and kill the server after a random time."""
        number = self.rng.randrange(self.shard_count)
        shard, coordinator = self.shards[number], self.coordinator
        if number in self.down_servers or not shard.is_ready or coordinator.job.reshard is not None:
            return
        with suppress(UnreachableError), shard.engine.live.export_state(0.0) as records:
            state = coordinator.complete_state() | {
                "model": model_to_json(coordinator.job.model) if coordinator.job.model else None
            }
            self.disks[number].standby = SimStandby(
                [*records, *([job_state(state)] if number == 0 else [])]
            )
        self.after(
            self.rng.choice([0.02, 0.5, 5.0, 20.0]) * self.rng.random(),
            lambda: self.kill_server(number),
        )

    # ---- the coordinator

    @contextmanager
    def coordinator_classes(self) -> Iterator[None]:
        """Let recoveries and standbys create coordinators of this world's class."""
        with (
            patch.object(job_recovery, "CoordinatorMachine", self.coordinator_class),
            patch.object(standby_state, "CoordinatorMachine", self.coordinator_class),
        ):
            yield

    def new_coordinator_log(self) -> CoordinatorLog:
        disk = self.disks[0]
        disk.job_log.is_complete = False  # until this process begins a segment
        return CoordinatorLog(
            disk.job_log if self.scenario.has_log else None,  # type: ignore[arg-type]
            SimLink(disk),  # type: ignore[arg-type]
        )

    def install(self, initial: InitialState) -> None:
        """Begin a log with this state; replaces JobStart.install."""
        coordinator, log = initial.coordinator, self.new_coordinator_log()
        check_each_update(coordinator)
        check_each_collective(coordinator, self.collective_calls)
        if initial.origin is not Origin.LOG:
            log.clear()
        record = initial.first_record(coordinator.job.shards, self.generation, "simulated")
        log.begin_segment(coordinator.job.version, record)
        self.recorder = Recorder(coordinator, log)
        self.shard_count_file.shards = coordinator.job.shards
        self.directory.form(coordinator.job.following_shards)
        self.directory.new_log(self.snapshot)

    def recover_coordinator(self, standby: SimStandby | None) -> None:
        """Recover the coordinator that was killed, or roll back if the log does not allow that."""
        promoted_state = self.shards[0].promoted_state
        if promoted_state is not None and standby is not None and standby.lacks_records:
            assert promoted_state.coordinator is not None
            return self.take_over(promoted_state.coordinator)
        before, log, found = self.coordinator.job.as_json(), self.coordinator.log, None
        if promoted_state is not None:
            found = promoted_state.coordinator
        else:
            # a promoted standby that has not written a snapshot yet has no log on its disk
            with suppress(LogUnfitError), self.coordinator_classes():
                recovered = recover_coordinator(self.new_coordinator_log(), self.snapshot, 0)  # type: ignore[arg-type]
                found = recovered[0] if recovered is not None else None
        if found is None:
            return self.roll_back()
        after = found.job.as_json()
        check(
            json.dumps(before) == json.dumps(after),
            "recovered coordinator {} differs from {}",
            after,
            before,
        )
        if promoted_state is not None:
            check(
                log.after(log.base) == found.log.after(log.base),
                "entries after index {} are lost",
                log.base,
            )
        self.install(InitialState(Origin.LOG, found))
        self.recorder.recovered(self.now, self.generation, resumes=True)
        return self.flush()

    def take_over(self, coordinator: CoordinatorMachine) -> None:
        """Continue with the coordinator of a standby, which may lack acknowledged records."""
        self.generation += 1
        self.install(InitialState(Origin.PROMOTION, coordinator))
        del self.updates[coordinator.job.version :]
        self.rejections = [
            reject for reject in self.rejections if reject.index <= coordinator.log.index
        ]
        self._flushed_index = coordinator.log.index
        self.recorder.recovered(self.now, self.generation, is_complete=False)
        newest = self.snapshot.version if self.snapshot is not None else 0
        if promotion_needs_rollback(coordinator, self.shards[0].machine.report(), newest):
            self.roll_back()
        if not self.coordinator.job.started:
            self.restart_missing_workers()
        self.flush()

    def roll_back(self) -> None:
        """Roll all shards back to the newest complete snapshot, or to the start of the job."""
        check(
            not self.scenario.has_log or self.scenario.has_lagging_standbys,
            "updates are lost although the job has a log",
        )
        self.rollbacks += 1
        self.generation += 1
        snapshot, self.disks[0].standby = self.snapshot, None
        coordinator = self.new_coordinator(self.generation, self.shard_count)
        if snapshot is not None:
            coordinator.restore(snapshot.coordinator, self.model, self.now)
        else:  # as stored in the data directory
            coordinator.job.trainings = self.coordinator.job.trainings
        self.end_removed_servers()
        origin = Origin.FRESH if snapshot is None else Origin.SNAPSHOT
        self.install(InitialState(origin, coordinator))
        self.updates = list(snapshot.updates if snapshot else ())
        self.rejections = list(snapshot.rejections if snapshot else ())
        self._flushed_index = snapshot.index if snapshot is not None else 0
