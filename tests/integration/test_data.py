"""Each index is used once an epoch when workers die, join late, leave early or are slow."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pscommon.core.data_loop import LoopSpec
from psworker import Client, Job
from psworker.transport.grpc_transport import GrpcTransport
from tests.support.breakable_lane import BreakableLane
from tests.support.cluster import Cluster
from tests.support.data_training import (
    ALL,
    BATCH,
    EPOCHS,
    LOOP,
    SIZE,
    Batch,
    assert_each_once,
    batches,
    compute,
    started,
    train,
)
from tests.support.policies import POLICIES
from tests.support.programs import programs_in
from tests.support.training_threads import real, simulated
from tests.support.workers import OUTLIVED, status, together, until

Make = Callable[..., Cluster]


# ---- shares --------------------------------------------------------------------------------------


@pytest.mark.every(4)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_each_index_is_used_once_an_epoch(cluster: Make, name: str, workers: int) -> None:
    address = cluster(2, min_workers=workers, **POLICIES[name]).address

    shares = real(address, workers, train)

    assert_each_once(shares, address)


@pytest.mark.parametrize("workers", [2, 3])
def test_under_sync_the_shares_are_the_same_in_every_run(cluster: Make, workers: int) -> None:
    """Over gRPC or not, on one server or two: worker r gets every W-th batch."""
    runs = [simulated(workers, train)]
    runs += [
        real(cluster(shards, min_workers=workers).address, workers, train) for shards in (1, 2)
    ]

    for shares in runs:
        assert shares == [ALL[rank::workers] for rank in range(workers)]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("loader", [{}, {"num_workers": 1}])
def test_a_nested_loop_takes_nothing_from_the_outer_one(name: str, loader: dict[str, int]) -> None:
    """For example an evaluation every few steps."""

    def evaluating(job: Job) -> tuple[list[Batch], list[Batch]]:
        model, optimizer = started(job)
        trained, seen = [], []
        for step, batch in enumerate(batches(job, 4, **loader)):
            trained.append(compute(model, batch))
            optimizer.step()
            if step % 3 == 1:
                with torch.no_grad():
                    seen += [tuple(each.tolist()) for each in batches(job, 1, seed=11)]
        return trained, seen

    (trained, seen), (others_trained, others_seen) = simulated(2, evaluating, **POLICIES[name])

    assert sorted(trained + others_trained) == sorted(ALL[:20])
    evaluated = Counter(index for batch in seen + others_seen for index in batch)
    if POLICIES[name].get("policy", "sync") == "sync":  # both workers make the same loops
        assert trained == ALL[:20:2]
        assert evaluated == dict.fromkeys(range(SIZE), 3)


@pytest.mark.parametrize("name", POLICIES)
def test_two_parallel_loops_deal_all_their_batches(name: str) -> None:
    def pairing(job: Job) -> list[tuple[Batch, Batch]]:
        model, optimizer = started(job)
        pairs = []
        for one, other in zip(batches(job, 4), batches(job, 4, seed=9), strict=False):
            pairs.append((compute(model, one), compute(model, other)))
            optimizer.step()
        return pairs

    one, other = simulated(2, pairing, **POLICIES[name])
    pairs = one + other

    others = [
        tuple(LoopSpec(1, SIZE, BATCH, 4, seed=9).indices(number).tolist()) for number in range(20)
    ]
    assert sorted(first for first, _ in pairs) == sorted(ALL[:20])
    assert sorted(second for _, second in pairs) == sorted(others)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_loop_created_before_its_outer_loop_is_shared_like_any_other(workers: int) -> None:
    """Its iterator exists while the next epoch's is created, and then has undealt batches left."""

    def pairing(job: Job) -> list[tuple[Batch, Batch]]:
        model, optimizer = started(job)
        pairs = []
        for _ in range(2):
            others = batches(job, 4, seed=9)
            for one in batches(job, 1):
                pairs.append((compute(model, one), compute(model, next(others))))
                optimizer.step()
        return pairs

    others = [tuple(LoopSpec(0, SIZE, BATCH, 8, seed=9).indices(n).tolist()) for n in range(40)]
    for rank, pairs in enumerate(simulated(workers, pairing)):
        mine = range(rank, 5, workers)
        assert pairs == [(ALL[n], others[n]) for n in mine] + [
            (ALL[5 + n], others[20 + n]) for n in mine
        ]


