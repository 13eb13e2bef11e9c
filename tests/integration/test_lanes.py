"""Shared memory and gRPC transfer the same bytes: choice of lane, log lines, consistent
versions.
"""

import gc
import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.snapshot import weights_sha256
from psworker import Client, OptimizerSpec
from psworker.exchange.transfer import ScatteredBuffer
from tests.support.cluster import Cluster
from tests.support.events import records_of
from tests.support.lanes import each_lane, each_network_lane
from tests.support.workers import (
    connected,
    count,
    counted,
    counter,
    together,
    weights_of,
)

Make = Callable[..., Cluster]
Step = Callable[[Client, dict[str, Any]], object]

STEPS = 20
PARAMS: dict[str, Any] = {
    "w": np.ones((700, 500), np.float32),
    "bias": np.ones(301),
    "half": np.ones(77, np.float16),
}
BUFFERS: dict[str, Any] = {"mean": np.zeros(130, np.float32), "batches": np.zeros((), np.int64)}
FROZEN = {"mask": np.arange(900, dtype=np.int32)}
SHARED = "shared_memory_used shards="
TRAVEL = "shared_memory_unavailable reason="
NO_PATH = "the server has no Unix socket, and offers grpc"


@pytest.fixture
def lane_logs(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return what workers have logged about lanes."""
    caplog.set_level(logging.INFO, "psworker")
    keys = ("shared_memory_used", "shared_memory_unavailable")
    return lambda: [record.getMessage() for record in records_of(caplog, *keys)]


def half_shared(cluster: Make) -> Cluster:
    """Return two shards, of which only the first attaches memory."""
    made = cluster(0)
    made.add(0, 2, min_workers=2)
    made.add(1, 2, lanes="grpc")
    return made


def gradients(rank: int, step: int) -> dict[str, Any]:
    """Return the gradients of one worker; the half-precision one is absent at every third step, and
    always with the second worker.
    """
    draw = np.random.default_rng([rank, step])
    made: dict[str, Any] = {
        n: draw.standard_normal(a.shape).astype(a.dtype) for n, a in PARAMS.items()
    }
    made["mean"], made["batches"] = draw.random(130, np.float32), np.array(step, np.int64)
    if step % 3 == 0 or rank:
        del made["half"]
    return made


def by_name(client: Client, grads: dict[str, Any]) -> None:
    """Exchange Register's own buffers in one round trip."""
    client.push_pull(grads)


def in_two_calls(client: Client, grads: dict[str, Any]) -> None:
    client.push(grads)
    client.pull()


class OwnArrays:
    """Steps into arrays of the caller."""

    def __init__(self) -> None:
        self.out = {name: np.empty_like(array) for name, array in {**PARAMS, **BUFFERS}.items()}

    def __call__(self, client: Client, grads: dict[str, Any]) -> None:
        copies = {name: array.copy() for name, array in grads.items()}
        client.push_pull(grads, self.out)
        assert all(np.array_equal(grads[name], array) for name, array in copies.items())

    def check(self, client: Client) -> None:
        """Check the arrays, which are pulled again into new ones and into others' memory."""
        with pytest.raises(InvalidRequestError, match="went into `out`"):
            _ = client.weights
        newest, others = client.pull(), {name: array.view() for name, array in self.out.items()}
        assert client.pull(others) == others
        for name, array in self.out.items():
            assert np.array_equal(array, newest[name])


class ForeignBuffers:
    """Steps on memory that is not client.tapes()."""

    def __init__(self) -> None:
        self.weights = memoryview(bytearray())

    def __call__(self, client: Client, grads: dict[str, Any]) -> None:
        plan, spec = client.plan, client.plan.spec
        buffer = np.full(plan.nbytes, 255, np.uint8)
        for index, tensor in enumerate(spec.tensors):
            start, stop = plan.extent(index)
            if tensor.name in grads:
                buffer[start:stop] = np.frombuffer(grads[tensor.name].tobytes(), np.uint8)
        if not self.weights:
            self.weights = memoryview(bytearray(plan.nbytes))
        absent = [
            i for i, t in enumerate(spec.tensors) if t.role == "trainable" and t.name not in grads
        ]
        client.model.exchange(gradients=buffer.data, weights=self.weights, absent=absent)


def trained(address: str, step: Callable[[], Step], **options: Any) -> str:
    """Train two workers for STEPS steps of Adam; return a digest of the weights, equal
    everywhere.
    """

    def work(rank: int) -> str:
        with connected(address, rank, **options) as client:
            adam = OptimizerSpec("adam", lr=0.01, weight_decay=0.1)
            client.register(PARAMS, adam, buffers=BUFFERS, frozen=FROZEN)
            made = step()
            for number in range(STEPS):
                made(client, gradients(rank, number))
            if isinstance(made, OwnArrays):
                made.check(client)
            if isinstance(made, ForeignBuffers):
                assert not (np.frombuffer(made.weights, np.uint8) == 0).all()
            client.pull()
            return weights_sha256(client.weights)

    found = set(together(partial(work, 0), partial(work, 1)))
    assert found == {weights_sha256(weights_of(address))}
    return found.pop()


@pytest.fixture(scope="module")
def trained_over_grpc() -> str:
    """Return the digest of a training over gRPC."""
    cluster = Cluster(2, min_workers=2)
    try:
        return trained(cluster.address, lambda: by_name, lanes="grpc")
    finally:
        cluster.close()


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "step",
    [lambda: by_name, lambda: in_two_calls, OwnArrays, ForeignBuffers],
    ids=["push_pull", "push, pull", "own arrays", "foreign memory"],
)
def test_shared_memory_gives_the_same_weights(
    step: Callable[[], Step],
    trained_over_grpc: str,
    cluster: Make,
    lane_logs: Callable[[], list[str]],
) -> None:
    made = cluster(2, min_workers=2)

    assert trained(made.address, step) == trained_over_grpc
    assert lane_logs() == [f"{SHARED}[0, 1]"] * 2
    assert [server.engine.traffic.budget.used for server in made.servers] == [0, 0]


