"""How many batches a worker asks for at once."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pscommon.core.data_stream import Spec
from psworker.core.clock import Clock
from psworker.core.results import Lease
from psworker.data.leased_batches import MAX_LEASED_COUNT, ScriptPace
from psworker.job import Job
from tests.support.loader_ledger import Count, Ledger

BATCH_COUNT = 100


class TimedLedger(Ledger):
    """Records how many batches a worker asks for; time passes only in the script.

    seconds: the time.
    """

    def __init__(self, policy: str) -> None:
        super().__init__()
        self.policy = policy
        self.seconds = 0.0
        self.clock = Clock(lambda: self.seconds, lambda _: None)
        self.counts: list[int] = []

    def next_batches(
        self, loop: Spec, count: int = 1, idle: bool = False, first_open: int | None = None
    ) -> Lease:
        if not idle:
            self.counts.append(count)
        return super().next_batches(loop, count, idle, first_open)


def counts_of(policy: str, step_seconds: float, data: Any = None) -> list[int]:
    """Return the counts of the requests of a script that trains on all batches."""
    ledger = TimedLedger(policy)
    job = Job(ledger, torch.device("cpu"))
    model = nn.Linear(1, 1)
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    seen = []
    dataset = TensorDataset(torch.arange(float(BATCH_COUNT))[:, None]) if data is None else data
    for batch in job.batches(dataset, batch_size=1, shuffle=False if data is None else None):
        (x,) = batch if data is None else (batch[:, None].float(),)
        ledger.seconds += step_seconds
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += x.flatten().tolist()
    assert seen == [float(n) for n in range(len(seen))]
    assert len(ledger.pushed) == len(seen)
    return ledger.counts


@pytest.mark.parametrize("policy", ["async", "ssp"])
def test_short_steps_lease_several_batches_and_leave_the_last_ones_to_others(policy: str) -> None:
    counts = counts_of(policy, 0.001)

    assert counts[0] == 1
    assert max(counts) == MAX_LEASED_COUNT
    taken = 0
    for count in counts:
        assert count == 1 or count <= (BATCH_COUNT - taken) // 2
        taken += count
    assert counts[-2:] == [1, 1]
    assert len(counts) < BATCH_COUNT / 4


@pytest.mark.parametrize(("seconds", "count"), [(0.01, 5), (0.02, 2), (0.04, 1), (1.0, 1)])
def test_a_request_leases_at_most_50_ms_of_work(seconds: float, count: int) -> None:
    assert max(counts_of("async", seconds)) == count


def test_a_worker_asks_for_one_batch_under_sync_and_of_a_stream() -> None:
    assert set(counts_of("sync", 0.001)) == {1}
    assert set(counts_of("async", 0.001, data=Count())) == {1}


def test_waiting_is_no_work() -> None:
    times = iter([0.0, 0.01, 100.0, 100.01])
    pace = ScriptPace(lambda: next(times))
    assert pace.count_in(0.05, 16) == 1
    pace.take()
    pace.take()
    pace.pause()
    pace.take()
    pace.take()
    assert pace.count_in(0.055, 16) == 5


def test_a_clock_that_does_not_move_gives_the_limit() -> None:
    pace = ScriptPace(lambda: 3.0)
    pace.take()
    pace.take()
    assert pace.count_in(0.05, 16) == 16