@pytest.mark.parametrize("name", POLICIES)
def test_a_loop_saved_for_the_end_delays_no_worker(cluster: Make, name: str) -> None:
    def script(job: Job) -> list[int]:
        model, optimizer = started(job)
        last_loop, _ = batches(job, 1, seed=11), batches(job, 1, seed=12)
        for epoch in range(3):
            for step, batch in enumerate(batches(job, 1)):
                compute(model, batch)
                # unpushed batches are dropped at the next loop
                if (step + epoch) % 2:
                    optimizer.step()
        with torch.no_grad():
            return [index for batch in last_loop for index in batch.tolist()]

    one, other = real(cluster(min_workers=2, **POLICIES[name]).address, 2, script)

    assert {*one, *other} == {*range(SIZE)}


def test_orders_depend_on_epoch_and_seed_and_not_on_the_number_of_requests() -> None:
    def orders(job: Job) -> list[Batch]:
        model, optimizer = started(job)
        found = []
        for epochs, seed in ((1, 7), (1, 7), (2, 8), (0, 7), (3, 7)):
            for batch in batches(job, epochs, seed):
                found.append(compute(model, batch))
                optimizer.step()
        return found

    (found,) = simulated(1, orders)

    assert len(set(map(tuple, (found[:5], found[5:10], found[10:15], found[15:20])))) == 4
    assert found[:10] + found[20:] == ALL


def test_under_async_faster_workers_get_more_batches(cluster: Make) -> None:
    """One worker needs as long for its first step as the other for all the rest."""
    address = cluster(1, policy="async", min_workers=2).address

    def script(job: Job) -> list[Batch]:
        def wait(step: int) -> None:
            if job.rank == 1:
                until(
                    lambda: status(address)["data"][0]["committed"] == len(ALL) - 1,
                    "the other's work",
                )
            elif step == 0:
                until(lambda: status(address)["data"][0]["leased"] == 2, "a batch for each")

        return train(job, wait)

    fast, slow = real(address, 2, script)

    assert_each_once([fast, slow], address)
    assert (len(fast), len(slow)) == (len(ALL) - 1, 1)


@pytest.mark.parametrize("name", POLICIES)
def test_a_late_worker_gets_a_share(cluster: Make, name: str) -> None:
    address, third, come = (
        cluster(2, min_workers=2, **POLICIES[name]).address,
        threading.Event(),
        threading.Event(),
    )

    def script(job: Job) -> list[Batch]:
        def halfway(step: int) -> None:
            if step == 2:
                third.set()
                assert come.wait(30)

        return train(job, halfway)

    def late() -> list[list[Batch]]:
        assert third.wait(30)

        def script(job: Job) -> list[Batch]:
            return train(job, lambda step: come.set())

        return real(address, 1, script)

    early, (last,) = together(lambda: real(address, 2, script), late)

    assert_each_once([*early, last], address)
    assert last


# ---- returned batches ----------------------------------------------------------------------------


