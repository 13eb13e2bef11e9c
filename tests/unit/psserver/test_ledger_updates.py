"""The ledger in the coordinator: the data of each update do not depend on the speed of workers."""

import random

import pytest

from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import StreamSpec
from pscommon.core.errors import InvalidRequestError
from pscommon.core.log_entries import BatchKey
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules
from tests.support.ledger_workers import LoopWorkers


def rules(workers: int, global_batch: int | None = None, name: str = "sync") -> JobRules:
    return JobRules(policy(name), min_workers=workers, global_batch=global_batch)


def numbers(update: list[list[BatchKey]]) -> list[int]:
    return [key.number for batches in update for key in batches]


@pytest.mark.parametrize("workers", range(1, 6))
def test_updates_of_a_global_batch_are_the_same_for_any_number_of_workers(
    workers: int,
) -> None:
    """60 schedules of workers that prefetch: 2 epochs of 11 batches of 2 samples, 8 samples an
    update.
    """
    spec = LoopSpec(0, size=22, batch_size=2, epochs=2)
    epochs = (
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]],
        [[11, 12, 13, 14], [15, 16, 17, 18], [19, 20, 21]],
    )
    for seed in range(60):
        worker_numbers = LoopWorkers(rules(workers, global_batch=8), spec, workers, seed).run()

        assert [numbers(update) for update in worker_numbers.updates] == [*epochs[0], *epochs[1]], (
            seed
        )


def test_a_worker_lost_during_an_update_costs_no_sample() -> None:
    """200 schedules: its batches come in later updates, before new ones, and each counts once."""
    for seed in range(200):
        rng = random.Random(seed)
        units, workers = rng.randint(1, 5), rng.randint(2, 4)
        spec = LoopSpec(0, size=rng.randint(1, 20), batch_size=1, epochs=2)
        worker_numbers = LoopWorkers(rules(workers, global_batch=units), spec, workers, seed)
        for _ in range(rng.randint(0, 60)):
            worker_numbers.step(
                worker_numbers.rng.choice(
                    [worker for worker in worker_numbers.workers if not worker.at_end]
                    or worker_numbers.workers
                )
            )
        worker_numbers.lose(rng.choice(worker_numbers.workers))
        worker_numbers.run()

        assert sorted(n for update in worker_numbers.updates for n in numbers(update)) == list(
            range(spec.total)
        ), seed
        assert all(len(numbers(update)) <= units for update in worker_numbers.updates)


def test_a_batch_size_that_does_not_divide_the_global_batch_is_refused() -> None:
    worker_numbers = LoopWorkers(
        rules(1, global_batch=10), LoopSpec(0, size=9, batch_size=4), 1, seed=0
    )

    with pytest.raises(InvalidRequestError, match=r"--global-batch 10 .*batch_size 4"):
        worker_numbers.run()


def test_a_stream_has_no_global_batch() -> None:
    worker_numbers = LoopWorkers(
        rules(1, global_batch=10), StreamSpec(0, sources=1, batch_size=5), 1, seed=0
    )

    with pytest.raises(InvalidRequestError, match=r"--global-batch 10 .* stream"):
        worker_numbers.run()


@pytest.mark.parametrize("name", ["sync", "async"])
def test_each_sample_of_a_stream_counts_once_under_every_policy(name: str) -> None:
    """150 schedules, with one worker lost."""
    for seed in range(150):
        rng = random.Random(seed)
        lengths = tuple(rng.randint(0, 9) for _ in range(rng.randint(1, 4)))
        spec = StreamSpec(0, len(lengths), batch_size=rng.randint(1, 4), epochs=2)
        worker_numbers = LoopWorkers(rules(3, name=name), spec, 3, seed, lengths)
        for _ in range(rng.randint(0, 40)):
            worker_numbers.step(
                worker_numbers.rng.choice(
                    [worker for worker in worker_numbers.workers if not worker.at_end]
                    or worker_numbers.workers
                )
            )
        worker_numbers.lose(rng.choice(worker_numbers.workers))
        worker_numbers.run()
        keys = [key for update in worker_numbers.updates for batches in update for key in batches]
        seen = [
            (spec.lap(key.number), spec.offset(key.number) + place)
            for key in keys
            for place in range(key.count)
        ]

        assert sorted(seen) == [
            (lap, n) for lap in range(spec.laps) for n in range(lengths[lap % len(lengths)])
        ], seed
