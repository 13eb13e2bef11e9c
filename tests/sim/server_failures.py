"""Servers of the simulated world die, come back or are followed by their standbys; and all go
back to a snapshot.
"""

import json
import random
from collections import Counter

from pscommon.core.log_entries import Apply, Reject
from psserver.core.commands.recorder import Recorder
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.coordinator.shard_directory import ShardDirectory
from tests.sim.disks import Disk, JobJournal, Saved
from tests.sim.mirror import Mirror, mirror_of
from tests.sim.scenario import Scenario
from tests.sim.servers import SimShard, check, promoted_coordinator, recovered_coordinator


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
    decided: list[Apply]
    dropped: list[Reject]
    amid_measures: Counter[str]

    def kill_server(self, number: int | None = None) -> None:
        """A server dies, and is started again."""
        number = self.rng.randrange(len(self.shards)) if number is None else number
        gone = number in self.down or number >= len(self.shards)
        if gone or all(worker.done for worker in self.workers):
            return
        self.down.add(number)
        shard = self.shards[number]
        shard.up = False
        if shard.directory is self.directory and shard.connection is not None:
            self.directory.disconnect(shard.server, shard.connection)
        if self.coordinator.pending.measurement is not None:
            self.amid_measures[
                "takeover" if self.disks[number].mirror is not None else "restart"
            ] += 1
        self.restarts += 1
        self.after(self.rng.random() * 4, lambda: self.start_server(number))

    def end_servers(self) -> None:
        """Those that the model does not lie on any more."""
        for number, shard in enumerate(self.shards[self.layout :], self.layout):
            shard.up, shard.disk.mirror = False, None
            self.down.discard(number)
        del self.shards[self.layout :]

    def start_server(self, number: int) -> None:
        if number not in self.down:
            return
        self.down.remove(number)
        old, new = self.shards[number], self.new_shard(number)
        new.before = old if old.is_ready else old.before
        new.term = old.term
        self.shards[number] = new
        mirror = self.disks[number].mirror
        if mirror is not None:
            if self.scenario.lag:
                mirror.fall_behind(self.rng.choice([0, 1, 2, 3, 6]))
            new.take_over(mirror)
            new.term += 1
            self.takeovers += 1
        if number == 0:
            self.directory = self.new_directory(None)
        if number == 0 and self.scenario.durable:
            self.recover_coordinator()
        elif number == 0:
            self.go_back()
        if mirror is not None and not mirror.lacks and 0 not in self.down:
            check(
                self.coordinator.log.can_go_on(new.machine.report()),
                "shard {} cannot go on",
                number,
            )
        self.disks[number].mirror = None
        self.shards[number].send_report()

    def attach_standby(self) -> None:
        """A server that lives gets a standby; the one that it had is given up. Perhaps it dies
        soon.
        """
        number = self.rng.randrange(self.layout)
        shard = self.shards[number]
        if number not in self.down and shard.is_ready and self.coordinator.reshard is None:
            self.disks[number].mirror = mirror_of(shard, self.coordinator if number == 0 else None)
            self.after(
                self.rng.choice([0.02, 0.5, 5.0, 20.0]) * self.rng.random(),
                lambda: self.kill_server(number),
            )

    def recover_coordinator(self) -> None:
        mirror, saved = self.disks[0].mirror, self.saved
        if mirror is not None and mirror.lacks:
            self.take_over(mirror)
        elif self.scenario.lag and not self.disks[0].goes_on_from(saved):
            self.go_back()  # who took over had not come to a snapshot yet
        else:
            self.replay()

    def take_over(self, mirror: Mirror) -> None:
        """The standby of shard 0 coordinates now. It may lack what others know."""
        self.recorder = promoted_coordinator(self, mirror)
        coordinator, journal = self.coordinator, self.recorder.journal
        self.counts.shards = coordinator.shards
        self.directory = self.new_directory(self.saved)
        assert isinstance(journal, JobJournal)
        journal.begin(coordinator.version, coordinator.complete_state(), coordinator.shards)
        self.generation += 1
        del self.decided[coordinator.version :]
        self.dropped = [reject for reject in self.dropped if reject.index <= coordinator.log.index]
        self._flushed = coordinator.log.index
        self.recorder.recovered(self.now, self.generation, is_complete=False)
        is_old = self.saved is not None and self.saved.version > coordinator.version
        if is_old or not coordinator.log.can_go_on(self.shards[0].machine.report()):
            self.go_back()
        if not self.coordinator.started:
            self.bring_back()
        self.flush()

    def replay(self) -> None:
        """Be the coordinator that died, or its standby that is in sync with it."""
        before, disk, log = self.coordinator.state(), self.disks[0], self.coordinator.log
        self.recorder = (
            promoted_coordinator(self, disk.mirror)
            if disk.mirror
            else recovered_coordinator(self, disk, self.saved)
        )
        after = self.coordinator.state()
        check(json.dumps(before) == json.dumps(after), "recovered {} is not {}", after, before)
        if disk.mirror:
            check(
                log.after(log.base) == self.coordinator.log.after(log.base),
                "entries after {} are lost",
                log.base,
            )
        self.directory = self.new_directory(self.saved)
        self.recorder.journal.rotate(self.coordinator)
        self.recorder.recovered(self.now, self.generation, resumes=True)
        self.flush()

    def go_back(self) -> None:
        """All shards return to the newest complete snapshot, or to the beginning."""
        check(
            not self.scenario.durable or self.scenario.lag, "updates are lost in spite of the log"
        )
        self.rollbacks += 1
        self.generation += 1
        saved, self.disks[0].mirror = self.saved, None
        self.recorder = self.new_recorder(self.generation)
        self.end_servers()
        self.directory.form(self.layout)
        self.directory.new_log(saved)
        self.decided, self._flushed = list(saved.decided if saved else ()), 0
        self.dropped = list(saved.dropped if saved else ())
        if saved is not None:
            self.coordinator.restore(json.loads(saved.state), self.model, self.now)
            self._flushed = saved.index
            if isinstance(journal := self.recorder.journal, JobJournal):
                journal.begin(saved.version, self.coordinator.complete_state(), self.layout)
