"""Contender: the coordinator alone, without servers or a network. Args: POLICY WORKERS SHARDS
PUSHES.

POLICY: sync, async, ssp, or blocked: ssp with all workers but one too far ahead.
"""

import gc
import sys
import time
from collections.abc import Iterable
from types import SimpleNamespace

from benchmarks.speaker import Measurements, serve
from pscommon.core.log_entries import PushKey, ShardReport, Staged
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from psserver.core.commands.recorder import Recorder
from psserver.core.commands.worker_commands import Join, Register
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules
from psserver.core.servers.shard_directory import SavedSnapshot, ShardDirectory
from psserver.core.servers.shard_protocol import process_report

MODEL = ModelSpec((TensorSpec("w", (1,), "float32"),), OptimizerSettings("sgd"))
BOUND_STEP_COUNT = 2
POLICIES = {
    "sync": policy("sync"),
    "async": policy("async"),
    "ssp": policy("ssp", BOUND_STEP_COUNT),
    "blocked": policy("ssp", BOUND_STEP_COUNT),
}


class Decisions:
    """A coordinator whose workers push in turn. Each shard reports each push by itself."""

    def __init__(self, name: str, workers: int, shards: int) -> None:
        self._is_blocked = name == "blocked"
        self._shards = range(shards)
        self._recorder = Recorder(CoordinatorMachine(shards, JobRules(POLICIES[name], workers)))
        counts = SimpleNamespace(shards=shards, changes=0, past=())
        self._directory = ShardDirectory[SavedSnapshot](counts, "shard 0")
        for server in self._directory:
            server.ready = True
        self._workers = [
            self._recorder.do(Join(rank=rank, host="", pid=1, device="cpu"), 0.0).worker
            for rank in range(workers)
        ]
        self._seqs = dict.fromkeys(self._workers, -1)
        for worker in [self._workers[0], *self._workers]:
            if self._recorder.do(Register(worker, MODEL), 0.0) == "upload":
                self._process(self._reports([worker]))
        self._seqs = dict.fromkeys(self._workers, 0)
        for _ in range(BOUND_STEP_COUNT + 1 if self._is_blocked else 0):
            self._process(self._reports(self._workers[1:]))

    def round(self) -> tuple[float, int]:
        """Return the CPU seconds and the number of decided pushes of one push of each worker."""
        counts = self._recorder.coordinator.job.counts
        before, seconds = counts["applied"], 0.0
        parts = [self._workers[:1], self._workers[1:]] if self._is_blocked else [self._workers]
        for workers in parts:
            seconds += self._process(self._reports(workers))
            index = self._recorder.coordinator.log.index
            self._process(ShardReport(shard, 0, index, ()) for shard in self._shards)
        return seconds, counts["applied"] - before

    def _reports(self, workers: Iterable[int]) -> list[ShardReport]:
        index, found = self._recorder.coordinator.log.index, []
        for worker in workers:
            self._seqs[worker] += 1
            staged = Staged(PushKey(worker, self._seqs[worker]), 1, 0)
            found += [ShardReport(shard, 0, index, (staged,)) for shard in self._shards]
        return found

    def _process(self, reports: Iterable[ShardReport]) -> float:
        directory, began = self._directory, time.process_time()
        for report in reports:
            server = directory[report.shard]
            process_report(self._recorder, directory, server, None, report, 0.0, has_logs=False)
        return time.process_time() - began


def main(name: str, workers: int, shards: int, pushes: int) -> None:
    gc.disable()  # it would go through the prepared reports, which a server does not hold
    decisions = Decisions(name, workers, shards)
    decisions.round()

    def turn() -> Measurements:
        rounds = [decisions.round() for _ in range(max(1, pushes // workers))]
        seconds, decided = (sum(values) for values in zip(*rounds, strict=True))
        return {"decision": seconds / decided}

    serve({"go": turn})


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
