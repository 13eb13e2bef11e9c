"""The Client against servers in memory: values, results, arguments of pushes and pulls."""

# ruff: noqa: F811 (fixtures are imported)

import threading
from typing import Any

import numpy as np
import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.core.log_entries import BatchKey
from psproto.v1 import parameter_server_pb2 as ps
from psworker.client.client import Client
from tests.support.fake_clients import SGD, client, cluster, gradient, pair, params  # noqa: F401
from tests.support.fake_server import FakeCluster


def test_one_address_is_sufficient_and_pull_returns_the_registered_values(
    client: Client, cluster: FakeCluster
) -> None:
    assert list(client.addresses) == cluster.addresses
    assert (client.job, client.worker, client.policy, client.version) == ("job-1", 1, "sync", 0)
    assert client.groups_json == '[{"lr": 0.5}]'

    pulled = client.pull()

    assert {name: array.tolist() for name, array in pulled.items()} == {
        n: a.tolist() for n, a in params().items()
    }


def test_pull_returns_the_pushed_update(client: Client, cluster: FakeCluster) -> None:
    result = client.push(gradient())

    assert (result.status, result.version, result.staleness, result.reason) == ("applied", 1, 0, "")
    assert client.version == 0
    assert (cluster.tensor("w") == 0).all()
    assert (client.pull()["w"] == 0).all()
    assert client.version == 1


def test_push_pull_fills_in_place(client: Client) -> None:
    out = client.pull()
    same = out["b"]

    result = client.push_pull(gradient(), out=out)

    assert (result.status, result.version) == ("applied", 1)
    assert out["b"] is same
    assert (same == 0).all()
    assert (out["w"] == 0).all()
    assert client.version == 1


def test_push_pull_without_out_leaves_them_in_weights(client: Client) -> None:
    client.push_pull(gradient())

    assert (client.weights["w"] == 0).all()


def test_seconds_show_the_phases_of_an_exchange(client: Client) -> None:
    seconds = client.push_pull(gradient()).seconds

    assert set(seconds) == {"push", "wait", "apply", "pull"}
    assert (seconds["wait"], seconds["apply"]) == (0.5, 0.25)
    assert seconds["push"] >= 0
    assert seconds["pull"] >= 0


def test_base_is_the_version_pulled_last(client: Client, cluster: FakeCluster) -> None:
    stale = [client.push(gradient()).staleness for _ in range(3)]
    client.pull()

    assert stale == [0, 1, 2]
    assert client.push(gradient()).staleness == 0
    assert {header.samples for header in cluster.received if header.seq} == {1}


def test_pull_is_at_least_as_new_as_the_last_push(client: Client, cluster: FakeCluster) -> None:
    client.push(gradient())
    client.pull()

    assert {header.min_version for header in cluster.received[-cluster.shards :]} == {1}


def test_tensors_without_gradient_do_not_change_and_are_not_sent(
    client: Client, cluster: FakeCluster
) -> None:
    result = client.push({"w": None, "b": np.full(7, 2, np.float32)}, samples=5)  # type: ignore[dict-item]

    assert result.status == "applied"
    assert (cluster.tensor("w") == 1).all()
    assert (cluster.tensor("b") == 0).all()
    assert {tuple(header.absent) for header in cluster.received if header.seq} == {(0,)}
    assert {header.samples for header in cluster.received if header.seq} == {5}


def test_buffers_travel_by_value_and_frozen_tensors_never_change(cluster: FakeCluster) -> None:
    mean, mask = np.arange(40, dtype=np.float32), np.array([1, 0, 1], np.int64)
    with Client(cluster.addresses) as client:
        client.register(params(), SGD, buffers={"mean": mean}, frozen={"mask": mask})
        client.push_pull(gradient())
        assert (client.weights["mean"] == mean).all()
        client.push_pull({**gradient(), "mean": mean * 2})
        first = client.pull()
        client.push_pull(gradient())
        second = client.pull()

        assert (first["mean"] == mean * 2).all()
        assert (second["mean"] == mean * 2).all()
        assert (second["mask"] == mask).all()
        assert second["mask"].dtype == np.int64
        with pytest.raises(InvalidRequestError, match="frozen"):
            client.push({"mask": mask})


def test_several_frames_stay_below_the_message_limit(pair: FakeCluster) -> None:
    values = np.arange(6 << 20, dtype=np.float32)
    with Client(pair.addresses) as client:
        client.register({"w": values}, SGD)
        client.push_pull({"w": values})

        assert (client.weights["w"] == values / 2).all()


