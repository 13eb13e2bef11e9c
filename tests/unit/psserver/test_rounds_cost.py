"""The cost of a decided push, in instructions of Python, does not grow with the workers."""

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import pytest

from pscommon.core.data_loop import LoopSpec
from pscommon.core.log_entries import PushKey, ShardReport, Staged
from psserver.core.commands.data_commands import LeaseBatches
from psserver.core.commands.recorder import Recorder
from psserver.core.commands.worker_commands import Join, Register
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import Policy, policy
from psserver.core.job.settings import JobRules
from psserver.core.shard.state_machine import ShardMachine
from psserver.core.workers.smallest import Smallest
from tests.support.coordinator_job import MODEL
from tests.support.searching_machine import SearchingMachine
from tests.support.shard_reports import report_to

FEW, MANY = 8, 128


class PushingJob:
    """A coordinator whose workers push in turn; each shard reports each push by itself."""

    def __init__(
        self, job_policy: Policy, workers: int, shards: int, machine: type[CoordinatorMachine]
    ) -> None:
        self.recorder = Recorder(machine(shards, JobRules(job_policy, workers)))
        self.shards = range(shards)
        self.workers = [
            self.recorder.do(Join(rank=rank, host="h", pid=1, device="cpu"), 0.0).worker
            for rank in range(workers)
        ]
        self.seqs = dict.fromkeys(self.workers, 0)
        for worker in [self.workers[0], *self.workers]:
            if self.recorder.do(Register(worker, MODEL), 0.0) == "upload":
                self.report(self.reports([worker], initial=True))

    @property
    def version(self) -> int:
        return self.recorder.coordinator.job.version

    def reports(self, workers: Iterable[int], initial: bool = False) -> list[ShardReport]:
        """Return the reports of the next push of each worker."""
        index, found = self.recorder.coordinator.log.index, []
        for worker in workers:
            self.seqs[worker] += not initial
            staged = Staged(PushKey(worker, self.seqs[worker]), 8, 0)
            found += [ShardReport(shard, 0, index, (staged,)) for shard in self.shards]
        return found

    def report(self, reports: Iterable[ShardReport]) -> None:
        for report in reports:
            report_to(self.recorder, report, 1.0)


def instructions_of(action: Callable[[], Any]) -> int:
    """Return the number of bytecode instructions that an action runs."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def cost_of_push(
    job_policy: Policy,
    workers: int,
    shards: int,
    blocked: bool,
    machine: type[CoordinatorMachine] = CoordinatorMachine,
) -> float:
    """Return the instructions for each decided push.

    blocked: all but one worker are too far ahead.
    """
    job = PushingJob(job_policy, workers, shards, machine)
    slow, *fast = job.workers
    for _ in range(job_policy.bound + 1 if blocked and job_policy.bound is not None else 0):
        job.report(job.reports(fast))
    before, reports = job.version, job.reports([slow] if blocked else job.workers)
    instructions = instructions_of(lambda: job.report(reports))
    counts = job.recorder.coordinator.job.counts
    return instructions / (job.version - before if not job_policy.barrier else counts["applied"])


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize(
    ("job_policy", "blocked"),
    [
        (policy("sync"), False),
        (policy("async"), False),
        (policy("ssp", 2), False),
        (policy("ssp", 2), True),
    ],
    ids=["sync", "async", "ssp", "ssp blocked"],
)
def test_a_decided_push_costs_the_same_for_any_number_of_workers(
    job_policy: Policy, blocked: bool, shards: int
) -> None:
    few, many = (cost_of_push(job_policy, workers, shards, blocked) for workers in (FEW, MANY))

    assert many < 1.2 * few


def test_a_search_costs_more_with_each_worker() -> None:
    """So the test above can fail."""
    few, many = (
        cost_of_push(policy("async"), workers, 1, False, SearchingMachine)
        for workers in (FEW, MANY)
    )

    assert many > 1.5 * few


def cost_of_request(job_policy: Policy, workers: int, batches: int, tries: int = 1) -> float:
    """Return the instructions for each request for a batch.

    batches: of the loop; a worker that gets none waits. tries: how often each worker asks.
    """
    job = PushingJob(job_policy, workers, 1, CoordinatorMachine)
    requests = [
        LeaseBatches(worker, LoopSpec(0, size=batches, batch_size=1), 0, 1, idle=True)
        for worker in job.workers
    ]

    def ask() -> None:
        for request in requests:
            job.recorder.do(request, 1.0)

    for _ in range(tries - 1):
        ask()
    return instructions_of(ask) / workers


@pytest.mark.parametrize("job_policy", [policy("sync"), policy("async")], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("batches", "tries"),
    [(3 * MANY, 1), (3 * MANY, 2), (1, 1), (1, 2)],
    ids=["first", "repeated", "waiting", "repeated while waiting"],
)
def test_a_request_for_a_batch_costs_the_same_for_any_number_of_workers(
    job_policy: Policy, batches: int, tries: int
) -> None:
    few, many = (cost_of_request(job_policy, workers, batches, tries) for workers in (FEW, MANY))

    assert many < 1.2 * few


def test_a_shard_reports_a_push_once_until_it_reports_everything() -> None:
    shard = ShardMachine(0)
    first, second = (Staged(PushKey(worker, 1), 8, 0) for worker in (1, 2))
    shard.offer(first)
    assert shard.report(only_new=True).staged == (first,)

    shard.offer(second)
    assert shard.report(only_new=True).staged == (second,)
    assert shard.report(only_new=True).staged == ()
    assert shard.report().staged == (first, second)


def test_the_smallest_number_follows_each_change() -> None:
    numbers = Smallest()
    assert (numbers.value, numbers.count) == (None, 0)
    for number in (5, 3, 3, 9):
        numbers.add(number)
    numbers.remove(3)
    assert (numbers.value, numbers.count) == (3, 3)
    numbers.remove(3)
    assert numbers.value == 5
    numbers.add(4)
    assert numbers.value == 4
