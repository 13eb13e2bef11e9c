"""A push sent in pieces (ModelExchange.begin) ends like one sent at once, over either lane."""

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pscommon.core.errors import FencedError, InvalidRequestError
from pscommon.core.partition import PIECE_COUNT
from pscommon.wire.requests import LEAVE
from psproto.v1 import coordinator_pb2 as co
from psserver.parameters import weight_reads as reading
from psworker import Client, OptimizerSpec
from psworker.core.results import PushResult
from psworker.exchange.open_push import OpenPush
from psworker.exchange.shard_pieces import ShardDownload
from tests.support.cluster import Cluster
from tests.support.lanes import each_lane
from tests.support.workers import connected, count, counted, counter, until, weights_of

Make = Callable[..., Cluster]

PARAMS: dict[str, Any] = {
    "w": np.ones((900, 401), np.float32),
    "bias": np.ones(301),
    "half": np.ones(77, np.float16),
}
BUFFERS: dict[str, Any] = {"mean": np.zeros(130, np.float32)}
STEPS = 12


def registered(address: str, **options: Any) -> Client:
    client = connected(address, **options)
    client.register(PARAMS, OptimizerSpec("adam", lr=0.01), buffers=BUFFERS)
    return client


@dataclass
class RandomPush:
    """A step's gradient as a random flat buffer, and how it is sent."""

    buffer: np.ndarray[Any, np.dtype[np.uint8]]
    absent: list[int]
    pieces: list[tuple[int, int]]
    samples: int


def draw(client: Client, step: int) -> RandomPush:
    """Return pieces in any order: some twice, never, over borders, or empty."""
    random, plan = np.random.default_rng(step), client.plan
    buffer = np.zeros(plan.nbytes, np.uint8)
    for index, tensor in enumerate(plan.spec.tensors):
        start, stop = plan.extent(index)
        values = random.standard_normal(tensor.size).astype(tensor.dtype)
        buffer[start:stop] = values.view(np.uint8)
    trainable = [i for i, tensor in enumerate(plan.spec.tensors) if tensor.role == "trainable"]
    absent = [i for i in trainable if random.random() < 0.3]
    if step == 0:  # only buffers
        absent = trainable
    ends = random.integers(0, plan.nbytes + 1, (int(random.integers(0, 12)), 2))
    return RandomPush(buffer, absent, [(min(a, b), max(a, b)) for a, b in ends.tolist()], step + 1)


def send_in_pieces(client: Client, step: RandomPush) -> PushResult:
    """Send invalid bytes in each piece first, and the right ones later."""
    buffer, weights = (np.frombuffer(memory, np.uint8) for memory in client.model.flat_buffers())
    buffer[:] = 1
    flow = client.model.begin()
    assert isinstance(flow, OpenPush)
    for start, stop in step.pieces:
        flow.send(start, stop)
    buffer[:] = step.buffer
    for start, stop in step.pieces:
        flow.send(start, stop)
    result = flow.finish(absent=step.absent, samples=step.samples)
    for start, stop in step.pieces:
        flow.wait(start, stop)
    flow.wait(0, weights.nbytes)
    flow.close()
    return result


def outcome(result: PushResult) -> tuple[Any, ...]:
    return result.status, result.version, result.staleness, result.reason


