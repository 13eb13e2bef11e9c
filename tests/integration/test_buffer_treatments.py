"""Buffers and frozen parameters of momentum encoders: as with DistributedDataParallel, in saved
files, in a resumed run, and after a rejoin.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import psworker
from pscommon.core.errors import FencedError, MismatchError
from psworker import Job, OptimizerSpec
from tests.support.cluster import Cluster
from tests.support.fork_server import CONTEXT
from tests.support.lanes import each_lane
from tests.support.self_supervised import (
    WORKERS,
    Byol,
    Moco,
    follow,
    make_sgd,
    train,
    train_with_gloo,
)
from tests.support.torch_scripts import Named, copy_state
from tests.support.training_threads import real
from tests.support.workers import connected, together, weights_of

Make = Callable[..., Cluster]
KINDS = (Moco, Byol)


@pytest.fixture(scope="module")
def states_of_ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Named]:
    """Return the state of rank 0 after the training of each kind of model over gloo."""
    folder: Path = tmp_path_factory.mktemp("gloo")
    torch.multiprocessing.start_processes(
        train_with_gloo, (KINDS, folder), WORKERS, start_method=CONTEXT.get_start_method()
    )
    return {kind.__name__: torch.load(folder / kind.__name__, weights_only=True) for kind in KINDS}


@pytest.mark.every(3)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_queues_and_momentum_encoders_equal_those_of_ddp(
    cluster: Make,
    states_of_ddp: dict[str, Named],
    kind: type[Any],
    overlap: bool,
    tmp_path: Path,
) -> None:
    expected = states_of_ddp[kind.__name__]

    def worker(job: Job) -> Named:
        model = kind()
        optimizer = job.optimizer(make_sgd(model), model, buffers=kind.treatments, overlap=overlap)
        train(model, model, optimizer, job.rank)
        job.save(tmp_path / str(job.rank) / "model.safetensors")
        return copy_state(model)

    for rank in range(WORKERS):
        (tmp_path / str(rank)).mkdir()

    states = real(cluster(2, min_workers=WORKERS).address, WORKERS, worker)

    files = [load_file(tmp_path / str(rank) / "model.safetensors") for rank in range(WORKERS)]
    for state in (*states, *files):
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)
    if kind is Moco:
        assert torch.allclose(states[0]["queue"].norm(dim=0), torch.ones(()).double())


# ---- loaders: the end of a pass, another run, a new membership -----------------------------------

DATA = torch.randn(40, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def passes(job: Job, kind: type[Any], count: int, **how: Any) -> Any:
    """Train in passes over DATA; return the model."""
    model = kind()
    optimizer = job.optimizer(make_sgd(model), model, buffers=kind.treatments, **how)
    loader = job.batches(DATA, batch_size=4, shuffle=False)
    for _ in range(count):
        for x in loader:
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.end_step()
    return model


def plain(kind: type[Any], count: int) -> Any:
    model = kind()
    optimizer = make_sgd(model)
    for _ in range(count):
        for x in DATA.split(4):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.end_step()
    return model


def assert_same(state: Named, model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.every(2)
@each_lane
@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_pass_keeps_what_the_script_has_made_of_a_teacher(
    cluster: Make, lanes: Any, kind: type[Any], tmp_path: Path
) -> None:
    with Job(connected(cluster(2).address, lanes=lanes)) as job:
        model = passes(job, kind, 2)
        job.save(tmp_path / "model.safetensors")

    assert_same(copy_state(model), plain(kind, 2))
    assert_same(load_file(tmp_path / "model.safetensors"), plain(kind, 2))


def test_without_servers_a_teacher_is_saved_as_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PS_LOCAL", "1")
    with psworker.connect() as job:
        model = passes(job, Byol, 2)
        job.save(tmp_path / "model.safetensors")

    assert_same(copy_state(model), plain(Byol, 2))
    assert_same(load_file(tmp_path / "model.safetensors"), plain(Byol, 2))


def test_pipelined_steps_keep_a_teacher(cluster: Make, tmp_path: Path) -> None:
    with Job(connected(cluster(2, policy="async").address)) as job:
        model = passes(job, Byol, 2, pipeline=True)
        job.save(tmp_path / "model.safetensors")

    assert_same(load_file(tmp_path / "model.safetensors"), model)
    assert not torch.equal(model.teacher.weight, Byol().teacher.weight)


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("durability", ["snapshot", "log"])
def test_a_resumed_run_continues_with_the_momentum_encoder(
    cluster: Make, tmp_path: Path, durability: str, kind: type[Any]
) -> None:
    settings = {"data_dir": tmp_path, "durability": durability}
    first = cluster(2, **settings)
    with Job(connected(first.address)) as job:
        passes(job, kind, 1)
    first.stop()

    with Job(connected(cluster(3, **settings).address)) as job:
        model = passes(job, kind, 2)

    assert_same(copy_state(model), plain(kind, 2))


@pytest.mark.parametrize("how", [{}, {"overlap": True}, {"pipeline": True}])
def test_servers_have_a_teacher_that_was_moved_after_the_last_step(
    cluster: Make, how: dict[str, bool]
) -> None:
    """Also without a loader, whose passes end before the script closes the job."""
    servers = cluster(2, policy="async")
    with Job(connected(servers.address)) as job:
        model = Byol()
        optimizer = job.optimizer(make_sgd(model), model, buffers=Byol.treatments, **how)
        train(model, model, optimizer, rank=0)

    found = weights_of(servers.address)
    for name, value in model.state_dict().items():
        if name.startswith("teacher."):
            np.testing.assert_array_equal(found[name], value.numpy())


def test_a_worker_that_is_asked_to_leave_stores_its_teacher(cluster: Make) -> None:
    servers, model = cluster(2), Byol()

    def train_until_drained() -> None:
        with Job(connected(servers.address)) as job:
            optimizer = job.optimizer(make_sgd(model), model, buffers=Byol.treatments)
            for number, x in enumerate(job.batches(DATA, batch_size=4, shuffle=False)):
                model(x).backward()
                optimizer.step()
                optimizer.zero_grad()
                model.end_step()
                if number == 3:
                    job.client.drain()

    with pytest.raises(psworker.Stopping):
        train_until_drained()

    found = weights_of(servers.address)
    np.testing.assert_array_equal(found["teacher.weight"], model.teacher.weight.numpy())


def test_loaded_weights_that_the_job_does_not_have_bring_no_teacher(cluster: Make) -> None:
    servers = cluster(2)
    with Job(connected(servers.address)) as job:
        model = passes(job, Byol, 1)
        model.load_state_dict(Byol().state_dict())
    found, expected = weights_of(servers.address), plain(Byol, 1)
    np.testing.assert_allclose(found["teacher.weight"], expected.teacher.weight.numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_a_rejoined_worker_has_the_momentum_encoder(cluster: Make, kind: type[Any]) -> None:
    with Job(connected(cluster(2).address)) as job:
        model = passes(job, kind, 1)
        job.session.rejoin(FencedError("the lease ended"))

        assert_same(copy_state(model), plain(kind, 1))


def test_each_of_several_optimizers_has_its_own_treatments(cluster: Make) -> None:
    address = cluster(2).address
    with Job(connected(address)) as job:
        nets = {name: Byol() for name in ("a", "b")}
        optimizers = [
            job.optimizer(make_sgd(net), net, name=name, buffers={"teacher.w*": "first"})
            for name, net in nets.items()
        ]
        job.pull()
        for _ in range(3):
            for net, optimizer in zip(nets.values(), optimizers, strict=True):
                follow(net.teacher, net.student)
                net(DATA[:4]).backward()
                optimizer.step()
                optimizer.zero_grad()
        weights = weights_of(address)

        for name, net in nets.items():
            assert np.array_equal(weights[f"{name}.teacher.weight"], net.teacher.weight)
            assert not np.array_equal(weights[f"{name}.teacher.bias"], net.teacher.bias)


# ---- models of earlier releases, and workers that disagree ---------------------------------------


class Counted(nn.Module):
    """A weight and a buffer of the model that the array client registers."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
        self.register_buffer("seen", torch.zeros(2))


