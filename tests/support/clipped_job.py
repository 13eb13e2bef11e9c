"""A coordinator of a job with a clip norm, driven request by request."""

from pscommon.core.log_entries import (
    Apply,
    Contribution,
    Entry,
    Measured,
    PushKey,
    ShardReport,
    Staged,
)
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from psserver.core.commands.recorder import Recorder, replay
from psserver.core.commands.worker_commands import Join, Register
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import Policy, policy
from psserver.core.job.settings import JobRules
from tests.support.memory_journal import MemoryJournal
from tests.support.shard_reports import report_to

MODEL = ModelSpec(
    (TensorSpec("w", (2,), "float32"),), OptimizerSettings("sgd", ({"lr": 0.1},), clip_norm=1.0)
)


class ClippedJob:
    """Two shards, workers 1 to `workers`, and a clip norm of 1."""

    def __init__(
        self,
        job_policy: Policy | None = None,
        workers: int = 2,
        model: ModelSpec = MODEL,
        **rules: object,
    ) -> None:
        self.rules = JobRules(job_policy or policy("sync"), workers, **rules)  # type: ignore[arg-type]
        self.journal = MemoryJournal()
        self.recorder = Recorder(CoordinatorMachine(2, self.rules), self.journal)
        self.machine = self.recorder.coordinator
        self.staged: dict[int, dict[PushKey, Staged]] = {0: {}, 1: {}, 2: {}}
        for rank in range(workers):
            self.add(rank, model)
        self.seen_index = self.machine.log.index

    def add(self, rank: int, model: ModelSpec = MODEL) -> int:
        worker = self.recorder.do(Join(rank=rank, host="h", pid=1, device="cpu"), 0.0).worker
        if self.recorder.do(Register(worker, model), 0.0) == "upload":
            self.push(worker, 0)
            self.recorder.do(Register(worker, model), 0.0)
        return int(worker)

    def push(
        self,
        worker: int,
        seq: int,
        squares: tuple[float, float] = (4.0, 5.0),
        mended: str = "",
        optimizer: str = "",
    ) -> None:
        """Stage a push on all shards. squares: the sum of squares of each part."""
        for shard in range(self.machine.job.shards):
            key = PushKey(worker, seq)
            self.staged[shard][key] = Staged(
                key, 8, 0, square_norm=squares[shard], mended=mended, optimizer=optimizer
            )
            self.report(shard)

    def report(self, shard: int, measured: Measured | None = None) -> None:
        staged = tuple(self.staged[shard].values())
        # an unapplied index, so that the coordinator retains all entries
        report = ShardReport(shard, 0, self.machine.job.reshard_index, staged, measured=measured)
        report_to(self.recorder, report, 0.0)

    def measure(self, *squares: float, index: int | None = None) -> None:
        """Let the shards answer the newest Measure, or that at an index."""
        at = index if index is not None else self.machine.pending.measurement.index  # type: ignore[union-attr]
        for shard, square in enumerate(squares):
            self.report(shard, Measured(at, square))

    def news(self) -> list[Entry]:
        entries = self.machine.log.after(self.seen_index)
        self.seen_index = self.machine.log.index
        return entries

    def again(self) -> CoordinatorMachine:
        """Return the coordinator recovered from its log."""
        coordinator = CoordinatorMachine(2, self.rules)
        replay(coordinator, self.journal.commands)
        return coordinator


def scales(entry: Entry) -> list[float]:
    assert isinstance(entry, Apply)
    return [contribution.scale for contribution in entry.contributions]


def part(worker: int, seq: int = 1, scale: float = 1.0) -> Contribution:
    return Contribution(PushKey(worker, seq), 8, 0, scale)
