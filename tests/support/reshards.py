"""Jobs that are resharded while workers push."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from psproto.v1 import coordinator_pb2 as co
from psserver.coordinator import handlers
from psserver.waiting import ThreadWaiter, run
from psworker import Client, OptimizerSpec
from tests.support.cluster import Cluster
from tests.support.workers import until

SIZE = 1000
ONES = {"w": np.ones(SIZE), "b": np.ones(3, np.float32)}
ZEROS = {"w": np.zeros(SIZE), "b": np.zeros(3, np.float32)}
EACH = OptimizerSpec("sgd", lr=1.0)


class Pusher(threading.Thread):
    """A worker that pushes ones until `stop`; with lr 1 each push subtracts 1 from every weight."""

    def __init__(self, address: str, lanes: str) -> None:
        super().__init__(daemon=True)
        self.counted = 0
        self.error: BaseException | None = None
        self._stopping = threading.Event()
        self.client = Client(address, lanes=lanes)  # type: ignore[arg-type]

    def run(self) -> None:
        try:
            self.client.register(ZEROS, EACH)
            while not self._stopping.is_set():
                result = self.client.push_pull(ONES)
                assert result.status == "applied", result
                self.counted += 1
        except BaseException as error:
            self.error = error
        finally:
            self.client.leave()

    def goes_on(self) -> None:
        """Two more of its pushes count."""
        wanted = self.counted + 2
        until(lambda: self.counted >= wanted or self.error, "two more pushes")
        assert self.error is None, self.error

    def stop(self) -> None:
        self._stopping.set()
        self.join(30)
        assert self.error is None, self.error


@contextmanager
def pushing(address: str, workers: int, lanes: str) -> Iterator[list[Pusher]]:
    pushers = [Pusher(address, lanes) for _ in range(workers)]
    for pusher in pushers:
        pusher.start()
    try:
        yield pushers
    finally:
        for pusher in pushers:
            pusher.stop()
            pusher.client.close()


def reshard(cluster: Cluster, shards: int, **settings: object) -> co.ReshardResponse:
    """Reshard as ps-ctl does, with new servers if needed."""
    before = cluster.servers[0].service.directory.shards  # type: ignore[union-attr]
    for shard in range(before, shards):
        cluster.add(shard, shards, **settings)
        until(
            lambda shard=shard: (shard, shards) in cluster.servers[0].service.directory.candidates,
            "a candidate",
        )
    request = co.ReshardRequest(shards=shards, wait_ms=20_000)
    service = cluster.servers[0].service
    assert service is not None
    return run(handlers.reshard(service, request, ThreadWaiter()))


def weights(address: str) -> dict[str, np.ndarray]:
    with Client(address, observe=True) as client:
        return client.pull()
