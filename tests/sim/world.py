"""A simulated job in one thread: the shipped servers over a network that delays, loses, repeats
and reorders messages.

The seed determines every random draw. The magnitudes of gradients vary widely, so that a different
order of summation gives different bits. The simulation checks each invariant of ARCHITECTURE.md,
where possible against its own record of pushes.
"""

import heapq
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import ClassVar

from pscommon.core.data_loop import LoopSpec
from pscommon.core.errors import FencedError, MismatchError
from pscommon.core.log_entries import Apply, Entry, Measure, PushKey, Reject, ShardReport
from psserver.core.commands.data_commands import ReturnBatches
from psserver.core.commands.job_commands import RecordPart
from psserver.core.commands.recorder import RESHARD_SNAPSHOT_RETRY_SECONDS
from psserver.core.commands.waiting import waiting_for
from psserver.core.commands.worker_commands import Join
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.settings import JobRules
from psserver.core.job.snapshot_schedule import PartReport, SnapshotInProgress, SnapshotInterval
from psserver.core.servers.catch_up import CatchUp
from psserver.core.servers.server_entry import DeliveryCursor
from psserver.core.servers.shard_directory import ShardDirectory
from psserver.core.servers.shard_protocol import (
    finish_snapshot,
    process_report,
    replace_process,
    start_reshard,
)
from psserver.core.shard.state_machine import NO_LOG, PushOutcome
from psserver.core.workers.collectives import CollectiveValues
from psserver.core.workers.members import Member, WorkerHeartbeat
from psserver.durability.job_recovery import InitialState, Origin
from tests.sim import verdict
from tests.sim.arrays import WEIGHT_COUNT, model_of
from tests.sim.disks import Disk, SimManifest
from tests.sim.faults import WorkerFaults
from tests.sim.invalid_requests import FaultyCoordinator
from tests.sim.invariants import InvariantError, check
from tests.sim.scenario import END_SECONDS, LEASE_SECONDS, Scenario
from tests.sim.server_failures import ServerFailures
from tests.sim.servers import SimShard
from tests.sim.workers import Push, SimWorker


