"""Scripts with several optimizers: a GAN computes what it computes with torch alone."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from psworker import InvalidRequestError, Job, MismatchError
from psworker.client.local_client import LocalClient
from tests.support.cluster import Cluster
from tests.support.lanes import each_lane
from tests.support.policies import POLICIES
from tests.support.reshards import reshard
from tests.support.small_gan import (
    BATCH,
    SAMPLES,
    backward_discriminator,
    backward_generator,
    data,
    handed_over,
    networks,
    optimizers,
    state_of,
    step_discriminator,
    step_generator,
    train_step,
)
from tests.support.training_threads import real, simulated
from tests.support.workers import joined, status, weights_of

Make = Callable[..., Cluster]

EPOCHS = 3
STEPS = EPOCHS * SAMPLES // BATCH


def gan(
    batch: int = BATCH,
    has_buffers: bool = False,
    epochs: int = EPOCHS,
    each: Callable[[Job], object] = lambda job: None,
    **options: Any,
) -> Callable[[Job], dict[str, Tensor]]:
    """Return the script of a worker, which returns the networks' state in the end."""

    def train(job: Job) -> dict[str, Tensor]:
        nets = networks(has_buffers)
        made = handed_over(job, nets, **options)
        for points, noise in job.batches(data(), batch, epochs, shuffle=False, reseed=False):
            train_step(nets, made, points, noise)
            each(job)
        return state_of(nets)

    return train


def plain_gan(has_buffers: bool) -> dict[str, Tensor]:
    """Return the result of torch alone."""
    nets = networks(has_buffers)
    made = optimizers(nets)
    for _ in range(EPOCHS):
        for points, noise in DataLoader(data(), BATCH):
            train_step(nets, made, points, noise)
    return state_of(nets)


def gan_of_halves() -> dict[str, Tensor]:
    """Return the result of torch if each gradient is the mean of those of two half batches."""
    nets = networks()
    made = optimizers(nets)

    def step(name: str, backward: Callable[[Tensor, Tensor], None], batch: list[Tensor]) -> None:
        gradients = []
        for half in range(2):
            for network in nets.values():
                network.zero_grad()
            backward(*(part.chunk(2)[half] for part in batch))
            gradients.append([p.grad.clone() for p in nets[name].parameters()])
        for parameter, *both in zip(nets[name].parameters(), *gradients, strict=True):
            parameter.grad = sum(both) / 2
        made[name].step()

    for _ in range(EPOCHS):
        for batch in DataLoader(data(), 2 * BATCH):
            step("d", lambda points, noise: backward_discriminator(nets, points, noise), batch)
            step("g", lambda points, noise: backward_generator(nets, noise), batch)
    return state_of(nets)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.every(3)
