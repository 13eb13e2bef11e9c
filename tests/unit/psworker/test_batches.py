"""Batches of `job.batches`: order, randomness, commits and returned batches."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import Spec
from pscommon.core.errors import QuarantinedError
from pscommon.core.log_entries import BatchKey
from psworker.client.local_client import LocalClient
from psworker.core.results import Lease, PushResult
from psworker.data.batches import UPDATES
from psworker.job import Job
from psworker.optim.optimizer import ServerOptimizer
from psworker.session.drain import Stopping
from tests.support.events import records_of


class Ledger(LocalClient):
    """Client of a job with one worker that records loops, pushed batches and returned batches."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[BatchKey] = []
        self.pushed: list[tuple[tuple[BatchKey, ...], int]] = []
        self.pulls = 0
        self.loops: list[Spec] = []

    def next_batches(
        self, loop: Spec, count: int = 1, idle: bool = False, first_open: int | None = None
    ) -> Lease:
        if loop not in self.loops:
            self.loops.append(loop)
        return super().next_batches(loop, count, idle, first_open)

    def return_batches(self, batches: Sequence[BatchKey], used: bool = False) -> None:
        self.returned += () if used else batches
        super().return_batches(batches, used)

    def exchange(self, **call: Any) -> PushResult:
        if call["gradients"] is None:
            self.pulls += 1
        else:
            self.pushed.append((tuple(call["batches"]), call["samples"]))
        return super().exchange(**call)


def started(client: LocalClient | None = None) -> tuple[Job, ServerOptimizer]:
    job, model = Job(client or LocalClient()), nn.Linear(1, 1)
    return job, job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


NUMBERS = torch.arange(10.0)


class Squares(Dataset[Any]):
    """Dataset whose samples are dicts of tensors and Python numbers."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "x": torch.tensor(index),
            "square": index**2,
            "noise": torch.rand(()),
            "luck": random.random(),
        }


def test_each_epoch_has_every_sample_once_in_a_new_order() -> None:
    job, _ = started()

    seen = [batch.tolist() for batch in job.batches(NUMBERS, 4, epochs=2, seed=3)]

    assert [len(batch) for batch in seen] == [4, 4, 2] * 2
    epochs = [[x for batch in part for x in batch] for part in (seen[:3], seen[3:])]
    assert [sorted(epoch) for epoch in epochs] == [NUMBERS.tolist()] * 2
    assert epochs[0] != epochs[1]
    assert NUMBERS.tolist() not in epochs


def test_later_calls_continue_the_count_of_epochs() -> None:
    complete, parts = started()[0], started()[0]

    at_once = [batch.tolist() for batch in complete.batches(NUMBERS, 5, epochs=3)]
    one_by_one = [batch.tolist() for _ in range(3) for batch in parts.batches(NUMBERS, 5, epochs=1)]

    assert one_by_one == at_once


def test_drop_last_and_no_shuffle() -> None:
    job, _ = started()

    assert [b.tolist() for b in job.batches(NUMBERS, 4, shuffle=False, drop_last=True)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


@pytest.mark.parametrize(
    "dataset", [(NUMBERS, -NUMBERS), TensorDataset(NUMBERS, -NUMBERS)], ids=["tuple", "dataset"]
)
def test_a_tuple_of_tensors_yields_rows(dataset: Any) -> None:
    job, _ = started()

    for x, y in job.batches(dataset, 3):
        assert torch.equal(x, -y)


def test_collate_fn_receives_the_samples() -> None:
    job, _ = started()

    batches = list(
        job.batches(
            Squares(), 5, shuffle=False, collate_fn=lambda samples: [s["square"] for s in samples]
        )
    )

    assert batches == [[0, 1, 4, 9, 16], [25, 36, 49, 64, 81]]


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_processes_yield_the_same_batches_with_the_same_augmentation(workers: int) -> None:
    job, optimizer = started(client := Ledger())
    seen = []

    for batch in job.batches(Squares(), 2, epochs=2, num_workers=workers):
        seen.append({key: value.tolist() for key, value in batch.items()})
        optimizer.step()

    alone, _ = started()
    assert seen == [
        {k: v.tolist() for k, v in batch.items()} for batch in alone.batches(Squares(), 2, epochs=2)
    ]
    assert [keys for keys, _ in client.pushed] == [(BatchKey(0, number),) for number in range(10)]


def draw_random_numbers(job: Job, **options: Any) -> list[tuple[float, float, float]]:
    """Return the random numbers that a script, for example its dropout, draws at each batch."""
    return [
        (torch.rand(()).item(), float(np.random.random()), random.random())
        for _ in job.batches(NUMBERS, 5, epochs=2, **options)
    ]


def test_random_numbers_depend_on_the_batch_and_not_on_the_process() -> None:
    first = draw_random_numbers(started()[0])
    torch.rand(7), np.random.random(3), random.random()
    second = draw_random_numbers(started()[0])

    assert first == second == draw_random_numbers(started()[0], num_workers=2)
    assert len(set(first)) == 4
    assert draw_random_numbers(started()[0], seed=1) != first


def test_reseeding_can_be_switched_off() -> None:
    assert draw_random_numbers(started()[0], reseed=False) != draw_random_numbers(
        started()[0], reseed=False
    )


def test_a_step_commits_the_batches_since_the_previous_step() -> None:
    job, optimizer = started(client := Ledger())

    for number, _ in enumerate(job.batches(NUMBERS, 3)):
        if number % 2 == 1:
            optimizer.step()

    assert client.pushed == [
        ((BatchKey(0, 0), BatchKey(0, 1)), 6),
        ((BatchKey(0, 2), BatchKey(0, 3)), 4),
    ]


def test_batches_without_a_step_are_committed_by_the_first_step_of_the_next_loop() -> None:
    job, optimizer = started(client := Ledger())
    for _ in job.batches(NUMBERS, 5):
        optimizer.param_groups[0]["params"][0].sum().backward()
    for _ in job.batches(NUMBERS, 5):
        optimizer.param_groups[0]["params"][0].sum().backward()
        optimizer.step()
        break

    assert client.pushed == [((BatchKey(0, 0), BatchKey(0, 1), BatchKey(1, 0)), 15)]


def test_batches_of_an_evaluation_have_no_weight() -> None:
    job, optimizer = started(client := Ledger())
    with torch.no_grad():
        for _ in job.batches(NUMBERS, 5):
            pass
    for _ in job.batches(NUMBERS, 2):
        optimizer.step()
        break

    assert client.pushed[0][1] == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_leaving_a_loop_early_returns_unused_batches(workers: int) -> None:
    job, optimizer = started(client := Ledger())

    for _ in job.batches(NUMBERS, 1, num_workers=workers):
        optimizer.step()
        break

    dealt = [BatchKey(0, number) for number in range(1, 1 + 2 * workers)]
    assert client.returned == dealt
    assert client.data.next_batches(LoopSpec(0, 10, 1), count=10).numbers == tuple(range(1, 10))


def test_an_exception_in_the_loop_returns_only_unused_batches() -> None:
    job, _ = started(client := Ledger())

    def script() -> None:
        for _ in job.batches(NUMBERS, 1, num_workers=1):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        script()
    assert client.returned == [BatchKey(0, 1), BatchKey(0, 2)]


class SparseClient(Ledger):
    """Client whose every third request without waiting gets no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[bool] = []

    def next_batches(
        self, loop: LoopSpec, count: int = 1, idle: bool = False, first_open: int | None = None
    ) -> Lease:
        self.asked.append(idle)
        if not idle and len(self.asked) % 3 == 0:
            return Lease()
        lease = super().next_batches(loop, count, idle, first_open)
        return Lease(lease.numbers, lease.end, sat_out=idle)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_worker_without_new_batches_uses_its_own_then_sits_out_and_pulls(workers: int) -> None:
    job, optimizer = started(client := SparseClient())
    seen = []

    for batch in job.batches(NUMBERS, 1, num_workers=workers):
        seen.append(batch.item())
        optimizer.step()

    assert sorted(seen) == NUMBERS.tolist()
    assert any(client.asked)
    assert client.pulls >= sum(client.asked)