@dataclass
class World(WorkerFaults, ServerFailures):
    """The servers and workers of a job, their clock and their network.

    Attributes:
        now: Simulated time in seconds.
        queue: Time, number and action of each scheduled event.
        pushes: Every push of a worker.
        collective_calls: What workers have passed to their calls, by worker and number.
        collective_results: Results by generation and number of the call.
        pending_starts: Number of workers that will start.
        messages, restarts, rollbacks, takeovers, reshards, death_proofs: Counts of events.
        updates, rejections: Apply entries, and Reject entries of bad gradients, in the job's log.
        snapshot: The newest complete snapshot.
        is_network_perfect: Messages arrive at once, and snapshots never fail.
        is_finished: No worker is left.
        is_measurement_pending: The newest Measure has no Apply yet.
        measure_interruptions: Number of events between a Measure and its Apply, by kind.
        down_servers: Shards whose server was killed and has not restarted.
        trainings_finished: Number of trainings before the current one.
    """

    scenario: Scenario
    coordinator_class: type[CoordinatorMachine] = FaultyCoordinator
    shard_class: type[SimShard] = SimShard
    now: float = 0.0
    queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    pushes: dict[PushKey, Push] = field(default_factory=dict)
    collective_calls: dict[tuple[int, int], CollectiveValues] = field(default_factory=dict)
    collective_results: dict[tuple[int, int], CollectiveValues] = field(default_factory=dict)
    worker_class: ClassVar[type[SimWorker]] = SimWorker

    def __post_init__(self) -> None:
        self.rng = random.Random(self.scenario.seed * 7919 + 1)
        self.model = model_of(self.scenario.optimizers, self.scenario.clip_norm)
        self.loop = LoopSpec(0, self.scenario.batches, 1, self.scenario.epochs, False, True, 0)
        self._event_count = self.pending_starts = self.messages = self.restarts = self.rollbacks = (
            self.takeovers
        ) = 0
        self.death_proofs = self.trainings_finished = 0
        self.generation = self._flushed_index = 0
        self.updates: list[Apply] = []
        self.rejections: list[Reject] = []
        self.snapshot: SimManifest | None = None
        self.is_network_perfect = self.is_finished = False
        self.is_measurement_pending = False
        self.measure_interruptions: Counter[str] = Counter()
        self.process_numbers = itertools.count()
        self.shard_count_file = SimpleNamespace(
            shards=self.scenario.shards, changes=0, past=set[int]()
        )
        self.reshards = 0
        self.disks = [Disk() for _ in range(WEIGHT_COUNT)]
        self.down_servers: set[int] = set()
        self.directory = self.new_directory()
        self.install(InitialState(Origin.FRESH, self.new_coordinator(0, self.shard_count)))
        self.shards = [self.new_shard(shard) for shard in range(self.shard_count)]
        for shard in self.shards:
            shard.follow(0)
        self.workers = [self.worker_class(self, rank) for rank in range(self.scenario.workers)]
        self.tick()
        self.plan_faults()

    def plan_faults(self) -> None:
        scenario = self.scenario
        faults: list[tuple[int, Callable[[], None]]] = [
            (scenario.worker_kills, self.kill_worker),
            (scenario.server_kills, self.kill_server),
            (scenario.pauses, self.pause_worker),
            (scenario.hangs, self.hang_worker),
            (scenario.drains, self.drain_worker),
            (scenario.policy_switches, self.switch_policy),
            (scenario.standbys, self.attach_standby),
            (scenario.reshards, self.reshard),
            (scenario.invalid_senders, self.send_invalid_requests),
        ]
        for count, fault in faults:
            for _ in range(count):
                self.after(self.rng.random() * 20, fault)

    def new_shard(self, number: int) -> SimShard:
        return self.shard_class(self, number, self.shard_count, self.disks[number])

    def rules(self) -> JobRules:
        scenario = self.scenario
        # workers that left before a rollback, or died in an earlier training, do not come back
        is_first = not self.rollbacks and not self.trainings_finished
        min_workers = scenario.workers if is_first else 1
        return JobRules(
            scenario.policy,
            min_workers,
            LEASE_SECONDS,
            SnapshotInterval(steps=scenario.snapshot_interval),
            scenario.on_loss,
            bad_gradients="skip",
            progress_timeout=scenario.progress_timeout,
        )

    def new_coordinator(self, log_id: int, shards: int) -> CoordinatorMachine:
        return self.coordinator_class(shards, self.rules(), log_id)

    def new_directory(self) -> ShardDirectory[SimManifest]:
        """Return the empty directory of a new process of server 0."""
        return ShardDirectory[SimManifest](self.shard_count_file, "server 0")

    @property
    def shard_count(self) -> int:
        """Number of shards of the job; during a reshard, the new number."""
        return int(self.shard_count_file.shards)

    def store_count(self, shards: int) -> None:
        file = self.shard_count_file
        file.past |= {file.shards}
        file.shards, file.changes = shards, file.changes + 1

    @property
    def coordinator(self) -> CoordinatorMachine:
        return self.recorder.coordinator

    @property
    def are_shards_ready(self) -> bool:
        """Whether every shard has weights and follows the coordinator's log."""
        machines = [shard.machine for shard in self.shards[: self.shard_count] if shard.is_ready]
        following = [
            m.begun and not m.is_resharding and m.log_id == self.coordinator.job.log_id
            for m in machines
        ]
        return not self.down_servers and len(following) == self.shard_count and all(following)

    @property
    def weights(self) -> list[float]:
        return [weight for shard in self.shards for weight in shard.weights]

    @property
    def can_bits_differ(self) -> bool:
        """Whether the bits may differ from those of a job with another number of shards.

        A norm is a sum over the shards.
        """
        return self.scenario.clip_norm is not None and self.reshards > 0

    def has_bad_gradient(self, number: int) -> bool:
        interval = self.scenario.bad_batch_interval
        return interval > 0 and number % interval == 1

    # ---- time and network

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._event_count += 1
        heapq.heappush(self.queue, (self.now + seconds, self._event_count, action))

    def send(self, deliver: Callable[[], None], server: SimShard) -> None:
        """Send a message to or from a server.

        The message arrives late, and sometimes twice or never. It is lost if the server is killed
        before it arrives.
        """
        rng = self.rng

        def arrive() -> None:
            if server.is_up:
                deliver()

        self.messages += 1
        if self.is_network_perfect:
            return arrive()
        if not server.is_up or rng.random() < self.scenario.message_loss:
            return None
        self.after(rng.random() * 0.2, arrive)
        if rng.random() < self.scenario.message_loss:
            self.after(rng.random() * 2.0, arrive)
        return None

    def run(self) -> None:
        queue = self.queue
        while not self.is_finished:
            if self.now > END_SECONDS:
                raise InvariantError(
                    f"the job makes no progress: {waiting_for(self.coordinator, self.now)}"
                )
            self.now, _, action = heapq.heappop(queue)
            action()
        if self.scenario.has_log or not (
            self.down_servers or any(not shard.is_ready for shard in self.shards)
        ):
            self.let_shards_catch_up()
            self.verify()

    def let_shards_catch_up(self) -> None:
        """Start the killed servers, and let every shard catch up over a perfect network."""
        for number in list(self.down_servers):
            self.start_server(number)
        self.is_network_perfect = True
        for _ in range(20):
            if self.coordinator.job.reshard is not None:
                self.now += (
                    RESHARD_SNAPSHOT_RETRY_SECONDS  # the snapshot that ends it may have failed
                )
            self.advance()
            if self.are_shards_caught_up:
                return
        raise InvariantError(f"shards do not catch up; reshard: {self.coordinator.job.reshard}")

    @property
    def are_shards_caught_up(self) -> bool:
        """Whether every shard has carried out all entries of the log."""
        end = self.coordinator.job.log_id, self.coordinator.log.index
        are_at_end = all(
            shard.is_ready and (shard.machine.log_id, shard.machine.index) == end
            for shard in self.shards
        )
        return are_at_end and self.coordinator.job.reshard is None

    # ---- the process of the coordinator

    def tick(self) -> None:
        self.advance()
        self.after(1.0, self.tick)

    def advance(self) -> None:
        """Perform the periodic work of the coordinator and the shards."""
        if 0 not in self.down_servers:
            self.recorder.tick(self.now)
            self.flush()
            if self.coordinator.cuts.finished is not None:
                self.on_snapshot()
        for shard in list(self.shards):
            shard.send_report()
            if self.coordinator.cuts.cutting is not None:
                shard.send_part()

    def admit(self, command: Join) -> Member | None:
        """Let a worker join its training, as `add_member` does; None: it has to wait."""
        job = self.coordinator.job
        if not job.trainings.admits(command.training):
            if job.membership.current() or job.reshard is not None:
                return None
            self.begin_training(command.training)
        return self.recorder.do(command, self.now)

    def begin_training(self, name: str) -> None:
        """Begin the next training; replaces JobStart.begin_training."""
        verdict.verify_batches(self)
        self.trainings_finished += 1
        is_new = self.trainings_finished < self.scenario.trainings
        check(is_new, "a training that is over begins again")
        self.generation += 1
        before, self.snapshot, self.disks[0].standby = self.coordinator.job, None, None
        coordinator = self.new_coordinator(self.generation, self.shard_count)
        coordinator.job.trainings = before.trainings.followed_by(name)
        coordinator.job.policy = before.policy
        self.install(InitialState(Origin.FRESH, coordinator))
        self.updates, self.rejections, self._flushed_index = [], [], 0
        self.is_measurement_pending = False
        self.flush()

    def on_heartbeat(self, sender: SimWorker, worker: int, no_call_seconds: float) -> None:
        try:
            member = self.coordinator.job.member(worker, self.now)
            member.heartbeat = WorkerHeartbeat(no_call_seconds=no_call_seconds)
        except FencedError:
            self.send(
                lambda: sender.schedule(0.0, lambda: sender.on_fenced(worker)), self.shards[0]
            )

    def connect(self, shard: SimShard) -> None:
        """Connect a server to the coordinator, which may not know its process yet."""
        self.directory.release_leavers(self.coordinator)
        number, followed = shard.machine.shard, shard.machine.log_id != NO_LOG
        shard.directory, replaces = self.directory, False
        if number == 0:
            shard.server, shard.connection = self.directory[0], None
        else:
            shard.server, replaces = self.directory.connect(
                number, self.shard_count, f"server {number}", shard.instance, followed, shard.term
            )
            shard.connection = shard.server.connection
        if replaces:
            replace_process(self.recorder, self.directory, shard.server, self.now)

    def on_report(self, report: ShardReport, shard: SimShard, has_recovered: bool) -> None:
        if 0 in self.down_servers or not shard.is_up:
            return None
        if shard.directory is not self.directory:
            try:
                self.connect(shard)
            except MismatchError:  # the promoted standby does not know of the reshard
                return self.end_removed_servers()
        server = shard.server
        if has_recovered and server.catch_up is CatchUp.RECOVER:
            self.directory.end_catch_up(server)
        decision = process_report(
            self.recorder,
            self.directory,
            server,
            shard.connection,
            report,
            self.now,
            self.scenario.has_log,
        )
        if decision.catch_up is CatchUp.GO_BACK:
            return self.roll_back()
        self.flush()
        return self.deliver(shard, DeliveryCursor(report.log_id, report.index))

    def set_model(self) -> None:
        """Tell each shard the model; a push that arrives first waits for it."""
        model = self.coordinator.job.model
        for shard in self.shards if model is not None else ():
            if shard.is_up and shard.is_ready and shard.engine.live.state.model is None:
                shard.engine.set_model(model)

    def deliver(self, shard: SimShard, cursor: DeliveryCursor) -> None:
        """Send a server its catch-up action and the entries that it has not received."""
        coordinator, recorder, reshard = (
            self.coordinator,
            self.recorder,
            self.coordinator.job.reshard,
        )
        delivery = self.directory.next_delivery(shard.server, cursor, coordinator)
        if delivery is None:
            return
        action = self.catch_up_action(shard, delivery.catch_up)
        log_id, entries = coordinator.job.log_id, delivery.entries

        def arrive() -> None:
            """Carry out the delivery.

            A delivery of a killed coordinator arrives before those of its successor, or is lost.
            """
            action()
            if self.recorder is recorder or self.coordinator.job.log_id == log_id:
                shard.receive_entries(log_id, entries)
                if (
                    reshard is not None
                    and reshard is self.coordinator.job.reshard
                    and (shard.machine.shard < reshard.shards)
                ):
                    shard.build_partition(reshard, log_id)

        self.send(arrive, shard)

    def catch_up_action(self, shard: SimShard, catch_up: CatchUp) -> Callable[[], None]:
        """Return what a server does before it follows the log."""
        log_id, base = self.coordinator.job.log_id, self.coordinator.log.base
        newest, log_start, reshard = (
            self.snapshot,
            self.directory.snapshot,
            self.coordinator.job.reshard,
        )
        donor = self.shards[0]
        if catch_up is CatchUp.RECOVER:
            return lambda: shard.recover(newest, log_id)
        if catch_up is CatchUp.RESTORE and log_start is not None:
            return lambda: shard.load(log_start, log_id)
        if catch_up is CatchUp.BEGIN:
            return lambda: shard.follow(log_id, base)
        if (
            catch_up is CatchUp.ADOPT
            and reshard is not None
            and donor.machine.index >= reshard.index
        ):
            state = json.dumps(donor.machine.state())
            return lambda: shard.adopt(state, reshard, log_id)
        return lambda: None

    def on_part(self, shard: int, part: PartReport) -> None:
        if 0 not in self.down_servers:
            self.recorder.do(RecordPart(shard, part), self.now)

    def on_snapshot(self) -> None:
        """Write the manifest of a snapshot whose parts are written; sometimes the disk fails."""
        cutting = self.coordinator.cuts.finished
        assert cutting is not None
        is_written = self.is_network_perfect or self.rng.random() < 0.9
        if is_written:
            self.save(cutting)
        finish_snapshot(self.recorder, self.now, is_written, self.scenario.has_log)
        self.flush()

    def save(self, cutting: SnapshotInProgress) -> None:
        self.snapshot = SimManifest(
            cutting.version,
            cutting.index,
            json.loads(json.dumps(cutting.state)),
            self.model,
            self.coordinator.job.shards,
            tuple(self.updates[: cutting.version]),
            tuple(reject for reject in self.rejections if reject.index <= cutting.index),
        )
        for number, disk in enumerate(self.disks):
            # a shard that still reads its log receives the snapshot later
            if number >= len(self.shards) or self.shards[number].is_ready:
                disk.shard_log.remove_before(cutting.version)
            disk.job_log.remove_before(cutting.version)

    def flush(self) -> None:
        """Record new entries, send them to all shards, and end removed servers."""
        coordinator, before = self.coordinator, self._flushed_index
        if self.directory.release_leavers(coordinator):
            self.end_removed_servers()
        self.set_model()
        if coordinator.log.index == before:
            return
        new = coordinator.log.after(before)
        self._flushed_index = new[-1].index
        for entry in new:
            self.record_entry(entry)
        for shard in list(self.shards):
            if shard.directory is self.directory and shard.server.ready:
                self.deliver(
                    shard, DeliveryCursor(coordinator.job.log_id, before, shard.server.catch_up)
                )

    def record_entry(self, entry: Entry) -> None:
        if self.is_measurement_pending:
            self.measure_interruptions[type(entry).__name__.lower()] += 1
        if isinstance(entry, Apply | Measure):
            self.is_measurement_pending = isinstance(entry, Measure)
        if isinstance(entry, Apply):
            check(
                entry.version == len(self.updates) + 1,
                "version {} follows version {}",
                entry.version,
                len(self.updates),
            )
            self.updates.append(entry)
        elif isinstance(entry, Reject) and entry.reason == "NON_FINITE":
            self.rejections.append(entry)

    def on_acknowledgement(self, push: Push, outcome: PushOutcome | None) -> None:
        """Check the outcome that a worker has received; return the batches of a stale push."""
        assert outcome is not None
        verdict.check_outcome(self, push, outcome)
        if outcome.status == "stale":
            batches, worker = list(push.staged.batches), push.staged.key.worker
            with suppress(FencedError):  # the worker may be fenced and not know it yet
                self.recorder.do(ReturnBatches(worker, batches), self.now)

    # ---- faults

    def reshard(self) -> None:
        """Reshard the job; new servers run already. Sometimes kill a server during the reshard."""
        if self.is_network_perfect or all(worker.has_finished for worker in self.workers):
            return None
        shards = self.rng.choice(
            [number for number in range(1, WEIGHT_COUNT + 1) if number != self.shard_count]
        )
        writes_snapshot = self.scenario.has_log or self.rng.random() < 0.5
        if 0 in self.down_servers or not start_reshard(
            self.recorder, self.directory, shards, writes_snapshot, self.store_count, self.now
        ):
            return self.after(0.5, self.reshard)
        self.reshards += 1
        self.shards += [self.new_shard(number) for number in range(len(self.shards), shards)]
        self.flush()
        if self.scenario.server_kills and self.rng.random() < 0.5:
            self.after(self.rng.random() * 3, self.kill_server)
        return None

    # ---- the checks

    def verify(self) -> None:
        """Check the whole history."""
        verdict.verify(self)


def run(seed: int, **classes: type) -> World:
    """Run the job of a seed. Replay a failure with: python -m tests.sim.replay SEED"""
    world = World(Scenario.for_seed(seed), **classes)  # type: ignore[arg-type]
    world.run()
    return world