@pytest.mark.parametrize(
    ("grads", "reason", "words"),
    [
        ({"v": np.zeros(1, np.float32)}, "UNKNOWN_TENSOR", "no tensor 'v'"),
        ({"b": np.zeros(8, np.float32)}, "WRONG_SHAPE", r"'b' has shape \(7,\), not \(8,\)"),
        ({"b": np.zeros(7, np.float64)}, "WRONG_DTYPE", "'b' is float32, not float64"),
        ({"b": [1, 2]}, "WRONG_DTYPE", "'b' is float32"),
    ],
)
def test_an_invalid_gradient_is_refused_before_anything_is_sent(
    client: Client, cluster: FakeCluster, grads: Any, reason: str, words: str
) -> None:
    before = len(cluster.received)
    with pytest.raises(InvalidRequestError, match=words) as caught:
        client.push({**gradient(), **grads})

    assert caught.value.reason == reason
    assert len(cluster.received) == before
    assert client.push(gradient()).status == "applied"
    assert (cluster.tensor("b") == 0).all()


@pytest.mark.parametrize("name", ["unknown", "shape", "dtype", "readonly"])
def test_an_invalid_out_argument_is_refused_before_anything_is_sent(
    client: Client, cluster: FakeCluster, name: str
) -> None:
    array = np.zeros(8 if name == "shape" else 7, np.float64 if name == "dtype" else np.float32)
    array.flags.writeable = name != "readonly"
    before = len(cluster.received)
    with pytest.raises(InvalidRequestError):
        client.push_pull(gradient(), out={"x" if name == "unknown" else "b": array})
    with pytest.raises(InvalidRequestError):
        client.pull(out={"x" if name == "unknown" else "b": array})

    assert len(cluster.received) == before


def test_out_may_have_some_of_the_tensors(client: Client) -> None:
    out = {"b": np.zeros(7, np.float32)}

    assert client.pull(out=out).keys() == {"b"}
    assert (out["b"] == 1).all()


def test_samples_below_one_are_refused(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="samples"):
        client.push(gradient(), samples=0)


def test_nan_is_rejected_with_worker_and_tensor(client: Client, cluster: FakeCluster) -> None:
    bad = gradient()
    bad["w"][3, 4] = np.nan

    result = client.push_pull(bad)

    assert (result.status, result.reason) == ("rejected", "NON_FINITE: worker 1: tensor w")
    assert cluster.version == 0
    assert client.push(gradient()).status == "applied"


def test_flat_buffers_are_exchanged_directly(cluster: FakeCluster) -> None:
    from psworker.client.arrays import spec_of

    with Client(cluster.addresses) as client:
        plan = client.model.agree(spec_of(params(), {}, {}, SGD))
        weights = np.full(plan.nbytes, 0, np.uint8)
        client.model.start(weights.data)
        gradients = np.ones(plan.nbytes // 4, np.float32)
        result = client.model.exchange(
            gradients=gradients.view(np.uint8).data,
            weights=weights.data,
            batches=[BatchKey(0, 3), BatchKey(0, 4)],
            groups_json='[{"lr": 1.0}]',
            samples=64,
        )
        pulled = client.model.exchange(gradients=None, weights=weights.data)

        assert (result.status, pulled.status, pulled.version) == ("applied", "none", 1)
        assert weights.view(np.float32)[:3000].tolist() == [-0.5] * 3000
        header = next(header for header in cluster.received if header.seq == 1)
        assert [batch.number for batch in header.batches] == [3, 4]
        assert (header.groups_json, header.samples) == ('[{"lr": 1.0}]', 64)


def test_invalid_flat_buffers_are_refused(client: Client) -> None:
    buffer = bytearray(client.plan.nbytes)
    for gradients, weights, absent in (
        (None, None, ()),
        (memoryview(buffer)[1:], None, ()),
        (None, memoryview(bytes(buffer)), ()),
        (memoryview(buffer), None, (99,)),
    ):
        with pytest.raises(InvalidRequestError):
            client.model.exchange(gradients=gradients, weights=weights, absent=absent)


def test_weights_missing_from_an_answer_are_requested(client: Client, cluster: FakeCluster) -> None:
    def without_weights(header: ps.PushPullHeader, result: ps.ExchangeResult) -> Any:
        server._with_weights = original  # type: ignore[method-assign]
        return ps.ExchangeResult(
            outcome=ps.OUTCOME_STALE, version=1, reason="STALE", detail="too old"
        ), []

    server = cluster.servers[-1]
    original = server._with_weights
    server._with_weights = without_weights  # type: ignore[method-assign]

    result = client.push_pull(gradient())

    assert (result.status, result.reason) == ("stale", "STALE: too old")
    assert (client.weights["w"] == 0).all()


def test_several_threads_may_call(client: Client, cluster: FakeCluster) -> None:
    threads = [threading.Thread(target=client.push_pull, args=(gradient(0.0),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)

    assert cluster.version == 8
    assert [seq for _, seq in cluster.counted] == list(range(1, 9))
