"""Servers of the simulated world are killed, restarted or replaced by their standbys, and all
roll back to a snapshot.
"""

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
from psserver.durability.initial_state import InitialState, Origin
from psserver.durability.job_recovery import recover_coordinator
from psserver.durability.record_sink import RecordSink, RecordSource
from psserver.durability.shard_state import LogUnfitError
from psserver.durability.state_records import job_state
from psserver.replication import standby_state
from tests.sim.disks import Disk, Saved, SimLink, SimStandby
from tests.sim.invariants import check, watch
from tests.sim.scenario import Scenario
from tests.sim.servers import SimShard


class ServerFailures:
    """Part of the world."""

    rng: random.Random
    scenario: Scenario
    recorder: Recorder
    coordinator: CoordinatorMachine
    shards: list[SimShard]
    disks: list[Disk]
    directory: ShardDirectory[Saved]
    down: set[int]
    layout: int
    saved: Saved | None
    now: float
    generation: int
    coordinator_class: type[CoordinatorMachine]
    new_coordinator: Callable[[int, int], CoordinatorMachine]
    rules: Callable[[], JobRules]
    decided: list[Apply]
    dropped: list[Reject]
    amid_measures: Counter[str]

    def kill_server(self, number: int | None = None) -> None:
        """A server dies, and is started again."""
        number = self.rng.randrange(len(self.shards)) if number is None else number
        is_down = number in self.down or number >= len(self.shards)
        if is_down or all(worker.done for worker in self.workers):
            return
        self.down.add(number)
        shard = self.shards[number]
        shard.up = False
        if shard.directory is self.directory and shard.connection is not None:
            self.directory.disconnect(shard.server, shard.connection)
        if self.coordinator.pending.measurement is not None:
            self.amid_measures[
                "takeover" if self.disks[number].standby is not None else "restart"
            ] += 1
        self.restarts += 1
        self.after(self.rng.random() * 4, lambda: self.start_server(number))

    def end_servers(self) -> None:
        """End the servers that have no part of the model any more."""
        for number, shard in enumerate(self.shards[self.layout :], self.layout):
            shard.up, shard.disk.standby = False, None
            self.down.discard(number)
        del self.shards[self.layout :]

    def start_server(self, number: int) -> None:
        if number not in self.down:
            return
        self.down.remove(number)
        old, new = self.shards[number], self.new_shard(number)
        new.previous = old if old.is_ready else old.previous
        new.term = old.term
        self.shards[number] = new
        standby = self.disks[number].standby
        if standby is not None:
            if self.scenario.lag:
                standby.lose(self.rng.choice([0, 1, 2, 3, 6]))
            new.take_over(standby)
            new.term += 1
            self.takeovers += 1
        if number == 0:
            self.directory = self.new_directory()
        if number == 0 and self.scenario.durable:
            self.recover_coordinator(standby)
        elif number == 0:
            self.go_back()
        if standby is not None and not standby.lacks_records and 0 not in self.down:
            check(
                self.coordinator.log.can_go_on(new.machine.report()),
                "shard {} cannot go on",
                number,
            )
        self.disks[number].standby = None
        self.shards[number].send_report()

    def attach_standby(self) -> None:
        """A server gets a standby, instead of the one that it has, and may be killed soon."""
        number = self.rng.randrange(self.layout)
        shard, coordinator = self.shards[number], self.coordinator
        if number in self.down or not shard.is_ready or coordinator.reshard is not None:
            return
        with suppress(UnreachableError), shard.engine.live.export_state(0.0) as records:
            state = coordinator.complete_state() | {
                "model": model_to_json(coordinator.model) if coordinator.model else None
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
        """Let recoveries and standbys make this world's kind of coordinator."""
        with (
            patch.object(job_recovery, "CoordinatorMachine", self.coordinator_class),
            patch.object(standby_state, "CoordinatorMachine", self.coordinator_class),
        ):
            yield

    def new_journal(self) -> CoordinatorLog:
        disk = self.disks[0]
        disk.job_log.is_complete = False  # until this process begins a segment
        return CoordinatorLog(
            RecordSink(
                RecordSource.JOB,
                disk.job_log if self.scenario.durable else None,  # type: ignore[arg-type]
                SimLink(disk),  # type: ignore[arg-type]
            )
        )

    def install(self, initial: InitialState) -> None:
        """Begin a log with this state; stands for JobStart.install."""
        coordinator, journal = initial.coordinator, self.new_journal()
        watch(coordinator)
        if initial.origin is not Origin.LOG:
            journal.clear()
        record = initial.first_record(coordinator.shards, self.generation, "simulated")
        journal.begin_segment(coordinator.version, record)
        self.recorder = Recorder(coordinator, journal)
        self.counts.shards = coordinator.shards
        self.directory.form(coordinator.job.following_shards)
        self.directory.new_log(self.saved)

    def recover_coordinator(self, standby: SimStandby | None) -> None:
        """Continue as the coordinator that was killed."""
        promoted = self.shards[0].promoted
        if promoted is not None and standby is not None and standby.lacks_records:
            assert promoted.coordinator is not None
            return self.take_over(promoted.coordinator)
        before, log, found = self.coordinator.state(), self.coordinator.log, None
        if promoted is not None:
            found = promoted.coordinator
        else:
            # without a log: the former standby had not come to a snapshot yet
            with suppress(LogUnfitError), self.coordinator_classes():
                recovered = recover_coordinator(self.new_journal(), self.saved, 0)  # type: ignore[arg-type]
                found = recovered[0] if recovered is not None else None
        if found is None:
            return self.go_back()
        after = found.state()
        check(json.dumps(before) == json.dumps(after), "recovered {} is not {}", after, before)
        if promoted is not None:
            check(
                log.after(log.base) == found.log.after(log.base),
                "entries after {} are lost",
                log.base,
            )
        self.install(InitialState(Origin.LOG, found))
        self.recorder.recovered(self.now, self.generation, resumes=True)
        return self.flush()

    def take_over(self, coordinator: CoordinatorMachine) -> None:
        """The standby of shard 0 coordinates now. It may lack what others know."""
        self.generation += 1
        self.install(InitialState(Origin.PROMOTION, coordinator))
        del self.decided[coordinator.version :]
        self.dropped = [reject for reject in self.dropped if reject.index <= coordinator.log.index]
        self._flushed = coordinator.log.index
        self.recorder.recovered(self.now, self.generation, is_complete=False)
        newest = self.saved.version if self.saved is not None else 0
        if promotion_needs_rollback(coordinator, self.shards[0].machine.report(), newest):
            self.go_back()
        if not self.coordinator.started:
            self.bring_back()
        self.flush()

    def go_back(self) -> None:
        """All shards return to the newest complete snapshot, or to the beginning."""
        check(
            not self.scenario.durable or self.scenario.lag, "updates are lost in spite of the log"
        )
        self.rollbacks += 1
        self.generation += 1
        saved, self.disks[0].standby = self.saved, None
        coordinator = self.new_coordinator(self.generation, self.layout)
        if saved is not None:
            coordinator.restore(saved.coordinator, self.model, self.now)
        self.end_servers()
        origin = Origin.FRESH if saved is None else Origin.SNAPSHOT
        self.install(InitialState(origin, coordinator))
        self.decided = list(saved.decided if saved else ())
        self.dropped = list(saved.dropped if saved else ())
        self._flushed = saved.index if saved is not None else 0