class LateEndClient(Ledger):
    """Client that reports the end of a loop only to a waiting request, after all pushes."""

    def next_batches(
        self, loop: LoopSpec, count: int = 1, idle: bool = False, first_open: int | None = None
    ) -> Lease:
        lease = super().next_batches(loop, count, idle, first_open)
        if lease.numbers:
            return lease
        if idle:
            assert len(self.pushed) == loop.total
        return Lease((), end=idle, sat_out=idle)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_worker_does_not_wait_while_it_holds_a_batch(workers: int) -> None:
    job, optimizer = started(client := LateEndClient())

    for _ in job.batches(NUMBERS, 2, num_workers=workers):
        optimizer.step()

    assert len(client.pushed) == 5
    assert client.pulls == 1


def test_a_pass_marks_its_beginning_its_end_and_waits() -> None:
    job, optimizer = started()
    loader = job.batches(NUMBERS, 5, shuffle=False)
    loader.marks_updates = True
    seen = []

    for item in loader:
        seen.append("updates" if item is UPDATES else item.tolist()[0])
        if item is not UPDATES:
            optimizer.step()

    assert seen == ["updates", 0.0, 5.0, "updates"]


def test_stopping_the_job_ends_the_pass_and_returns_batches() -> None:
    job, optimizer = started(client := Ledger())
    seen = 0

    def script() -> None:
        nonlocal seen
        for _ in job.batches(NUMBERS, 1, num_workers=1):
            optimizer.step()
            seen += 1
            client.stopping = seen == 2

    with pytest.raises(Stopping, match="the job ends"):
        script()

    assert seen == 2
    assert client.returned
    assert len(client.pushed) == 2


def test_an_empty_data_set_yields_no_batches() -> None:
    job, _ = started()

    assert list(job.batches(NUMBERS[:0], 4)) == []
    assert list(job.batches(NUMBERS[:3], 4, drop_last=True)) == []


class QuarantinedClient(Ledger):
    """Client whose worker is quarantined at its first step."""

    def exchange(self, **call: Any) -> PushResult:
        raise QuarantinedError("3 bad gradients in a row")

    def return_batches(self, batches: Sequence[BatchKey], used: bool = False) -> None:
        raise QuarantinedError("3 bad gradients in a row")


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_the_error_that_ends_a_loop_has_no_second_error_as_context() -> None:
    job, optimizer = started(QuarantinedClient())

    def script() -> None:
        for _ in job.batches(NUMBERS, 2, num_workers=1):
            optimizer.step()

    with pytest.raises(QuarantinedError) as caught:
        script()
    assert caught.value.__context__ is None


def test_a_loop_without_a_step_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    job, optimizer = started()

    list(job.batches(NUMBERS, 4))

    (record,) = records_of(caplog, "batches_unused")
    assert record.__dict__["samples"] == 10
    caplog.clear()
    with torch.no_grad():
        list(job.batches(NUMBERS, 4))
    for _ in job.batches(NUMBERS, 4):
        optimizer.step()
    assert not caplog.text
