"""Policy allreduce: the same script gives sync's weights to rounding, and it survives losses."""

import math
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from pscommon.core.errors import InvalidRequestError, MismatchError
from pscommon.security.settings import SecuritySettings
from pscommon.security.tls_files import TlsFiles
from pscommon.settings.values import SnapshotEvery
from psserver.process.config import ServerConfig
from psworker import Client, Job, OptimizerSpec
from tests.support.cluster import Cluster
from tests.support.standbys import RunningStandby
from tests.support.training_threads import real
from tests.support.workers import connected, together, until

Named = dict[str, Tensor]
Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-3),
}


def net() -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    return model


def named(model: nn.Module) -> Named:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def data() -> tuple[Tensor, Tensor]:
    x = torch.rand(100, 7, generator=torch.Generator().manual_seed(4))
    return x, (x.sum(1) * 2).long() % 3


def script(make: Make, epochs: int = 3, clip_norm: float | None = None) -> Callable[[Job], Named]:
    def train(job: Job) -> Named:
        model = net()
        optimizer = job.optimizer(make(model.parameters()), model, clip_norm=clip_norm)
        for x, y in job.batches(data(), 8, epochs, seed=5, reseed=False):
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        return named(model)

    return train


def run(cluster: Callable[..., Cluster], policy: str, train: Any, workers: int = 2) -> list[Named]:
    servers = cluster(shards=2, policy=policy, min_workers=workers)
    return real(servers.address, workers, train)


def assert_close(found: Named, expected: Named, tolerance: float) -> None:
    for name, value in expected.items():
        largest = value.abs().max().clamp(min=1e-12)
        difference = ((found[name] - value).abs().max() / largest).item()
        assert difference <= tolerance, (name, difference)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_two_workers_get_the_weights_of_sync(cluster: Callable[..., Cluster], name: str) -> None:
    train = script(OPTIMIZERS[name], clip_norm=1.0 if name == "sgd" else None)

    found = run(cluster, "allreduce", train)
    expected = run(cluster, "sync", train)

    for each in found:
        assert_close(each, expected[0], 1e-6 if name == "sgd" else 1e-5)


STEPS = 6