@pytest.mark.parametrize(
    "step",
    [lambda: by_name, OwnArrays, ForeignBuffers],
    ids=["push_pull", "own arrays", "foreign memory"],
)
def test_half_of_the_shards_may_use_shared_memory(
    step: Callable[[], Step],
    trained_over_grpc: str,
    cluster: Make,
    lane_logs: Callable[[], list[str]],
) -> None:
    made = half_shared(cluster)

    assert trained(made.address, step) == trained_over_grpc
    assert [line.startswith(f"{SHARED}[0]") for line in lane_logs()] == [True, True]
    assert all(f"shard 1: {NO_PATH}" in line for line in lane_logs())


@each_network_lane
def test_arrays_of_the_caller_give_the_same_weights(
    lanes: str, trained_over_grpc: str, cluster: Make
) -> None:
    made = cluster(2, min_workers=2)

    assert trained(made.address, OwnArrays, lanes=lanes) == trained_over_grpc


@each_lane
def test_weights_may_replace_the_gradients(lanes: str, cluster: Make) -> None:
    start = {"w": np.zeros(50_000, np.float32)}
    with connected(cluster(2).address, lanes=lanes) as client:
        client.register(start, OptimizerSpec("sgd", lr=1.0))
        both = {"w": np.ones(50_000, np.float32)}
        for expected in (-1.0, 0.0, 0.0):  # the weights of a step are the next one's gradients
            client.push_pull(both, both)
            assert both["w"].tolist() == [expected] * 50_000


