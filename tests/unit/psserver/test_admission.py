"""How many workers the limit of bytes in flight admits."""

import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from psserver.core.coordinator.admission import check_registration, push_nbytes
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import policy
from tests.support.coordinator_job import Job

MODEL = ModelSpec(
    (
        TensorSpec("w", (160,), "float32"),
        TensorSpec("m", (16,), "float32", "buffer"),
        TensorSpec("f", (999,), "float32", "frozen"),
    ),
    OptimizerSettings("sgd", ({"lr": 0.1},)),
)


@pytest.mark.parametrize(("shards", "limit"), [(1, 704), (2, 320 + 64), (3, 256 + 64)])
def test_the_size_of_a_push_is_that_of_its_largest_part(shards: int, limit: int) -> None:
    assert push_nbytes(MODEL, shards) == limit


def fits(coordinator: CoordinatorMachine, worker: int, in_flight: int) -> bool:
    try:
        check_registration(coordinator, worker, 10, in_flight)
    except InvalidRequestError:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "bound", "needed"),
    [("sync", None, 40), ("ssp", 0, 40), ("ssp", 3, 40), ("async", None, 10)],
)
def test_a_round_needs_memory_for_every_worker(name: str, bound: int | None, needed: int) -> None:
    coordinator = Job(policy(name, bound), workers=3).coordinator
    newcomer = coordinator.membership.join(0.0, None, "host", 1, "cpu").worker

    assert [fits(coordinator, newcomer, admission) for admission in (needed - 1, needed)] == [
        False,
        True,
    ]


def test_a_repeated_registration_counts_once_and_a_departed_worker_not() -> None:
    job = Job(workers=3)
    assert fits(job.coordinator, 1, 30)
    assert not fits(job.coordinator, 1, 29)
    job.coordinator.registration.leave(2, "", 0.0)

    assert fits(job.coordinator, 1, 20)
    assert fits(job.coordinator, 99, 30)


def test_a_worker_that_waits_for_data_counts() -> None:
    """It returns to the rounds without a request."""
    job = Job(workers=2)
    for number in range(4):
        job.ask(1, received=number)
    job.ask(2, idle=True)

    assert not fits(job.coordinator, 99, 29)


def test_the_error_names_a_remedy() -> None:
    with pytest.raises(InvalidRequestError, match=r"--in-flight 29 .*--in-flight 30") as caught:
        check_registration(Job(workers=2).coordinator, 99, 10, 29)

    assert caught.value.exit_code == 2