@pytest.mark.every(4)
@each_lane
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_pieces_in_any_order_form_the_same_push(shards: int, lanes: Any, cluster: Make) -> None:
    """After every step on the worker, and at the end on the servers, bit for bit."""
    addresses = [cluster(shards).address for _ in range(2)]
    with (
        registered(addresses[0], lanes="grpc") as plain,
        registered(addresses[1], lanes=lanes) as pieces,
    ):
        for number in range(STEPS):
            step = draw(plain, number)
            expected, weights = bytearray(step.buffer), plain.model.flat_buffers()[1]
            result = plain.model.exchange(
                gradients=memoryview(expected),
                weights=weights,
                absent=step.absent,
                samples=step.samples,
            )

            assert outcome(send_in_pieces(pieces, step)) == outcome(result)
            assert bytes(pieces.model.flat_buffers()[1]) == bytes(weights), f"step {number}"
            assert (pieces.version, plain.version) == (number + 1, number + 1)
        found, wanted = weights_of(pieces.addresses[0]), weights_of(plain.addresses[0])
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_only_weights_used_on_arrival_come_in_small_pieces(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message has a cost."""
    frames: list[int] = []
    encode = reading.encode_data
    monkeypatch.setattr(reading, "encode_data", lambda *views: frames.append(0) or encode(*views))
    model, spec = {"w": np.zeros(1 << 20, np.float32)}, OptimizerSpec("sgd", lr=1.0)
    with connected(cluster().address, lanes="grpc") as client:
        client.register(model, spec)
        gradients, weights = client.model.flat_buffers()
        frames.clear()
        client.model.exchange(gradients=gradients, weights=weights)
        frame_count = len(frames)
        frames.clear()
        with closing(client.model.begin()) as flow:
            flow.send(0, 64)
            flow.finish()
            flow.wait(0, client.plan.nbytes)

    assert (frame_count, len(frames)) == (4, PIECE_COUNT)


def test_weights_over_a_stream_are_reported_in_pieces_of_at_most_1_mib(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script can use each piece while the next ones arrive."""
    reported: list[int] = []
    record = ShardDownload.record_bytes

    def record_bytes(download: ShardDownload, nbytes: int) -> None:
        reported.append(nbytes)
        record(download, nbytes)

    monkeypatch.setattr(ShardDownload, "record_bytes", record_bytes)
    model = {name: np.zeros(1_300_001, np.float32) for name in ("w", "x")}
    with connected(cluster().address, lanes="stream") as client:
        client.register(model, OptimizerSpec("sgd", lr=1.0))
        total = client.plan.nbytes
        with closing(client.model.begin()) as flow:
            flow.send(0, 64)
            flow.finish()
            flow.wait(0, total)

    assert reported[-1] == total
    pieces = [after - before for before, after in pairwise([0, *reported])]
    assert all(0 < nbytes <= 1 << 20 for nbytes in pieces)
    assert len(pieces) <= total / (1 << 20) + 1  # each report has a cost


def test_half_of_the_shards_may_use_shared_memory(cluster: Make) -> None:
    made = cluster(0)
    made.add(0, 2)
    made.add(1, 2, lanes="grpc")
    with registered(cluster(2).address, lanes="grpc") as plain, registered(made.address) as pieces:
        for number in range(4):
            step = draw(plain, number)
            send_in_pieces(pieces, step)
            plain.model.exchange(
                gradients=memoryview(bytearray(step.buffer)),
                weights=plain.model.flat_buffers()[1],
                absent=step.absent,
                samples=step.samples,
            )

            assert bytes(pieces.model.flat_buffers()[1]) == bytes(plain.model.flat_buffers()[1]), (
                f"step {number}"
            )


@each_lane
def test_an_abandoned_push_leaves_nothing(lanes: Any, cluster: Make) -> None:
    """Its number is not reused; the next one is sent in pieces again over the same lane, and
    counts.
    """
    made = cluster(2, policy="sync")
    with counter(made.address, lanes=lanes) as client:
        for _ in range(3):
            flow = client.model.begin()
            flow.send(0, client.plan.nbytes)
            flow.close()
            flow.close()
        np.frombuffer(client.model.flat_buffers()[0], np.float32)[:] = 1.0
        flow = client.model.begin()
        assert isinstance(flow, OpenPush)
        assert flow.finish().status == "applied"
        flow.close()

        assert flow._header.seq == 4
        assert all((part._header.memory != 0) is (lanes == "shm") for part in flow._exchanges)
        assert counted(client.pull()) == 1
        until(
            lambda: all(server.engine.traffic.budget.used == 0 for server in made.servers),
            "all room is given back",
        )


@each_lane
def test_a_second_push_is_refused_while_one_is_open(lanes: Any, cluster: Make) -> None:
    with counter(cluster(2).address, lanes=lanes) as client:
        flow = client.model.begin()
        for call in (client.model.begin, client.pull):
            with pytest.raises(InvalidRequestError, match="a push is under way"):
                call()
        with pytest.raises(InvalidRequestError, match="arrive after finish"):
            flow.wait(0, 1)
        with pytest.raises(InvalidRequestError, match="samples=0 < 1"):
            flow.finish(samples=0)
        with pytest.raises(InvalidRequestError, match="tensor 9 cannot be absent") as caught:
            flow.finish(absent=[9])
        assert caught.value.reason == "UNKNOWN_TENSOR"
        assert flow.finish().status == "applied"
        with pytest.raises(InvalidRequestError, match="this push is finished"):
            flow.finish()
        flow.close()
        count(client)


@each_lane
def test_a_gradient_with_nan_is_rejected(lanes: Any, cluster: Make) -> None:
    with counter(cluster(2, bad_gradients="skip").address, lanes=lanes) as client:
        numbers = np.frombuffer(client.model.flat_buffers()[0], np.float32)
        numbers[:] = 1.0
        numbers[3] = np.nan
        flow = client.model.begin()
        result = flow.finish()
        flow.wait(0, client.plan.nbytes)
        flow.close()

        assert (result.status, result.version) == ("rejected", 0)
        assert result.reason.startswith("NON_FINITE: ")
        count(client)
        assert counted(client.pull()) == 1


@each_lane
def test_finish_raises_for_a_fenced_worker(lanes: Any, cluster: Make) -> None:
    made = cluster(2, policy="async")
    with counter(made.address, lanes=lanes) as client, counter(made.address) as other:
        flow = client.model.begin()
        client._connection.transport.request(
            LEAVE, co.LeaveRequest(job=client.job, worker=client.worker), 5.0
        )
        with pytest.raises(FencedError):
            flow.finish()
        flow.close()
        count(other)

        assert counted(other.pull()) == 1


@each_lane
def test_close_leaves_no_thread(lanes: Any, cluster: Make) -> None:
    made = cluster(2)
    before = {thread.name for thread in threading.enumerate()}

    def left() -> set[str]:
        names = {thread.name for thread in threading.enumerate()} - before
        return {name for name in names if "psworker" in name or "consume_request" in name}

    with counter(made.address, lanes=lanes) as client:
        for finish in (True, False):
            flow = client.model.begin()
            assert "psworker-flow" in left()
            if finish:
                flow.finish()
            flow.close()
            assert "psworker-flow" not in left()
        client.model.begin()
    until(lambda: not left(), "all threads have ended")
