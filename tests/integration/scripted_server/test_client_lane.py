"""The Client over a lane that calls the servers directly, as a simulation does: no thread, no real
time.
"""

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import OptimizerSettings
from pscommon.wire.frames import Frame
from pscommon.wire.requests import A, Q, Request
from psproto.v1 import parameter_server_pb2 as ps
from psworker.client.client import Client
from psworker.core.clock import Clock
from psworker.core.results import StepProgress
from psworker.transport.exchange_calls import AnswerReceiver, Cancellation, ExchangeAnswer
from tests.support.fake_server import FakeCluster


class DirectLane:
    """Calls the fake servers in the caller's thread; its clock advances only during pauses."""

    direct = True

    def __init__(self, cluster: FakeCluster) -> None:
        self.addresses: Sequence[str] = [f"shard {shard}" for shard in range(cluster.shards)]
        self.clock = Clock(lambda: self.now, self._pass)
        self.now = 0.0
        self.waits: list[tuple[int, int]] = []
        self._cluster = cluster

    def learn(
        self, job: str, addresses: Sequence[str], terms: Sequence[int], standbys: Sequence[str]
    ) -> None: ...

    def find_primaries(self, job: str, timeout: float) -> bool: ...

    def end_stalled(self) -> None: ...

    def offer_memory(
        self, shard: int, header: ps.PushPullHeader, share: Callable[[], int], timeout: float
    ) -> None:
        raise InvalidRequestError("a fake has no memory")

    def request(self, row: Request[Q, A], message: Q, timeout: float, shard: int = 0) -> A:
        answer: A = getattr(self._cluster.servers[shard], row.name)(message, None)
        return answer

    def _pass(self, seconds: float) -> None:
        self.now += seconds

    def exchange(
        self,
        shard: int,
        header: ps.PushPullHeader,
        send: Sequence[memoryview],
        receiver: AnswerReceiver,
        timeout: float,
        cancellation: Cancellation,
        frames: Iterator[Frame[ps.PushPullHeader]] | None = None,
    ) -> ExchangeAnswer:
        self.waits.append((shard, header.wait_ms))
        sent = ps.PushPullHeader()
        sent.CopyFrom(header)
        result, views = self._cluster.servers[shard]._exchanged(sent, b"".join(send))
        data = memoryview(b"".join(views))
        for view in receiver.begin(result) if result.nbytes else ():
            view[:], data = data[: view.nbytes], data[view.nbytes :]
        return ExchangeAnswer(result, 0.0, 0.0)

    def close(self) -> None:
        self.now = -1.0


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(shards=3) as cluster:
        yield cluster


def test_a_direct_lane_trains_without_threads(cluster: FakeCluster) -> None:
    before, lane = set(threading.enumerate()), DirectLane(cluster)
    with Client(lane=lane, rank=4, device="sim") as client:
        client.register({"w": np.ones(600, np.float32)}, OptimizerSettings("sgd", ({"lr": 0.5},)))
        result = client.push_pull({"w": np.full(600, 2, np.float32)})
        client.show_progress(StepProgress(1, 1.0, 1.0, "compute"))
        client.report(loss=0.5)

        assert (result.status, client.version) == ("applied", 1)
        assert (client.weights["w"] == 0).all()
        assert set(threading.enumerate()) <= before
    assert [beat.steps for beat in cluster.beats] == [1]
    assert (cluster.joins[0].rank, cluster.joins[0].device) == (4, "sim")
    assert cluster.left == {1: ""}
    assert lane.now == -1.0


def test_only_the_last_shard_may_wait(cluster: FakeCluster) -> None:
    """A push is decided once all shards have it; an earlier wait at one shard would never end."""
    lane = DirectLane(cluster)
    with Client(lane=lane) as client:
        client.register({"w": np.ones(600, np.float32)}, OptimizerSettings("sgd", ({"lr": 0.5},)))
        lane.waits.clear()
        client.push({"w": np.ones(600, np.float32)})

    assert lane.waits == [(0, 0), (1, 0), (2, 1000), (0, 0), (1, 1000)]