class Heads(nn.Module):
    """A common layer, and two heads of which a batch uses one or none."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 3))
        self.heads = nn.ModuleList([nn.Linear(3, 2) for _ in range(2)])
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)

    def loss(self, rank: int, step: int, head: int | None = 0) -> Tensor:
        """Return the loss of a batch that belongs to this rank and step."""
        x = torch.rand(8, 7, generator=torch.Generator().manual_seed(100 * rank + step))
        common: Tensor = self.common(x.to(self.heads[0].weight.dtype))
        return (common if head is None else self.heads[head](common)).square().mean()


def absent_gradients(job: Job) -> Named:
    """Head 1 has a gradient of one worker in steps 1 and 4, and of none in the others."""
    model = Heads()
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=1e-2), model, clip_norm=0.5)
    job.pull()
    for step in range(STEPS):
        head = None if job.rank == 0 and step == 2 else int(job.rank == 1 and step % 3 == 1)
        model.loss(job.rank, step, head).backward()  # type: ignore[no-untyped-call]
        optimizer.step(samples=1 + 2 * job.rank)
        optimizer.zero_grad()
    return named(model)


def skipped_steps(job: Job) -> Named:
    """GradScaler leaves out a step of worker 1, which makes it later."""
    model = Heads()
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=1e-2), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    job.pull()
    for step in [0, 1, *([math.inf] if job.rank else []), *range(2, STEPS)]:
        factor, batch = (step, 0) if step == math.inf else (1.0, int(step))
        loss = model.loss(job.rank, batch, int(step == 3))
        scaler.scale(loss * factor).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 2.0 ** (9 if job.rank else 10)
    return named(model)


def accumulated_gradients(job: Job) -> Named:
    """Each step has the gradients of three batches."""
    model = Heads()
    momentum = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = job.optimizer(momentum, model)
    job.pull()
    for step in range(STEPS):
        for part in range(3):
            loss = model.loss(job.rank, 3 * step + part, part % 2)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(samples=3 - job.rank)
        optimizer.zero_grad()
    return named(model)


def half_precision(job: Job) -> Named:
    model = Heads().to(torch.bfloat16)
    momentum = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    optimizer = job.optimizer(momentum, model)
    job.pull()
    for step in range(STEPS):
        model.loss(job.rank, step, step % 2).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return named(model)


def schedules(job: Job) -> Named:
    """Learning rates of two groups change; half of the model is frozen for some steps."""
    model = Heads()
    groups = [
        {"params": model.common.parameters(), "lr": 0.1},
        {"params": model.heads.parameters()},
    ]
    adam = torch.optim.Adam(groups, lr=1e-2)
    optimizer = job.optimizer(adam, model)
    scheduler = torch.optim.lr_scheduler.StepLR(adam, step_size=2, gamma=0.5)
    job.pull()
    for step in range(STEPS):
        model.common.requires_grad_(step not in (1, 2))
        model.loss(job.rank, step, step % 2).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return named(model)


@pytest.mark.parametrize(
    "train",
    [absent_gradients, skipped_steps, accumulated_gradients, half_precision, schedules],
)
def test_a_script_gets_the_weights_of_sync(
    cluster: Callable[..., Cluster], train: Callable[[Job], Named]
) -> None:
    initial = named(Heads())

    found = run(cluster, "allreduce", train)
    expected = run(cluster, "sync", train)[0]

    for each in found:
        assert_close(each, expected, 1e-5)
    assert all(not torch.equal(expected[name], value) for name, value in initial.items())


@pytest.mark.parametrize(
    "policies",
    [("allreduce", "allreduce"), ("allreduce", "sync"), ("sync", "allreduce")],
    ids="-then-".join,
)
def test_a_resumed_job_continues_with_the_optimizer_state(
    cluster: Callable[..., Cluster], tmp_path: Path, policies: tuple[str, str]
) -> None:
    """The upload at the end of a run is in the snapshot, and a worker reads it."""

    def two_runs(folder: str, *policies: str) -> Named:
        found: list[Named] = []
        for policy, epochs in zip(policies, (2, 4), strict=True):
            servers = cluster(
                shards=2,
                policy=policy,
                min_workers=2,
                data_dir=tmp_path / folder,
                snapshot_every=SnapshotEvery(steps=3),
            )
            found = real(servers.address, 2, script(OPTIMIZERS["nadam"], epochs))
            servers.close()
        return found[0]

    assert_close(two_runs("one", *policies), two_runs("other", "sync", "sync"), 1e-5)


def test_a_worker_that_comes_later_gets_weights_and_state(
    cluster: Callable[..., Cluster],
) -> None:
    """It takes part in later updates, and both end with the same weights."""
    servers = cluster(policy="allreduce", min_workers=1)
    has_stepped, has_come = threading.Event(), threading.Event()
    versions: list[int] = []

    def run_worker(rank: int) -> Named:
        with Job(connected(servers.address, rank), rank, torch.device("cpu")) as job:
            model = net()
            optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=1e-3), model)
            if rank == 1:
                has_come.set()
                versions.append(job.version)
            for steps, (x, y) in enumerate(job.batches(data(), 8, 3, seed=5, reseed=False)):
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                if rank == 0 and steps == 4:
                    has_stepped.set()
            job.barrier()
            job.pull()
            return named(model)

    def second() -> Named:
        assert has_stepped.wait(20)
        return run_worker(1)

    one, other = together(partial(run_worker, 0), second)

    assert versions[0] >= 4
    assert_close(one, other, 0.0)


def test_a_saved_file_and_observers_have_the_newest_weights(
    cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    servers = cluster(shards=2, policy="allreduce")
    file = tmp_path / "model.safetensors"

    with Job(connected(servers.address, 0), 0, torch.device("cpu")) as job:
        model = net()
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        x, y = data()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        job.save(file)
        expected = {name: value.clone() for name, value in model.state_dict().items()}

    assert_close(load_file(file), expected, 0.0)
    with Client(servers.address, observe=True) as observer:
        found = {name: torch.from_numpy(value) for name, value in observer.pull().items()}
    assert_close(found, expected, 0.0)


@pytest.mark.parametrize(
    "arguments", [{"overlap": True}, {"pipeline": True}, {"name": "d"}], ids=str
)
def test_arguments_of_the_optimizer_are_refused(
    cluster: Callable[..., Cluster], arguments: dict[str, Any]
) -> None:
    servers = cluster(policy="allreduce")
    model = net()

    with (
        Job(connected(servers.address, 0), 0, torch.device("cpu")) as job,
        pytest.raises(InvalidRequestError, match="Try"),
    ):
        job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **arguments)


def test_the_numpy_client_is_refused(cluster: Callable[..., Cluster]) -> None:
    servers = cluster(policy="allreduce")

    with connected(servers.address, 0) as client:
        client.register({"w": np.ones(3, np.float32)}, OptimizerSpec("sgd"))
        with pytest.raises(InvalidRequestError, match="needs the torch optimizer"):
            client.push({"w": np.ones(3, np.float32)})


FILES = TlsFiles(Path("ca.pem"), Path("cert.pem"), Path("key.pem"))


@pytest.mark.parametrize(
    "security", [SecuritySettings(tls=FILES), SecuritySettings(token_file=Path("tokens"))], ids=str
)
def test_tls_and_tokens_are_refused(security: SecuritySettings) -> None:
    """gloo has neither."""
    with pytest.raises(InvalidRequestError, match=r"in plain text\. Try: policy sync"):
        ServerConfig(policy="allreduce", security=security)


@pytest.mark.parametrize("shard", [0, 1])
def test_a_standby_is_refused(cluster: Callable[..., Cluster], shard: int) -> None:
    """With this policy by its own settings, with another one by those of the job."""
    server = cluster(2, policy="allreduce").servers[shard]

    with pytest.raises(InvalidRequestError, match="excludes `--standby-of"):
        RunningStandby(server)
    until(lambda: shard == 0 or server.identity.policy, "the job's policy")
    with RunningStandby(server, policy="sync") as following:
        until(lambda: following.ended, "its end")
        failure = following.standby.failure
    assert isinstance(failure, MismatchError)
    assert "allreduce" in str(failure)
