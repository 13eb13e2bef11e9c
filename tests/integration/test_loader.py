"""Loaders over several passes: on one worker and on two, under each policy, resumed,
joined late.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psworker import Job
from tests.support.cluster import Cluster
from tests.support.policies import POLICIES
from tests.support.programs import Programs, programs_in
from tests.support.training_threads import real, simulated
from tests.support.workers import joined, status, until

Make = Callable[..., Cluster]

TRAIN, TEST = 18, 7
PASSES = 3


class LoaderRun:
    """What one worker's script saw: samples, lengths and `skipped`, by pass."""

    def __init__(self) -> None:
        self.trained: list[list[int]] = []
        self.tested: list[list[int]] = []
        self.lengths: list[int] = []
        self.counts: list[int] = []
        self.skipped: list[bool] = []
        self.test_skipped: list[bool] = []


def examples(
    passes: int = PASSES, stop_at: tuple[int, int] | None = None, each: Any = None
) -> Callable[[Job], LoaderRun]:
    """Run the epoch loop of pytorch/examples with two loaders. stop_at: the pass and step after
    which it ends. each: is called after the first step of each pass.
    """

    def script(job: Job) -> LoaderRun:
        run, model = LoaderRun(), nn.Linear(1, 1)
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
        train_loader = job.batches(torch.arange(TRAIN), batch_size=4, seed=7)
        test_loader = job.batches(torch.arange(TEST), batch_size=2, shuffle=False)
        for number in range(passes):
            run.trained.append([])
            count = 0
            for step, batch in enumerate(train_loader):
                if step == 0:
                    run.lengths.append(len(train_loader))
                optimizer.zero_grad()
                model(batch[:, None].float()).mean().backward()
                optimizer.step()
                run.trained[-1] += batch.tolist()
                count += 1
                assert len(train_loader) == run.lengths[-1]
                if each is not None and step == 0:
                    each(number)
                if stop_at == (number, step):
                    return run
            run.counts.append(count)
            run.skipped.append(train_loader.skipped)
            run.tested.append([])
            with torch.no_grad():
                for batch in test_loader:
                    run.tested[-1] += batch.tolist()
            run.test_skipped.append(test_loader.skipped)
        return run

    return script


def together(runs: list[LoaderRun], name: str) -> list[list[int]]:
    """Return the samples of each pass, over all workers."""
    return [
        sorted(x for run in runs for x in getattr(run, name)[number]) for number in range(PASSES)
    ]


@pytest.mark.every(5)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("over_the_network", [False, True])
def test_two_alternating_loaders_deal_every_sample_of_each_pass_once(
    cluster: Make, name: str, workers: int, over_the_network: bool
) -> None:
    """Under sync each worker's length is what it gets."""
    if over_the_network:
        runs = real(cluster(2, min_workers=workers, **POLICIES[name]).address, workers, examples())
    else:
        runs = simulated(workers, examples(), **POLICIES[name])

    assert together(runs, "trained") == [list(range(TRAIN))] * PASSES
    for run in runs:
        assert run.skipped == run.test_skipped == [False] * PASSES
    if workers == 1 or name == "sync":
        assert all(run.counts == run.lengths for run in runs)
        assert together(runs, "tested") == [list(range(TEST))] * PASSES


def test_under_sync_each_worker_has_its_own_share(cluster: Make) -> None:
    """5 batches a pass for 2 workers: 3 and 2."""
    one, other = real(cluster(1, min_workers=2).address, 2, examples())

    assert (one.lengths, other.lengths) == ([3] * PASSES, [2] * PASSES)


def test_a_length_before_the_first_pass_counts_the_awaited_workers(cluster: Make) -> None:
    """A script plans its learning rates before all workers are there and before it has an
    optimizer.
    """
    address = cluster(1, min_workers=2).address

    with joined(address, 0) as job:
        assert len(job.batches(torch.arange(TRAIN), batch_size=4)) == 3
        assert len(job.batches(torch.arange(TRAIN), batch_size=4, epochs=2)) == 5
    with joined(address, 1) as job:
        assert len(job.batches(torch.arange(TRAIN), batch_size=4)) == 2


@pytest.mark.parametrize("workers", [1, 2])
def test_a_resumed_job_skips_completed_passes_and_continues_within_one(
    cluster: Make, tmp_path: Path, workers: int
) -> None:
    """The servers are stopped after the second step of the second pass."""
    settings = {"min_workers": workers, "data_dir": tmp_path}
    servers = cluster(1, **settings)
    before = real(servers.address, workers, examples(stop_at=(1, 1)))
    servers.stop()

    runs = real(cluster(1, **settings).address, workers, examples())

    for run in runs:
        assert run.skipped == run.test_skipped == [True, False, False]
        assert run.trained[0] == run.tested[0] == []
    halves = Counter(sample for run in [*before, *runs] for sample in run.trained[1])
    assert halves == dict.fromkeys(range(TRAIN), 1)
    assert together(runs, "trained")[2] == list(range(TRAIN))
    uninterrupted = real(cluster(1, min_workers=workers).address, workers, examples())
    assert [run.trained[2] for run in runs] == [run.trained[2] for run in uninterrupted]


