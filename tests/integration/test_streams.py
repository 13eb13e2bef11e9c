"""Streams over real servers: each sample of each source counts once when workers die or
join late.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from psworker import Client, Job
from psworker.data.batches import UPDATES
from psworker.transport.grpc_transport import GrpcTransport
from tests.support.breakable_lane import BreakableLane
from tests.support.cluster import Cluster
from tests.support.events import records_of
from tests.support.policies import POLICIES
from tests.support.training_threads import real, simulated
from tests.support.workers import OUTLIVED, status, together, until

Make = Callable[..., Cluster]

SIZES = (9, 0, 4, 12)
ALL = sorted(100 * source + place for source, size in enumerate(SIZES) for place in range(size))


class Sources:
    """Source s has the numbers 100 s, 100 s + 1 and so on."""

    def read(self, source: int, offset: int) -> Iterator[int]:
        return iter(range(100 * source + offset, 100 * source + SIZES[source]))


class Lines(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def train(
    job: Job, data: Any = None, sources: int = len(SIZES), each: Callable[[int], object] = bool
) -> list[int]:
    """Train over the stream, with `each` called before every step; return the counted samples."""
    model = nn.Linear(1, 1)
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
    used: list[int] = []
    for step, batch in enumerate(job.batches(data or Sources(), 4, sources=sources)):
        model(batch[:, None].float() / 400).mean().backward()
        each(step)
        optimizer.step()
        optimizer.zero_grad()
        used += batch.tolist()
    return used


@pytest.mark.every(4)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_each_sample_counts_once(cluster: Make, name: str, workers: int) -> None:
    address = cluster(2, min_workers=workers, **POLICIES[name]).address

    shares = real(address, workers, train)

    assert sorted(sample for share in shares for sample in share) == ALL
    (row,) = status(address)["data"]
    assert (row["leased"], row["dropped"], row["duplicates"], row["ended"]) == (0, 0, 0, True)
    assert status(address)["samples"] == len(ALL)


def test_under_sync_the_shares_are_the_same_in_every_run(cluster: Make) -> None:
    runs = [
        simulated(2, train),
        *(real(cluster(1, min_workers=2).address, 2, train) for _ in range(2)),
    ]

    assert runs[0] == runs[1] == runs[2]


def test_an_iterable_dataset_is_one_source(cluster: Make) -> None:
    address = cluster(1, min_workers=2).address

    shares = real(address, 2, lambda job: train(job, Lines(), 1))

    assert sorted(shares) == [[], list(range(10))]


@pytest.mark.parametrize("name", POLICIES)
def test_unpushed_samples_of_a_dead_worker_are_read_by_others(cluster: Make, name: str) -> None:
    """It dies with a batch and without a leave request."""
    servers = cluster(2, min_workers=2, lease=OUTLIVED, **POLICIES[name])
    lane, steps = BreakableLane(GrpcTransport(servers.addresses.split(","))), threading.Semaphore(0)
    lost: list[int] = []

    def dies(job: Job) -> None:
        model = nn.Linear(1, 1)
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
        for batch in job.batches(Sources(), 4, sources=len(SIZES)):
            steps.release()
            if len(lost) == 4:
                lane.die()
                return
            model(batch[:, None].float() / 400).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            lost.extend(batch.tolist())

    def first() -> list[int]:
        with Job(Client(lane=lane, rank=1), 1) as job:
            dies(job)
        return lost

    def keep_pace(step: int) -> None:
        if step < 2:
            assert steps.acquire(timeout=30)

    def second() -> list[int]:
        return real(servers.address, 1, lambda job: train(job, each=keep_pace))[0]

    shares = together(first, second)

    assert len(lost) == 4
    assert sorted(sample for share in shares for sample in share) == ALL
    assert status(servers.address)["data"][0]["duplicates"] == 0


def test_a_stream_resumes_at_its_position_in_the_snapshot(cluster: Make, tmp_path: Path) -> None:
    """The servers are stopped after 3 of the stream's batches and restarted."""
    before = cluster(1, data_dir=tmp_path)

    def first(job: Job) -> list[int]:
        model = nn.Linear(1, 1)
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
        used: list[int] = []
        for batch, _ in zip(job.batches(Sources(), 4, sources=len(SIZES)), range(3), strict=False):
            optimizer.step()
            used += batch.tolist()
        return used

    (early,) = real(before.address, 1, first)
    before.stop()
    (late,) = real(cluster(1, data_dir=tmp_path).address, 1, train)

    assert sorted(early + late) == ALL


def test_a_worker_without_a_source_warns_once_what_helps(
    cluster: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker that reads the only source makes its second step when the other one has warned."""
    servers = cluster(1, min_workers=2)

    def warnings() -> list[logging.LogRecord]:
        return records_of(caplog, "stream_sources_too_few")

    def two_passes(job: Job) -> list[int]:
        model = nn.Linear(1, 1)
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
        used: list[int] = []
        for _ in range(2):
            for batch in job.batches(Lines(), 4):
                until(warnings, "a warning")
                model(batch[:, None].float()).mean().backward()
                optimizer.step()
                used += batch.tolist()
        return used

    shares = real(servers.address, 2, two_passes)

    assert sorted(shares[0] + shares[1]) == sorted([*range(10)] * 2)
    (record,) = warnings()
    fields = vars(record)
    assert (fields["sources"], fields["epochs"], fields["workers"]) == (1, 1, 2)
    assert "sources=2" in fields["remedy"]


def test_a_stream_with_a_source_for_each_worker_warns_of_nothing(
    cluster: Make, caplog: pytest.LogCaptureFixture
) -> None:
    real(cluster(1, min_workers=2).address, 2, lambda job: train(job, sources=2))

    assert not records_of(caplog, "stream_sources_too_few")


def test_a_worker_in_a_barrier_lets_another_one_read_its_source(cluster: Make) -> None:
    """Otherwise the other one would wait for data, and never come to the barrier."""

    def script(job: Job) -> tuple[list[int], int]:
        model = nn.Linear(1, 1)
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
        loader = job.batches(Lines(), 2)
        loader.marks_updates = True
        used: list[int] = []
        has_met = False
        for item in loader:
            if item is not UPDATES:
                model(item[:, None].float()).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                used += item.tolist()
            if job.version >= 2 and not has_met:
                loader.release()
                job.barrier()
                has_met = True
        return used, job.version

    first, second = real(cluster(min_workers=2).address, 2, script)

    assert sorted(first[0] + second[0]) == list(range(10))
    assert first[1] == second[1] == 5