@pytest.mark.parametrize("has_buffers", [False, True], ids=["", "batch_norm"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_one_worker_computes_what_torch_computes(
    cluster: Make, policy: dict[str, Any], has_buffers: bool
) -> None:
    servers = cluster(2, **policy)

    (found,) = real(servers.address, 1, gan(has_buffers=has_buffers))

    assert_close(found, plain_gan(has_buffers))
    assert_close({name: torch.tensor(w) for name, w in weights_of(servers.address).items()}, found)
    job_status = status(servers.address)
    assert (job_status["version"], job_status["samples"]) == (2 * STEPS, SAMPLES * EPOCHS)
    assert job_status["model"]["optimizer"] == "d: adam, g: sgd"


def test_training_without_servers_computes_what_torch_computes() -> None:
    with Job(LocalClient()) as job:
        assert_close(gan(has_buffers=True)(job), plain_gan(True))


@each_lane
def test_two_workers_compute_the_mean_of_two_half_batches(
    cluster: Make, lanes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PS_LANES", lanes)
    servers = cluster(2, min_workers=2)

    first, second = real(servers.address, 2, gan())

    assert_close(first, gan_of_halves())
    assert_close(first, second)
    assert status(servers.address)["version"] == STEPS  # each of half of the batches, twice


@pytest.mark.parametrize("shards", [1, 3])
def test_simulated_workers_compute_the_mean_of_two_half_batches(shards: int) -> None:
    first, second = simulated(2, gan(), shards=shards)

    assert_close(first, gan_of_halves())
    assert_close(first, second)


def test_a_clip_norm_is_that_of_one_optimizer(cluster: Make) -> None:
    def clipped(job: Job) -> dict[str, Tensor]:
        nets = networks()
        made = optimizers(nets)
        used = {
            "d": job.optimizer(made["d"], nets["d"], name="d", clip_norm=0.05),
            "g": job.optimizer(made["g"], nets["g"], name="g"),
        }
        for points, noise in job.batches(data(), BATCH, EPOCHS, shuffle=False, reseed=False):
            train_step(nets, used, points, noise)
        return state_of(nets)

    nets = networks()
    made = optimizers(nets)
    made["d"].register_step_pre_hook(
        lambda *_: torch.nn.utils.clip_grad_norm_(nets["d"].parameters(), 0.05) and None
    )
    for _ in range(EPOCHS):
        for points, noise in DataLoader(data(), BATCH):
            train_step(nets, made, points, noise)

    (found,) = real(cluster(2).address, 1, clipped)
    assert_close(found, state_of(nets))
    with Job(LocalClient()) as job:
        assert_close(clipped(job), state_of(nets))


def test_two_workers_clip_the_mean_of_each_optimizer(cluster: Make) -> None:
    first, second = real(cluster(2, min_workers=2).address, 2, gan(clip_norm=0.05))
    (unclipped, _) = simulated(2, gan())
    simulated_first, _ = simulated(2, gan(clip_norm=0.05), shards=2)

    assert_close(first, second)
    assert_close(first, simulated_first)
    assert any(not torch.allclose(first[name], unclipped[name], atol=1e-3) for name in first)


@pytest.mark.parametrize("batch", [BATCH, 16], ids=["6 batches", "3 batches"])
def test_workers_stay_in_step_after_a_pass_with_a_last_batch_of_one_worker(batch: int) -> None:
    """Each update averages both workers, but for the last batch of an odd number."""
    versions: list[int] = []

    def train(job: Job) -> None:
        nets = networks()
        made = handed_over(job, nets)
        loader = job.batches(data(), batch, shuffle=False)
        for _ in range(4):
            for points, noise in loader:
                train_step(nets, made, points, noise)
            job.barrier()
            versions.append(job.version)

    simulated(2, train)

    updates = 2 * -(-(SAMPLES // batch) // 2)
    assert sorted(set(versions)) == [updates * count for count in range(1, 5)]


def critic_script(job: Job, epochs: int = 1) -> tuple[int, int]:
    """Train with three steps of "d" for each step of "g", and a scheduler of each optimizer.

    Returns:
        The steps of both schedulers at the end.
    """
    nets = networks()
    made = handed_over(job, nets)
    schedulers = {
        name: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for name, optimizer in made.items()
    }
    for scheduler in schedulers.values():
        job.resume(scheduler)
    for number, (points, noise) in enumerate(job.batches(data(), BATCH, epochs, shuffle=False)):
        step_discriminator(nets, made, points, noise)
        schedulers["d"].step()
        if number % 3 == 2:
            step_generator(nets, made, points, noise)
            schedulers["g"].step()
    return schedulers["d"].last_epoch, schedulers["g"].last_epoch


@pytest.mark.parametrize("durability", ["snapshot", "log"])
def test_a_resumed_scheduler_counts_the_updates_of_its_optimizer(
    cluster: Make, tmp_path: Path, durability: str
) -> None:
    settings = {"data_dir": tmp_path, "durability": durability}
    servers = cluster(2, **settings)
    (steps,) = real(servers.address, 1, critic_script)
    assert steps == (6, 2)
    servers.stop()

    servers = cluster(1 if durability == "snapshot" else 2, **settings)
    (steps,) = real(servers.address, 1, lambda job: critic_script(job, epochs=3))

    assert steps == (18, 6)
    assert status(servers.address)["version"] == 24


def test_a_reshard_keeps_the_state_of_each_optimizer(cluster: Make) -> None:
    """The servers go from one shard to three, and to two, while a worker trains."""
    servers, sizes = cluster(1), {10: 3, 20: 2}

    def change_shards(job: Job) -> None:
        if job.version in sizes:
            reshard(servers, sizes[job.version])

    (found,) = real(servers.address, 1, gan(each=change_shards))

    assert_close(found, plain_gan(False))
    assert len(status(servers.address)["servers"]) == 2


def test_workers_with_other_names_are_refused(cluster: Make) -> None:
    servers = cluster(1)
    with connected_job(servers.address) as job:
        handed_over(job, networks())
        job.pull()

        with connected_job(servers.address) as other:
            nets = networks()
            made = optimizers(nets)
            other.optimizer(made["d"], nets["d"], name="critic")
            other.optimizer(made["g"], nets["g"], name="g")
            with pytest.raises(
                MismatchError, match=r"optimizers: critic, g, the job has d, g(.|\n)*Try: start all"
            ):
                other.pull()

        with connected_job(servers.address) as other:
            net = networks()["d"]
            with pytest.raises(MismatchError, match="optimizers: no name, the job has d, g"):
                other.optimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)


def connected_job(address: str) -> Job:
    return joined(address)


def test_servers_refuse_a_push_that_is_no_step_of_its_optimizer(cluster: Make) -> None:
    servers = cluster(2)
    with connected_job(servers.address) as job:
        handed_over(job, networks())
        job.pull()
        client, plan = job.client, job.session.model.adapter.spec
        before = {name: w.copy() for name, w in weights_of(servers.address).items()}
        gradients, weights = client.model.flat_buffers()
        generator = [i for i, t in enumerate(plan.tensors) if t.name.startswith("g.")]

        with pytest.raises(InvalidRequestError, match="no optimizer 'x', but 'd', 'g'"):
            client.model.exchange(gradients=gradients, weights=weights, optimizer="x")
        with pytest.raises(InvalidRequestError, match="no optimizer '', but 'd', 'g'"):
            client.model.exchange(gradients=gradients, weights=weights)
        with pytest.raises(
            InvalidRequestError,
            match=r"a step of optimizer d has a gradient of g\.0\.weight, which belongs to .* g",
        ):
            client.model.exchange(
                gradients=gradients, weights=weights, absent=generator[1:], optimizer="d"
            )

        assert job.version == 0
        after = weights_of(servers.address)
        assert all((after[name] == weight).all() for name, weight in before.items())
        result = client.model.exchange(
            gradients=gradients, weights=weights, absent=generator, optimizer="d"
        )
        assert (result.status, result.version) == ("applied", 1)


def test_a_saved_file_has_the_tensors_of_all_networks(cluster: Make, tmp_path: Path) -> None:
    file = tmp_path / "gan.safetensors"
    with connected_job(cluster(2).address) as job:
        nets = networks(has_buffers=True)
        handed_over(job, nets)
        job.save(file)

        saved = safetensors.torch.load_file(file)

    assert_close(saved, state_of(nets))


def test_a_gradient_of_other_weights_does_not_count(
    cluster: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The first step of a script without passes registers its model."""
    servers = cluster(1, policy="async")
    points, noise = data()[:BATCH]
    with connected_job(servers.address) as first:
        nets = networks()
        made = handed_over(first, nets)
        train_step(nets, made, points, noise)
        assert [made[name].result.status for name in "dg"] == ["applied", "applied"]

        with connected_job(servers.address) as second:
            nets = networks()
            made = handed_over(second, nets)
            train_step(nets, made, points, noise)

            assert made["d"].result.status == "stale"
            assert "Try: job.pull() before the first forward pass" in made["d"].result.reason
            assert made["g"].result.status == "applied"
            assert second.version == 3
            trained = copy.deepcopy(state_of(nets))
            assert_close(
                {name: torch.tensor(w) for name, w in weights_of(servers.address).items()}, trained
            )
