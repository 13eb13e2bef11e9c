"""Steps sent while the model computes, over each lane: same weights, nothing lost."""

import time
from collections.abc import Callable
from statistics import median

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from psworker import InvalidRequestError, Job, NonFiniteError
from psworker.steps import overlapped_step as overlap
from tests.support.cluster import Cluster
from tests.support.lanes import each_lane
from tests.support.training_threads import real

Make = Callable[..., Cluster]
Named = dict[str, Tensor]
STEPS = 8


def net() -> nn.Module:
    """Return the same for each worker: workers are threads here and share torch's generator."""
    layers = (
        nn.Linear(6, 400),
        nn.BatchNorm1d(400),
        nn.Tanh(),
        nn.Linear(400, 400),
        nn.Tanh(),
        nn.Linear(400, 1),
    )
    model, generator = nn.Sequential(*layers), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def backward(model: nn.Module, rank: int, number: int) -> None:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(100 * number + rank))
    F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def state(model: nn.Module) -> Named:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def trained(job: Job, overlap: bool, clip: bool = False) -> Named:
    model = net()
    optimizer = job.optimizer(adam(model), model, overlap=overlap)
    for number in range(STEPS):
        backward(model, job.rank, number)
        if clip and number % 3 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


def assert_alike(states: list[Named]) -> None:
    first, *others = states
    for other in others:
        assert all(torch.equal(value, other[name]) for name, value in first.items())


@pytest.mark.every(2)
@each_lane
@pytest.mark.parametrize("clip", [False, True])
def test_with_and_without_overlap_the_bytes_are_the_same(
    cluster: Make, lanes: str, clip: bool
) -> None:
    """Two workers, two servers, sync; clipped gradients are sent a second time."""
    runs = [
        real(
            cluster(2, min_workers=2, lanes=lanes).address,
            2,
            lambda job, on=on: trained(job, on, clip),
        )  # type: ignore[misc]
        for on in (False, True)
    ]

    assert_alike([*runs[0], *runs[1]])


@pytest.mark.every(3)
@pytest.mark.parametrize("mode", ["whole", "overlap", "pipeline"])
def test_phases_add_up_to_the_time_of_the_steps(cluster: Make, mode: str) -> None:
    """What overlaps the script's own work is not counted twice."""

    def script(job: Job) -> tuple[float, float]:
        model, phases = net(), 0.0
        optimizer = job.optimizer(
            adam(model), model, overlap=mode == "overlap", pipeline=mode == "pipeline"
        )
        job.enter("compute")
        began = time.perf_counter()
        for number in range(5 * STEPS):
            backward(model, job.rank, number)
            optimizer.step()
            optimizer.zero_grad()
            phases += sum(job.stats.last.values())
            assert min(job.stats.last.values()) >= 0
        return phases, time.perf_counter() - began

    policy = "async" if mode == "pipeline" else "sync"
    for phases, took in real(cluster(2, min_workers=2, policy=policy).address, 2, script):
        assert phases == pytest.approx(took, rel=0.05)


@pytest.mark.every(4)
@each_lane
@pytest.mark.parametrize("shards", [1, 2])
def test_the_seconds_of_a_push_are_those_of_the_exchange(
    cluster: Make, shards: int, lanes: str
) -> None:
    """In the median of some pushes of 16 MB: a short delay outside of the exchange does
    not count.
    """

    def script(job: Job) -> float:
        model, shares = nn.Linear(2000, 2000), []
        job.optimizer(adam(model), model, overlap=False)
        gradients, weights = job.client.model.flat_buffers()
        for _ in range(STEPS):
            began = time.perf_counter()
            result = job.client.model.exchange(gradients=gradients, weights=weights)
            shares.append(sum(result.seconds.values()) / (time.perf_counter() - began))
        return median(shares)

    for share in real(cluster(shards, min_workers=2, lanes=lanes).address, 2, script):
        assert share == pytest.approx(1.0, rel=0.05)