class QuittingWorker:
    """A worker that makes some steps and then calls `quit` while it holds another batch."""

    def __init__(self, steps: int, quit: Callable[[], object] = lambda: None) -> None:
        self._steps = steps
        self._quit = quit
        self._taken = threading.Semaphore(0)

    def train(self, job: Job) -> list[Batch]:
        model, optimizer = started(job)
        used: list[Batch] = []
        for batch in batches(job):
            self._taken.release()
            if len(used) == self._steps:
                self._quit()
                break
            used.append(compute(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        return used

    def keep_pace(self, step: int) -> None:
        """Wait for the other worker before each step, so that this one does not take everything."""
        if step <= self._steps:
            assert self._taken.acquire(timeout=30)


@pytest.mark.parametrize("name", POLICIES)
def test_unpushed_batches_of_a_dead_worker_are_trained_by_others(cluster: Make, name: str) -> None:
    """It dies with a batch and without a leave request; each sample counts exactly once."""
    servers = cluster(2, min_workers=2, lease=OUTLIVED, **POLICIES[name])
    lane = BreakableLane(GrpcTransport(servers.addresses.split(",")))
    victim = QuittingWorker(3, lane.die)

    def dies() -> list[list[Batch]]:
        with Job(Client(lane=lane, rank=1), 1) as job:
            return [victim.train(job)]

    (lost,), (rest,) = together(
        dies, lambda: real(servers.address, 1, lambda job: train(job, victim.keep_pace))
    )

    assert len(lost) == 3
    assert_each_once([lost, rest], servers.address)
    assert [row["state"] for row in status(servers.address)["workers"]] == ["left", "lost"]


@pytest.mark.parametrize("name", POLICIES)
def test_unfinished_batches_of_a_leaving_worker_are_trained_by_others(
    cluster: Make, name: str
) -> None:
    """It breaks off and closes its job."""
    address, leaver = cluster(1, min_workers=2, **POLICIES[name]).address, QuittingWorker(2)

    def script(job: Job) -> list[Batch]:
        return leaver.train(job) if job.rank == 1 else train(job, leaver.keep_pace)

    shares = real(address, 2, script)

    assert len(shares[1]) == 2
    assert_each_once(shares, address)


@pytest.mark.parametrize("name", POLICIES)
def test_after_an_abandoned_loop_the_next_one_is_complete(cluster: Make, name: str) -> None:
    """Each worker leaves the first loop after two steps; the second uses each index once
    an epoch.
    """
    address = cluster(2, min_workers=2, **POLICIES[name]).address

    def script(job: Job) -> list[Batch]:
        model, optimizer = started(job)
        used: list[Batch] = []
        for loop, stop in ((0, 2), (1, LOOP.total)):
            for step, batch in enumerate(batches(job, EPOCHS, seed=loop)):
                if step == stop:
                    break
                used += [compute(model, batch)] * loop
                optimizer.step()
                optimizer.zero_grad()
        return used

    shares = real(address, 2, script)

    second = LoopSpec(1, SIZE, BATCH, EPOCHS, seed=1)
    expected = [tuple(second.indices(number).tolist()) for number in range(second.total)]
    assert sorted(batch for share in shares for batch in share) == sorted(expected)
    first, last = status(address)["data"]
    assert (last["committed"], last["leased"], last["ended"]) == (len(ALL), 0, True)
    # the next push of the script contains the batch that it held when it left the loop
    assert (first["leased"], first["committed"], first["dropped"]) == (0, 4 + 2, 0)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("last_step", [True, False])
def test_an_uneven_last_accumulation_ends_cleanly(
    cluster: Make, name: str, last_step: bool
) -> None:
    """Two batches a step and 25 in all: one worker has a single one left, for a last step after the
    loop.
    """
    address = cluster(1, min_workers=2, **POLICIES[name]).address

    def script(job: Job) -> list[Batch]:
        model, optimizer = started(job)
        used, open_ = [], []
        for batch in batches(job):
            open_.append(compute(model, batch))
            if len(open_) == 2:
                optimizer.step()
                used, open_ = used + open_, []
                optimizer.zero_grad()
        if open_ and last_step:
            optimizer.step()
            used += open_
        return used

    shares = real(address, 2, script)

    if last_step:
        assert_each_once(shares, address)
    else:
        assert sum(map(len, shares)) == status(address)["data"][0]["committed"] == len(ALL) - 1


# ---- torch's loaders -----------------------------------------------------------------------------

LOADERS = """
import torch, psworker
from torch import nn

with psworker.connect() as job:
    model = nn.Linear(1, 1)
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
    for batch in job.batches(torch.arange(18), 4, epochs=5, seed=7, num_workers=2):
        model(batch[:, None].float()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("batch", *batch.tolist())
"""


@pytest.mark.full
def test_loader_processes_prefetch_and_each_index_is_used_once(tmp_path: Path) -> None:
    """Two workers with two loader processes each, forked from processes that use gRPC."""
    with programs_in(tmp_path) as programs:
        programs.script(LOADERS)
        run = programs.run(
            "ps-run", "--servers", 1, "--workers", 2, "--summary", "summary.json", "train.py"
        )

    assert run.process.returncode == 0, run.output
    lines = [line.partition("batch ")[2] for line in run.out.splitlines() if "batch " in line]
    assert_each_once([[tuple(map(int, line.split())) for line in lines]])
