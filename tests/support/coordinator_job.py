"""A coordinator that a test drives request by request."""

from collections.abc import Sequence

from pscommon.core.data_loop import LoopSpec
from pscommon.core.log_entries import Apply, BatchKey, Entry, PushKey, ShardReport, Staged
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from psserver.core.commands.data_commands import LeaseBatches
from psserver.core.commands.recorder import Recorder
from psserver.core.coordinator.data_requests import BatchesReply
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import Policy, policy
from psserver.core.job.settings import JobRules
from psserver.core.job.snapshot_schedule import SnapshotInterval
from tests.support.shard_reports import report_to

MODEL = ModelSpec((TensorSpec("w", (1,), "float32"),), OptimizerSettings("sgd", ({"lr": 0.1},)))
LOOP = LoopSpec(0, size=4, batch_size=1)


class Job:
    """A coordinator with training workers; pushes are reported by all shards."""

    def __init__(
        self,
        job_policy: Policy | None = None,
        workers: int = 2,
        shards: int = 1,
        every: SnapshotInterval | None = None,
        lease: float = 5.0,
        bad_gradients: str = "abort",
        model: ModelSpec = MODEL,
    ) -> None:
        self._model = model
        rules = JobRules(
            job_policy or policy("sync"),
            workers,
            lease,
            every or SnapshotInterval(),
            bad_gradients=bad_gradients,
        )
        self.lead(CoordinatorMachine(shards, rules))
        self.now = 0.0
        self._reported_index = 0
        self._staged: dict[int, list[Staged]] = {shard: [] for shard in range(shards)}
        for _ in range(workers):
            self.add()

    def lead(self, coordinator: CoordinatorMachine) -> None:
        self.coordinator, self.recorder = coordinator, Recorder(coordinator)

    def add(self) -> int:
        worker = self.coordinator.membership.join(self.now, None, "host", 1, "cpu").worker
        if self.coordinator.registration.register(worker, self._model, self.now) == "upload":
            self.push(worker, 0)
            self.coordinator.registration.register(worker, self._model, self.now)
        return worker

    def push(
        self,
        worker: int,
        seq: int,
        base: int = 0,
        batches: Sequence[int] = (),
        shards: Sequence[int] = (),
        problem: str = "",
        optimizer: str = "",
    ) -> None:
        keys = tuple(BatchKey(0, number) for number in batches)
        for shard in shards or range(self.coordinator.job.shards):
            self._staged[shard].append(
                Staged(PushKey(worker, seq), 8, base, keys, problem, optimizer=optimizer)
            )
            self.report(shard)

    def report(self, shard: int, index: int = 0, log_id: int = 0) -> None:
        report = ShardReport(shard, log_id, index, tuple(self._staged[shard]))
        report_to(self.recorder, report, self.now)

    def ask(
        self, worker: int, received: int = 0, idle: bool = False, loop: LoopSpec = LOOP
    ) -> BatchesReply | None:
        return self.recorder.do(LeaseBatches(worker, loop, received, 1, idle), self.now)

    def news(self) -> list[Entry]:
        """Return the log entries since the last call."""
        entries = self.coordinator.log.after(self._reported_index)
        self._reported_index = self.coordinator.log.index
        return entries

    def applied(self) -> list[list[int]]:
        """Return the workers of each new Apply."""
        return [
            [c.key.worker for c in entry.contributions]
            for entry in self.news()
            if isinstance(entry, Apply)
        ]
