"""Workers begin passes at different moments, and make collective calls between them."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psworker
from pscommon.core.errors import MismatchError
from psworker import Job
from tests.support.cluster import Cluster
from tests.support.events import records_of
from tests.support.workers import connected, status, together

Make = Callable[..., Cluster]
Step = Callable[[torch.Tensor], None]

POLICIES = [{"policy": "sync"}, {"policy": "async"}, {"policy": "ssp", "staleness": 2}]


def numbers(count: int) -> torch.Tensor:
    return torch.arange(float(count)).unsqueeze(1)


def started(address: str, rank: int) -> tuple[Job, Step]:
    """Return a job with a small model, and its training step."""
    job, model = Job(connected(address, rank), rank), nn.Linear(1, 1)
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()

    return job, step


def run(address: str, script: Callable[[Job, Step], Any], workers: int = 2) -> list[Any]:
    """Run the script on each worker; return what each returns."""

    def worker(rank: int) -> Any:
        job, step = started(address, rank)
        with job:
            return script(job, step)

    return together(*(lambda rank=rank: worker(rank) for rank in range(workers)))  # type: ignore[misc]


def values(batch: torch.Tensor) -> list[int]:
    return [int(value) for value in batch.flatten()]


def all_of(found: list[Counter[int]]) -> Counter[int]:
    return sum(found, Counter())


@pytest.mark.every(4)
@pytest.mark.parametrize("rules", POLICIES, ids=lambda rules: rules["policy"])
@pytest.mark.parametrize("samples", [44, 48, 45])
def test_validation_every_few_steps_sees_each_sample_once_a_pass(
    cluster: Make, caplog: pytest.LogCaptureFixture, rules: dict[str, Any], samples: int
) -> None:
    """The workers have different numbers of batches, and so begin passes in different orders."""

    def script(job: Job, step: Step) -> tuple[Counter[int], dict[int, Counter[int]]]:
        train = job.batches(numbers(samples), batch_size=4)
        test = job.batches(numbers(30), batch_size=4, shuffle=False)
        trained: Counter[int] = Counter()
        validated: dict[int, Counter[int]] = {}
        steps = 0
        for _ in range(3):
            for batch in train:
                step(batch)
                trained.update(values(batch))
                steps += 1
                if steps % 3 == 0:
                    with torch.no_grad():
                        seen = (value for rows in test for value in values(rows))
                        validated[steps // 3] = Counter(seen)
        return trained, validated

    found = run(cluster(2, min_workers=2, **rules).address, script)

    assert all_of([trained for trained, _ in found]) == dict.fromkeys(range(samples), 3)
    for number in {*found[0][1], *found[1][1]}:
        shares = [validated.get(number, Counter()) for _, validated in found]
        # a worker that makes the last pass alone gets its share only, if the other one is just done
        is_warned = not all(shares) and records_of(caplog, "pass_not_begun")
        assert all_of(shares) == dict.fromkeys(range(30), 1) or is_warned


@pytest.mark.parametrize("rules", POLICIES, ids=lambda rules: rules["policy"])
def test_labelled_and_unlabelled_data_of_different_lengths(
    cluster: Make, rules: dict[str, Any]
) -> None:
    def script(job: Job, step: Step) -> Counter[int]:
        labelled = job.batches(numbers(44), batch_size=4)
        unlabelled = job.batches(numbers(28) + 100, batch_size=4)

        def for_ever() -> Iterator[torch.Tensor]:
            while True:
                yield from unlabelled

        seen: Counter[int] = Counter()
        others = for_ever()
        for _ in range(3):
            for batch in labelled:
                step(torch.cat([batch, next(others)]))
                seen.update(values(batch))
        return seen

    found = run(cluster(2, min_workers=2, **rules).address, script)
    assert all_of(found) == dict.fromkeys(range(44), 3)


def test_a_pass_that_one_worker_makes_alone_blocks_nobody_and_is_reported(
    cluster: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """It gets its own share. The other worker trains, and waits at the end of its pass."""

    def script(job: Job, step: Step) -> tuple[Counter[int], Counter[int]]:
        train, test = (job.batches(numbers(n), batch_size=2, shuffle=False) for n in (22, 14))
        trained, tested = Counter[int](), Counter[int]()
        for count, batch in enumerate(train):
            step(batch)
            trained.update(values(batch))
            if count == 2 and job.rank == 0:
                with torch.no_grad():
                    tested.update(value for rows in test for value in values(rows))
        if job.rank == 0:
            with torch.no_grad():
                tested.update(value for rows in test for value in values(rows))
        job.barrier()
        return trained, tested

    found = run(cluster(1, min_workers=2).address, script)
    assert all_of([trained for trained, _ in found]) == dict.fromkeys(range(22), 1)
    share = dict.fromkeys([0, 1, 4, 5, 8, 9, 12, 13], 2)
    assert [tested for _, tested in found] == [share, {}]
    missed = [record.__dict__ for record in records_of(caplog, "pass_not_begun")]
    assert [(each["loader"], each["batches"]) for each in missed] == [("1", 3), ("1", 3)]


def test_another_order_of_loaders_is_refused_with_the_name_of_the_loader(cluster: Make) -> None:
    def script(job: Job, step: Step) -> str:
        sizes = (6, 4) if job.rank == 0 else (4, 6)
        loaders = [job.batches(numbers(size), batch_size=2) for size in sizes]
        try:
            for loader in loaders:
                for batch in loader:
                    step(batch)
        except MismatchError as error:
            return f"{error.reason}: {error}"
        return "done"

    found = run(cluster(1, min_workers=2).address, script)
    (refused,) = [text for text in found if text != "done"]
    assert refused.startswith("LOOP_MISMATCH: pass 1 of loader '0' of this script")


def test_named_loaders_may_be_made_in_any_order(cluster: Make) -> None:
    def script(job: Job, step: Step) -> Counter[int]:
        sizes = {"large": 6, "small": 4}
        order = list(sizes) if job.rank == 0 else list(sizes)[::-1]
        loaders = {
            name: job.batches(numbers(sizes[name]), batch_size=2, name=name) for name in order
        }
        seen: Counter[int] = Counter()
        for name in sizes:
            for batch in loaders[name]:
                step(batch)
                seen.update(values(batch))
        return seen

    found = run(cluster(1, min_workers=2).address, script)
    assert all_of(found) == Counter([*range(6), *range(4)])


# ---- collective calls ----------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("in_one_loop", [False, True], ids=["passes", "epochs"])
@pytest.mark.parametrize("durability", ["snapshot", "log"])
def test_a_second_run_with_more_epochs_gets_results_of_its_own(
    cluster: Make, tmp_path: Path, in_one_loop: bool, durability: str
) -> None:
    def make_script(run_number: int, epochs: int) -> Callable[[Job, Step], Any]:
        def script(job: Job, step: Step) -> Any:
            first = job.all_reduce({"run": run_number})["run"]
            loader = job.batches(numbers(8), batch_size=2, epochs=epochs if in_one_loop else 1)
            for _ in range(1 if in_one_loop else epochs):
                for batch in loader:
                    step(batch)
            values = job.all_reduce({"run": run_number, "rank": job.rank})
            job.barrier()
            return first, values, job.broadcast(run_number if job.is_first else None)

        return script

    servers = cluster(1, data_dir=tmp_path, durability=durability, min_workers=2)
    assert run(servers.address, make_script(1, 2)) == [(1, {"run": 1, "rank": 0.5}, 1)] * 2
    servers.stop()

    servers = cluster(1, data_dir=tmp_path, durability=durability, min_workers=2)
    # the call before all passes is repeated, as by a script that was started again
    assert run(servers.address, make_script(2, 6)) == [(1, {"run": 2, "rank": 0.5}, 2)] * 2


def test_a_worker_that_skips_finished_passes_meets_the_calls_after_them(cluster: Make) -> None:
    """Frameworks make no evaluation, and so no call, for a pass that gives no batches."""
    address = cluster(1).address
    job, step = started(address, 0)
    loader = job.batches(numbers(4), batch_size=2)
    with job:
        for epoch in range(2):
            for batch in loader:
                step(batch)
            assert job.all_reduce({"epoch": epoch}) == {"epoch": epoch}

    job, step = started(address, 0)
    loader, trained = job.batches(numbers(4), batch_size=2), []
    with job:
        for epoch in range(4):
            for batch in loader:
                step(batch)
            if not loader.skipped:
                trained.append(job.all_reduce({"epoch": epoch})["epoch"])
    assert trained == [2, 3]
    newest = status(address)["data"][3]
    assert (newest["loader"], newest["pass"]) == ("0", 3)


def test_calls_inside_and_after_passes_belong_together(cluster: Make) -> None:
    def script(job: Job, step: Step) -> list[float]:
        means = []
        loader = job.batches(numbers(8), batch_size=2)
        for epoch in range(2):
            for count, batch in enumerate(loader):
                step(batch)
                means.append(job.all_reduce({"x": count + job.rank + 10 * epoch})["x"])
            means.append(job.all_reduce({"x": epoch})["x"])
        return means

    assert run(cluster(1, min_workers=2).address, script) == [[0.5, 1.5, 0, 10.5, 11.5, 1]] * 2


def test_local_training_accepts_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_LOCAL", "1")
    with psworker.connect() as job:
        model = nn.Linear(1, 1)
        job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        loader = job.batches(numbers(4), batch_size=2, name="train")
        assert [len(list(loader)) for _ in range(2)] == [2, 2]