@each_network_lane
def test_only_large_contiguous_arrays_are_used_in_place(
    lanes: str, cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are copied."""
    places, made = [], ScatteredBuffer.__init__

    def recorded(self: ScatteredBuffer, flat: memoryview, parts: dict[int, memoryview]) -> None:
        places.append(len(parts))
        made(self, flat, parts)

    monkeypatch.setattr(ScatteredBuffer, "__init__", recorded)
    shapes = {"a": (300, 200), "b": (200, 300), "c": (5,)}
    ones = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    out = {name: np.empty(shape, np.float32) for name, shape in shapes.items()}
    ones["b"], out["b"] = np.ones((300, 200), np.float32).T, np.empty((300, 200), np.float32).T
    with connected(cluster(2).address, lanes=lanes) as client:
        client.register({n: array * 0 for n, array in ones.items()}, OptimizerSpec("sgd", lr=1.0))
        client.push_pull(ones, out)
        client.pull(out)

    assert places == [1, 1, 1]
    assert all((array == -1).all() for array in out.values())


@each_lane
def test_arrays_of_the_caller_are_released(lanes: str, cluster: Make) -> None:
    with connected(cluster(1).address, lanes=lanes) as client:
        client.register({"w": np.zeros(50_000, np.float32)}, OptimizerSpec("sgd", lr=1.0))
        grads, out = (np.ones(50_000, np.float32) for _ in range(2))
        client.push_pull({"w": grads}, {"w": out})
        references = [weakref.ref(grads), weakref.ref(out)]
        del grads, out
        gc.collect()

        assert [each() for each in references] == [None, None]


# ---- choice of the lane --------------------------------------------------------------------------


def test_a_refusing_server_is_reached_over_grpc_with_one_log_line(
    cluster: Make, lane_logs: Callable[[], list[str]]
) -> None:
    made = cluster(2, lanes="grpc")
    with counter(made.address) as client:
        count(client, 3)

        assert counted(client.pull()) == 3
    assert lane_logs() == [f"{TRAVEL}shard 0: {NO_PATH}"]


def test_a_worker_set_to_grpc_offers_no_memory(
    cluster: Make, lane_logs: Callable[[], list[str]]
) -> None:
    made = cluster(2)
    with counter(made.address, lanes="grpc") as client:
        count(client)

        assert counted(client.pull()) == 1
    assert lane_logs() == []


@pytest.mark.parametrize("half", [False, True])
def test_refused_mandatory_shared_memory_is_an_error(half: bool, cluster: Make) -> None:
    """The message names each shard that refused."""
    made = half_shared(cluster) if half else cluster(2, lanes="grpc")
    names = ["shard 1"] if half else ["shard 0", "shard 1"]
    expected = "; ".join(f"{name}: {NO_PATH}" for name in names)
    with connected(made.address, lanes="shm") as client:
        for _ in range(2):
            with pytest.raises(
                InvalidRequestError, match="`--lanes shm` is not possible: "
            ) as caught:
                client.register({"w": np.ones(9)}, OptimizerSpec("sgd", lr=1.0))
            assert f"possible: {expected}. Try: " in str(caught.value)


def test_available_mandatory_shared_memory_is_used(
    cluster: Make, lane_logs: Callable[[], list[str]]
) -> None:
    with counter(cluster(2).address, lanes="shm") as client:
        count(client)

        assert counted(client.pull()) == 1
    assert lane_logs() == [f"{SHARED}[0, 1]"]


def test_the_environment_sets_the_lane(
    cluster: Make, lane_logs: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PS_LANES", "grpc")
    with counter(cluster().address):
        assert lane_logs() == []
    monkeypatch.setenv("PS_LANES", "fast")
    with pytest.raises(InvalidRequestError, match="lanes 'fast' is not valid"):
        counter(cluster().address)


def test_gradients_are_not_modified(cluster: Make) -> None:
    """The servers apply them in place, and must not write to them."""
    sgd = OptimizerSpec("sgd", lr=0.5, momentum=0.9, weight_decay=0.1, maximize=True)
    for spec in (
        sgd,
        OptimizerSpec("adam", lr=0.5, weight_decay=0.1),
        OptimizerSpec("rmsprop", lr=0.5),
    ):
        with connected(cluster(2).address, lanes="shm") as client:
            client.register({"w": np.ones(1000, np.float32)}, spec)
            buffer, weights = client.model.flat_buffers()
            np.frombuffer(buffer, np.float32)[:1000] = np.arange(1000)
            before = bytes(buffer)
            client.model.exchange(gradients=buffer, weights=weights)

            assert bytes(buffer) == before


# ---- consistent versions -------------------------------------------------------------------------


def test_no_reader_sees_a_half_applied_version(cluster: Make) -> None:
    """One worker pushes the same number to all elements; on each shard all pulled elements are
    equal.
    """
    size, pushes = 1_000_000, 60
    made = cluster(2, policy="async")
    start = {"w": np.zeros(size, np.float32)}

    def push(client: Client) -> set[float]:
        return {client.push({"w": np.ones(size, np.float32)}).version for _ in range(pushes)}

    def compare(client: Client) -> set[float]:
        seen: set[float] = set()
        while -pushes not in seen:
            weights = client.pull()["w"]
            for versions in np.split(weights, [border]):
                assert versions.min() == versions.max()
            seen.add(float(weights[0]))
        return seen

    with (
        connected(made.address, lanes="shm") as first,
        connected(made.address, lanes="shm") as second,
    ):
        for client in (first, second):
            client.register(start, OptimizerSpec("sgd", lr=1.0))
        border = first.plan.range(0, "trainable").nbytes // 4
        _, seen = together(lambda: push(first), lambda: compare(second))
    assert len(seen) > 3, "the reader came too late to see anything"


def test_non_finite_initial_values_are_accepted_in_buffers_only(cluster: Make) -> None:
    """An attention mask of -inf is accepted over either lane."""
    mask = np.array([0, -np.inf, 1], np.float32)
    for lanes in ("grpc", "stream", "shm"):
        with connected(cluster().address, lanes=lanes) as client:
            client.register({"w": np.ones(9)}, OptimizerSpec("sgd", lr=1.0), buffers={"mask": mask})

            assert np.array_equal(client.pull()["mask"], mask)