@pytest.mark.full
def test_a_loop_with_overlap_equals_the_loop_without(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator switches it on; data requests, sitting out and the last pull do not disturb a
    push.
    """
    monkeypatch.setattr(overlap, "piece_nbytes", lambda nbytes: 1024)
    data = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))

    def script(job: Job) -> tuple[int, Named]:
        model = net()
        optimizer = job.optimizer(adam(model), model)
        for batch in job.batches(data, 4, epochs=3, seed=1):
            F.mse_loss(model(batch), batch.sum(1, keepdim=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return job.stats.samples, state(model)

    results = []
    for switch in ("off", "on"):
        monkeypatch.setenv("PS_OVERLAP", switch)
        results += real(cluster(2, min_workers=2).address, 2, script)

    assert_alike([named for _, named in results])
    assert [samples for samples, _ in results] == [76, 74] * 2


@pytest.mark.every(2)
@each_lane
@pytest.mark.parametrize("policy", [{"policy": "async"}, {"policy": "ssp", "staleness": 2}])
def test_a_pipeline_counts_every_batch_and_its_staleness(
    cluster: Make, policy: dict[str, object], lanes: str
) -> None:
    data = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))

    def script(job: Job) -> tuple[int, list[int], int]:
        model, seen = net(), []
        optimizer = job.optimizer(adam(model), model, pipeline=True)
        for batch in job.batches(data, 4, epochs=2, seed=1):
            F.mse_loss(model(batch), batch.sum(1, keepdim=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += [job.last.staleness] if job.last else []
        return job.stats.samples, seen, job.version

    results = real(cluster(2, min_workers=2, lanes=lanes, **policy).address, 2, script)

    assert sum(samples for samples, _, _ in results) == 240
    assert {version for _, _, version in results} == {60}
    for _, seen, _ in results:
        assert min(seen[1:]) >= 1, (
            "a gradient in a pipeline lacks its worker's own last push at least"
        )


@each_lane
def test_a_pipeline_of_one_worker_is_one_update_late(cluster: Make, lanes: str) -> None:
    def script(job: Job) -> list[int]:
        model, seen = net(), []
        optimizer = job.optimizer(adam(model), model, pipeline=True)
        for number in range(STEPS):
            backward(model, 0, number)
            optimizer.step()
            optimizer.zero_grad()
            seen += [job.last.staleness] if job.last else []
        job.wait()
        assert job.last
        return [*seen, job.last.staleness]

    (seen,) = real(cluster(1, policy="async", lanes=lanes).address, 1, script)

    assert seen == [0] + [1] * (STEPS - 1)


@each_lane
def test_a_pipeline_reports_a_nan_at_the_next_step(cluster: Make, lanes: str) -> None:
    def script(job: Job) -> None:
        model = net()
        optimizer = job.optimizer(adam(model), model, pipeline=True)
        backward(model, 0, 0)
        next(model.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]
        optimizer.step()
        with pytest.raises(NonFiniteError):
            optimizer.step()

    real(cluster(1, policy="async", lanes=lanes).address, 1, script)


def test_a_pipeline_under_sync_is_refused(cluster: Make) -> None:
    def script(job: Job) -> None:
        model = net()
        with pytest.raises(InvalidRequestError, match="async or ssp"):
            job.optimizer(adam(model), model, pipeline=True)

    real(cluster(1).address, 1, script)


@pytest.mark.every(4)
@each_lane
@pytest.mark.parametrize("where", ["in forward", "after backward", "after step"])
def test_other_workers_continue_when_one_fails_during_a_step(
    cluster: Make, monkeypatch: pytest.MonkeyPatch, lanes: str, where: str
) -> None:
    """Its push has begun, or its weights are still arriving; it leaves, and the others
    count alone.
    """
    monkeypatch.setattr(overlap, "piece_nbytes", lambda nbytes: 1024)

    def fail(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        backward(model, 1, 2)
        if where != "after backward":
            optimizer.step()
        if where == "in forward":
            model[0](torch.zeros(2, 6))  # type: ignore[operator]
        raise ZeroDivisionError

    def script(job: Job) -> int:
        model = net()
        optimizer = job.optimizer(adam(model), model, overlap=True)
        for number in range(STEPS):
            if number == 2 and job.rank == 1:
                with pytest.raises(ZeroDivisionError), job:
                    fail(model, optimizer)
                return job.version
            backward(model, job.rank, number)
            optimizer.step()
            optimizer.zero_grad()
        return job.version

    versions = real(cluster(2, min_workers=2, lanes=lanes).address, 2, script)

    assert versions[0] == STEPS
    assert versions[1] == (2 if where == "after backward" else 3)


def test_a_nan_is_skipped_and_changes_no_model(cluster: Make) -> None:
    """The push is refused on every shard; the next step is the first again."""

    def script(job: Job) -> tuple[bool, int]:
        model = net()
        optimizer = job.optimizer(adam(model), model, overlap=True)
        before = state(model)
        backward(model, 0, 0)
        next(model.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]
        optimizer.step()
        assert optimizer.result.status == "rejected"
        parameters = dict(model.named_parameters())
        same = all(torch.equal(before[name], parameters[name]) for name in parameters)
        optimizer.zero_grad()
        backward(model, 0, 1)
        optimizer.step()
        return same, job.version

    assert real(cluster(2, bad_gradients="skip").address, 1, script) == [(True, 1)]
