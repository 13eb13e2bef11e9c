"""Registration of a model by the Client, against servers in memory."""

# ruff: noqa: F811 (fixtures are imported)

import threading
from typing import Any

import numpy as np
import pytest

from pscommon.core.errors import InvalidRequestError, MismatchError
from pscommon.core.model_spec import OptimizerSettings
from psworker.client.client import Client
from tests.support.fake_clients import SGD, client, cluster, gradient, pair, params  # noqa: F401
from tests.support.fake_server import FakeCluster


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4"])
def test_any_numpy_float_is_accepted(pair: FakeCluster, dtype: str) -> None:
    values = np.linspace(-1, 1, 500).astype(dtype)
    with Client(pair.addresses) as client:
        client.register({"w": values}, SGD)

        assert client.pull()["w"].astype("f8").tolist() == values.astype("f8").tolist()


def test_odd_shapes_are_accepted(pair: FakeCluster) -> None:
    given = {
        "scalar": np.array(3.0),
        "empty": np.zeros((0, 4)),
        "transposed": np.arange(6.0).reshape(2, 3).T,
    }
    with Client(pair.addresses) as client:
        client.register(given, SGD)
        pulled = client.pull()

    assert {name: array.tolist() for name, array in pulled.items()} == {
        n: a.tolist() for n, a in given.items()
    }


def test_more_shards_than_blocks_are_allowed() -> None:
    with FakeCluster(shards=4) as cluster, Client(cluster.addresses) as client:
        client.register({"w": np.ones(3, np.float32)}, SGD)
        result = client.push_pull({"w": np.ones(3, np.float32)})

        assert result.status == "applied"
        assert client.weights["w"].tolist() == [0.5] * 3


def test_the_second_worker_gets_the_weights_of_the_first(
    client: Client, cluster: FakeCluster
) -> None:
    with Client(cluster.addresses) as second:
        second.register(params(fill=9.0), SGD)

        assert second.worker == 2
        assert (second.pull()["w"] == 1).all()


def test_the_order_of_tensors_is_that_of_the_job(client: Client, cluster: FakeCluster) -> None:
    with Client(cluster.addresses) as second:
        second.register(dict(reversed(params().items())), SGD)

        assert second.plan == client.plan
        assert second.push_pull(gradient()).status == "applied"
        assert (cluster.tensor("b") == 0).all()


def test_the_second_worker_waits_for_the_upload(pair: FakeCluster) -> None:
    first, second = Client(pair.addresses), Client(pair.addresses)
    spec_known = threading.Event()
    pair.before[0].append(lambda: spec_known.wait(20) and None)  # delays the upload
    values: list[Any] = []

    def follow() -> None:
        pair.wait_until(lambda: pair.plan is not None)
        second.register(params(fill=9.0), SGD)
        values.append(second.pull()["w"])

    thread = threading.Thread(target=follow)
    thread.start()
    leader = threading.Thread(target=first.register, args=(params(), SGD))
    leader.start()
    pair.wait_until(lambda: pair.calls["Register"] > 3)
    assert not values
    spec_known.set()
    thread.join(20)
    leader.join(20)
    first.close()
    second.close()

    assert (values[0] == 1).all()


def test_another_model_is_refused_with_the_difference(client: Client, cluster: FakeCluster) -> None:
    other = {
        "w": np.zeros((100, 31), np.float32),
        "b": np.zeros(7, np.float32),
        "extra": np.zeros(1, np.float32),
    }
    with Client(cluster.addresses) as second, pytest.raises(MismatchError) as caught:
        second.register(other, OptimizerSettings("adam", ({"lr": 0.5},)))

    assert caught.value.reason == "MODEL_MISMATCH"
    for words in (
        "extra: not in",
        "w: float32[100, 31]",
        "float32[100, 30]",
        "optimizer: adam, the job has sgd",
    ):
        assert words in str(caught.value)


def test_another_placement_is_refused(pair: FakeCluster) -> None:
    pair.digest = "0123"
    with (
        Client(pair.addresses) as client,
        pytest.raises(MismatchError, match="another partition of the model"),
    ):
        client.register(params(), SGD)


def test_invalid_models_cannot_be_registered(pair: FakeCluster) -> None:
    with Client(pair.addresses) as client:
        for bad in ({"w": np.zeros(3, np.int32)}, {"w": np.zeros(3, np.complex64)}, {}):
            with pytest.raises(InvalidRequestError):
                client.register(bad, SGD)
        with pytest.raises(InvalidRequestError, match="listed twice"):
            client.model.agree(_with_two_equal_names())
        for call in (
            client.pull,
            lambda: client.push({}),
            lambda: client.plan,
            lambda: client.weights,
        ):
            with pytest.raises(InvalidRequestError, match="no model is registered"):
                call()


def _with_two_equal_names() -> Any:
    from psworker.client.arrays import spec_of

    return spec_of({"w": np.zeros(1)}, {"w": np.zeros(1)}, {}, SGD)