@pytest.mark.parametrize("name", POLICIES)
def test_a_finished_job_has_nothing_left_even_if_it_ended_with_an_evaluation(
    cluster: Make, tmp_path: Path, name: str
) -> None:
    """No step counts evaluated batches: a worker reports itself that it has finished them."""
    settings = {"min_workers": 2, "data_dir": tmp_path, **POLICIES[name]}
    servers = cluster(1, **settings)
    real(servers.address, 2, examples())
    rows = status(servers.address)["data"]
    assert [row["ended"] for row in rows] == [True] * 2 * PASSES
    assert [row["leased"] for row in rows] == [0] * 2 * PASSES
    assert rows[-1]["committed"] == rows[-1]["total"] == rows[-1]["dropped"]
    servers.stop()

    runs = real(cluster(1, **settings).address, 2, examples())

    for run in runs:
        assert run.skipped == run.test_skipped == [True] * PASSES
        assert run.trained == run.tested == [[]] * PASSES


def test_a_late_worker_skips_completed_passes(cluster: Make) -> None:
    """It begins in the pass that the others are in."""
    address = cluster(1, policy="async").address
    late: list[LoaderRun] = []

    def join_late(number: int) -> None:
        if number == 2:
            late.extend(real(address, 1, examples(stop_at=(2, 1))))

    (run,) = real(address, 1, examples(each=join_late))

    assert late[0].skipped == late[0].test_skipped == [True, True]
    assert [len(samples) for samples in late[0].trained] == [0, 0, 8]
    assert run.skipped == run.test_skipped == [False] * PASSES


def test_a_completed_evaluation_inside_a_pass_is_skipped_by_a_resumed_job(
    cluster: Make, tmp_path: Path
) -> None:
    """The pass around it continues."""
    settings = {"min_workers": 1, "data_dir": tmp_path}

    def script(stop_at: int) -> Callable[[Job], list[bool]]:
        def run(job: Job) -> list[bool]:
            skipped, model = [], nn.Linear(1, 1)
            optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
            test_loader = job.batches(torch.arange(TEST), batch_size=2)
            train_loader = job.batches(torch.arange(TRAIN), batch_size=2)
            for step, batch in enumerate(train_loader):
                model(batch[:, None].float()).mean().backward()
                optimizer.step()
                if step % 3 == 1:
                    with torch.no_grad():
                        list(test_loader)
                    skipped.append(test_loader.skipped)
                if step == stop_at:
                    break
            assert not train_loader.skipped
            return skipped

        return run

    servers = cluster(1, **settings)
    assert real(servers.address, 1, script(5)) == [[False, False]]
    servers.stop()
    again = cluster(1, **settings)
    assert real(again.address, 1, script(99)) == [[True]]
    until(lambda: status(again.address)["data"][0]["ended"], "the end of the training pass")


# ---- processes -----------------------------------------------------------------------------------


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        yield programs


SCRIPT = """
import json, os, torch, psworker
from torch import nn
from torch.utils.data import WeightedRandomSampler

with psworker.connect() as job:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model)
    data = torch.arange(40.0)
    sampler = WeightedRandomSampler([1.0] * 40, 32)
    train_loader = job.batches(data, batch_size=4, sampler=sampler, num_workers=2)
    test_loader = job.batches(data, batch_size=4, shuffle=False)
    for epoch in range(4):
        steps = 0
        for batch in train_loader:
            optimizer.zero_grad()
            model(batch[:, None]).mean().backward()
            optimizer.step()
            steps += 1
            if epoch == 2 and steps == 2 and os.environ.get("BREAK"):
                raise SystemExit(3)
        with torch.no_grad():
            for batch in test_loader:
                pass
        skipped = [train_loader.skipped, test_loader.skipped]
        print("EPOCH", json.dumps([epoch, steps, len(train_loader), *skipped]))
"""


def epochs(printed: str) -> list[Any]:
    return sorted(
        json.loads(line.partition("EPOCH ")[2]) for line in printed.splitlines() if "EPOCH " in line
    )


def test_a_resumed_run_of_processes_ends_like_an_uninterrupted_one(programs: Programs) -> None:
    """Its passes have the sampler's earlier orders, with loader processes."""
    programs.script(SCRIPT)
    settings = ["--servers", 1, "--workers", 2, "--durability", "log", "--max-restarts", 0]

    broken = programs.run("ps-run", *settings, "--data-dir", "job", "train.py", BREAK=1)
    resumed = programs.run(
        "ps-run", *settings, "--data-dir", "job", "--summary", "resumed.json", "train.py"
    )
    complete = programs.run(
        "ps-run", *settings, "--data-dir", "other", "--summary", "whole.json", "train.py"
    )

    assert broken.process.returncode == 3, broken.output
    assert resumed.process.returncode == complete.process.returncode == 0, (
        resumed.output + complete.output
    )
    found, expected = (
        json.loads((programs.folder / name).read_text()) for name in ("resumed.json", "whole.json")
    )
    assert found["weights_sha256"] == expected["weights_sha256"]
    assert epochs(complete.output) == [
        [epoch, 4, 4, False, False] for epoch in range(4) for _ in range(2)
    ]
    finished = programs.run("ps-run", *settings, "--data-dir", "job", "train.py")
    assert finished.process.returncode == 0, finished.output
    assert "nothing is left to train" in finished.output
    # one worker may be done before the other one asks for its share
    without_length = [
        [epoch, steps, *skipped] for epoch, steps, _, *skipped in epochs(finished.output)
    ]
    assert without_length == [[epoch, 0, True, True] for epoch in range(4) for _ in range(2)]
    assert epochs(resumed.output) == [
        *[[epoch, 0, 4, True, True] for epoch in range(2) for _ in range(2)],
        *[[2, 2, 4, False, False]] * 2,
        *[[3, 4, 4, False, False]] * 2,
    ]
