"""A coordinator with its recorded commands, for comparison with a replay."""

import json
from typing import Any

from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import StreamSpec
from pscommon.core.log_entries import BatchKey, PushKey, ShardReport, Staged
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from psserver.core.commands.data_commands import LeaseBatches
from psserver.core.commands.recorder import Recorder, replay
from psserver.core.commands.worker_commands import Join, Register
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import Policy
from psserver.core.job.settings import JobRules
from tests.support.memory_journal import MemoryJournal
from tests.support.shard_reports import report_to

MODEL = ModelSpec((TensorSpec("w", (1,), "float32"),), OptimizerSettings("sgd", ({"lr": 0.1},)))


class Job:
    """A coordinator of two shards with recorded commands; workers take turns."""

    def __init__(
        self,
        job_policy: Policy,
        workers: int = 2,
        kind: type[CoordinatorMachine] = CoordinatorMachine,
        **rules: Any,
    ) -> None:
        self.rules, self.kind = (
            JobRules(job_policy, workers, **{"bad_gradients": "skip", **rules}),
            kind,
        )
        self.book, self.now = MemoryJournal(), 0.0
        self.recorder = Recorder(self.made(), self.book)
        self.seqs: dict[int, int] = {}
        self.received: dict[tuple[int, int], int] = {}
        self.workers = [self.join() for _ in range(workers)]

    def made(self) -> CoordinatorMachine:
        return self.kind(2, self.rules, 0, log_id=5)

    @property
    def coordinator(self) -> CoordinatorMachine:
        return self.recorder.coordinator

    def join(self) -> int:
        worker: int = self.recorder.do(
            Join(rank=None, host="h", pid=1, device="cpu"), self.now
        ).worker
        if self.recorder.do(Register(worker, MODEL), self.now) == "upload":
            self.report(Staged(PushKey(worker, 0), 1, 0))
            self.recorder.do(Register(worker, MODEL), self.now)
        self.seqs[worker] = 0
        return worker

    def report(self, *staged: Staged) -> None:
        for shard in range(2):
            report_to(
                self.recorder, ShardReport(shard, 5, self.coordinator.log.index, staged), self.now
            )

    def step(self, worker: int, spec: LoopSpec | StreamSpec) -> None:
        """Lease a batch and push it if there is one."""
        received = self.received.get((worker, spec.loop), 0)
        batches = self.recorder.do(
            LeaseBatches(worker=worker, spec=spec, received=received, count=1, idle=True), self.now
        )
        if batches is None or not batches.numbers:
            return
        self.received[worker, spec.loop] = received + 1
        key = BatchKey(spec.loop, batches.numbers[0])
        if isinstance(spec, StreamSpec):
            key = key._replace(count=3, end=spec.lap_index(key.number) == 2)
        self.push(worker, key)

    def push(self, worker: int, *batches: BatchKey) -> None:
        self.seqs[worker] += 1
        self.report(
            Staged(PushKey(worker, self.seqs[worker]), 1, self.coordinator.job.version, batches)
        )

    def replayed(self) -> CoordinatorMachine:
        """Return a coordinator built from the recorded commands."""
        coordinator = self.made()
        replay(coordinator, self.book.commands)
        return coordinator


def full_state(coordinator: CoordinatorMachine) -> str:
    """Return all decisions of a coordinator as JSON with NaN.

    The positions that shards report are not recorded.
    """
    return json.dumps(
        coordinator.complete_state() | {"log": [], "failure": str(coordinator.job.failure)}
    )
