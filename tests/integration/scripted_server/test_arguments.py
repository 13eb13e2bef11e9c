"""A Client refuses invalid arguments at the call, with a remedy."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import OptimizerSettings
from psworker.client.client import Client
from psworker.client.local_client import LocalClient
from psworker.job import Job
from tests.support.fake_server import FakeCluster

SGD = OptimizerSettings("sgd", ({"lr": 0.5},))
ONES = {"w": np.ones(3, np.float32)}


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster() as cluster:
        yield cluster


@pytest.fixture
def client(cluster: FakeCluster) -> Iterator[Client]:
    with Client(cluster.addresses) as client:
        client.register(ONES, SGD)
        yield client


@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_an_invalid_optimizer_is_refused(cluster: FakeCluster, optimizer: Any) -> None:
    with (
        Client(cluster.addresses) as client,
        pytest.raises(InvalidRequestError, match=r"psworker\.OptimizerSpec"),
    ):
        client.register(ONES, optimizer)


def test_names_that_are_not_strings_are_refused(cluster: FakeCluster) -> None:
    with (
        Client(cluster.addresses) as client,
        pytest.raises(InvalidRequestError, match="a string, not 3"),
    ):
        client.register({3: np.ones(2, np.float32)}, SGD)  # type: ignore[dict-item]


class NoArray:
    """Like torch's tensors that require grad."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
        )


def test_a_value_that_numpy_cannot_convert_is_refused_with_its_name(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match=r"'w' cannot be converted.*tensor\.detach"):
        client.push({"w": NoArray()})  # type: ignore[dict-item]


@pytest.mark.parametrize("samples", [0, 1.5, True, None, "2", 2**63])
def test_samples_must_be_a_number(client: Client, samples: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"samples={samples!r} is not valid"):
        client.push(ONES, samples=samples)


@pytest.mark.parametrize(
    "given",
    [
        {"rank": -1},
        {"rank": 1.5},
        {"rank": 2**32},
        {"connect_timeout": 0},
        {"connect_timeout": float("nan")},
        {"connect_timeout": "5s"},
        {"wait_timeout": 0},
        {"wait_timeout": None},
    ],
)
def test_invalid_arguments_of_a_client_are_refused(
    cluster: FakeCluster, given: dict[str, Any]
) -> None:
    ((name, value),) = given.items()
    with pytest.raises(InvalidRequestError, match=f"{name}={value!r}"):
        Client(cluster.addresses, **given)
    assert not cluster.calls["Join"]


@pytest.mark.parametrize("name", ["PS_WORKER_RANK", "PS_WORKER_ATTEMPT"])
def test_an_environment_variable_without_a_number_is_refused(
    cluster: FakeCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PS_SERVERS", ",".join(cluster.addresses))
    monkeypatch.setenv(name, "x")
    with pytest.raises(InvalidRequestError, match=f"{name}="):
        Client()


@pytest.mark.parametrize("steps", [None, 0, 3])
def test_a_scheduler_that_depends_on_measurements_cannot_be_resumed(steps: int | None) -> None:
    """It is refused in a new job, too: the script would fail after a restart."""
    job, model = Job(LocalClient()), nn.Linear(2, 1)
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    with pytest.raises(InvalidRequestError, match=r"measured values.*state_dict\(\)"):
        job.resume(scheduler, steps)
