"""The length of a loader is the worker's share of a loop if the workers stay the same."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import StreamSpec
from pscommon.core.errors import InvalidRequestError
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules
from tests.support.coordinator_job import MODEL, Job


def job_of(workers: int, global_batch: int | None = None, name: str = "sync") -> Job:
    job = Job(policy(name, 3 if name == "ssp" else None), workers)
    job.coordinator.job.rules = replace(job.coordinator.job.rules, global_batch=global_batch)
    return job


def dealt(job: Job, workers: int, loop: LoopSpec) -> list[int]:
    """Return how many batches each worker gets when it pushes each complete update at once."""
    counts, seqs, news = [0] * workers, [0] * workers, True
    while news:
        news = False
        for worker in range(1, workers + 1):
            hands = []
            while answer := job.ask(worker, counts[worker - 1], loop=loop):
                if not answer.numbers:
                    break
                news = True
                counts[worker - 1] += 1
                hands += answer.numbers
                if not answer.following or answer.following[-1] == 0:
                    break
            if hands:
                seqs[worker - 1] += 1
                job.push(worker, seqs[worker - 1], job.coordinator.job.version, hands)
            else:
                job.ask(worker, counts[worker - 1], idle=True, loop=loop)
    return counts


@given(
    workers=st.integers(1, 4),
    size=st.integers(0, 40),
    batch_size=st.integers(1, 3),
    epochs=st.integers(0, 3),
    units=st.sampled_from([None, 1, 2, 5]),
)
def test_under_sync_the_share_equals_the_dealt_batches(
    workers: int, size: int, batch_size: int, epochs: int, units: int | None
) -> None:
    loop = LoopSpec(0, size, batch_size, epochs)
    job = job_of(workers, units and units * batch_size)

    expected = [job.coordinator.data.share(worker, loop) for worker in range(1, workers + 1)]

    assert sum(expected) == loop.total
    assert dealt(job, workers, loop) == expected


@pytest.mark.parametrize("name", ["async", "ssp"])
def test_under_other_policies_the_shares_are_even(name: str) -> None:
    job = job_of(3, name=name)

    assert [job.coordinator.data.share(worker, LoopSpec(0, 10, 1)) for worker in (1, 2, 3)] == [
        4,
        3,
        3,
    ]


def test_the_share_follows_the_workers_that_are_registered() -> None:
    job, loop = job_of(2), LoopSpec(0, 9, 1)
    assert job.coordinator.data.share(2, loop) == 4

    third = job.add()
    assert job.coordinator.data.share(third, loop) == 3

    job.coordinator.registration.leave(1, "", 0.0)
    assert [job.coordinator.data.share(worker, loop) for worker in (2, third)] == [5, 4]


def test_before_the_first_round_awaited_workers_count() -> None:
    """By the rank that a launcher gave, else in the order of joining; also before they register."""
    coordinator, loop = CoordinatorMachine(1, JobRules(policy("sync"), 3)), LoopSpec(0, 10, 1)
    last = coordinator.membership.join(0.0, 2, "host", 1, "cpu").worker
    first = coordinator.membership.join(0.0, 0, "host", 1, "cpu").worker

    assert [coordinator.data.share(worker, loop) for worker in (first, last)] == [4, 3]

    unranked = CoordinatorMachine(1, JobRules(policy("sync"), 3))
    ids = [unranked.membership.join(0.0, None, "host", 1, "cpu").worker for _ in range(2)]
    assert [unranked.data.share(worker, loop) for worker in ids] == [4, 3]


def test_a_worker_that_is_about_to_register_counts_itself() -> None:
    job, loop = job_of(2), LoopSpec(0, 10, 1)
    job.ask(1, loop=loop)
    newcomer = job.coordinator.membership.join(0.0, None, "host", 1, "cpu").worker

    assert job.coordinator.data.share(newcomer, loop) == 3
    assert job.coordinator.data.share(1, loop) == 5


def test_a_replacement_has_the_share_of_its_predecessor() -> None:
    coordinator, loop = CoordinatorMachine(1, JobRules(policy("sync"), 1)), LoopSpec(0, 10, 1)
    job = job_of(1)
    job.lead(coordinator)
    coordinator.membership.join(0.0, 0, "host", 1, "cpu", 0)
    coordinator.registration.register(1, MODEL, 0.0)
    job.push(1, 0)
    coordinator.registration.register(1, MODEL, 0.0)
    job.ask(1, loop=loop)

    again = coordinator.membership.join(0.0, 0, "host", 1, "cpu", 1).worker

    assert coordinator.data.share(again, loop) == 10


def test_an_observer_and_a_departed_worker_have_an_even_share() -> None:
    job = job_of(2)

    assert job.coordinator.data.share(0, LoopSpec(0, 10, 1)) == 5
    assert job.coordinator.data.share(99, LoopSpec(0, 10, 1)) == 5


def test_a_stream_has_no_share() -> None:
    assert job_of(2).coordinator.data.share(1, StreamSpec(0, 1, 4)) == 0


def test_a_global_batch_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"--global-batch 8 .*batch_size 3"):
        job_of(2, 8).coordinator.data.share(1, LoopSpec(0, 10, 3))