@pytest.mark.parametrize("durability", ["snapshot", "log"])
def test_a_job_without_treatments_goes_on_averaging(
    cluster: Make, tmp_path: Path, durability: str
) -> None:
    """Its data directory has no treatments, and a new worker would choose the first push."""
    settings = {"data_dir": tmp_path, "durability": durability}
    before = cluster(2, **settings)
    with connected(before.address) as client:
        client.register(
            {"w": np.zeros(2, np.float32)},
            OptimizerSpec("sgd", lr=1.0),
            buffers={"seen": np.zeros(2, np.float32)},
        )
        client.push({"w": np.zeros(2, np.float32), "seen": np.ones(2, np.float32)})
    before.stop()
    address = cluster(2, min_workers=2, **settings).address

    def worker(rank: int) -> list[float]:
        with Job(connected(address, rank), rank) as job:
            model = Counted()
            optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
            assert model.seen.tolist() == [1.0, 1.0]
            model.seen += 1 + 2 * rank
            model.w.sum().backward()
            optimizer.step()
            return list(model.seen.tolist())

    assert together(lambda: worker(0), lambda: worker(1)) == [[3.0, 3.0]] * 2


def test_two_treatments_of_one_tensor_are_a_mismatch(cluster: Make) -> None:
    address = cluster(1).address
    with Job(connected(address)) as job, Job(connected(address)) as other:
        for each, treatment in ((job, None), (other, {"seen": "average"})):
            model = Counted()
            plain_sgd = torch.optim.SGD(model.parameters(), lr=1.0)
            if each is job:
                each.optimizer(plain_sgd, model, buffers=treatment)
                continue
            with pytest.raises(
                MismatchError,
                match=r"seen: float32\[2\] buffer \(average\), the job has .*\(first\)",
            ):
                each.optimizer(plain_sgd, model, buffers=treatment)
