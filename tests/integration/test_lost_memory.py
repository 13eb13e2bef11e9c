"""Shared memory that a server has lost, that is late, or that belongs to former servers."""

import logging
import signal
import threading
from collections.abc import Callable

import numpy as np
import pytest

from pscommon.core.errors import UnreachableError
from pscommon.core.log_entries import PushKey
from psserver.server import Server
from psworker import Client, WaitTimeoutError
from tests.support.cluster import Cluster
from tests.support.events import records_of
from tests.support.workers import (
    ONES,
    count,
    counted,
    counter,
    together,
    until,
    weights_of,
)

Make = Callable[..., Cluster]
SHARED = "shared_memory_used shards="


@pytest.fixture
def lane_logs(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return what workers have logged about lanes."""
    caplog.set_level(logging.INFO, "psworker")
    keys = ("shared_memory_used", "shared_memory_unavailable")
    return lambda: [record.getMessage() for record in records_of(caplog, *keys)]


def memory_number(server: Server, worker: int) -> int:
    """Return the number of the offer that the server has attached."""
    return server.engine.traffic.shared_buffers._buffers[worker].number


def test_memory_that_a_server_has_lost_is_offered_again(
    cluster: Make, lane_logs: Callable[[], list[str]]
) -> None:
    """The exchange that detects it uses gRPC; the next one uses memory again."""
    made = cluster(2)
    with counter(made.address) as client:
        count(client)
        made.servers[1].engine.traffic.shared_buffers.on_evict(client.worker)
        count(client)
        count(client)

        assert counted(client.pull()) == 3
        assert [memory_number(server, client.worker) for server in made.servers] == [2, 2]
    assert lane_logs() == [f"{SHARED}[0, 1]"] * 2


def test_weights_received_over_grpc_are_not_overwritten_by_lost_memory(cluster: Make) -> None:
    made = cluster(2)
    with counter(made.address) as client:
        foreign = memoryview(bytearray(client.plan.nbytes))
        made.servers[1].engine.traffic.shared_buffers.on_evict(client.worker)
        client.model.exchange(gradients=client.model.flat_buffers()[0], weights=foreign)
        client.model.exchange(
            gradients=None, weights=(expected := memoryview(bytearray(client.plan.nbytes)))
        )
        assert foreign == expected

        count(client)
        made.servers[1].engine.traffic.shared_buffers.on_evict(client.worker)
        client.model.exchange(gradients=None, weights=foreign)
        client.model.exchange(gradients=None, weights=expected)

        assert foreign == expected
        assert counted(weights_of(made.address)) == 1


def abandon_push(client: Client, servers: list[Server]) -> None:
    """Raise Ctrl-C once the push is staged."""

    def interrupt() -> None:
        until(
            lambda: all(server.engine.make_report().staged for server in servers),
            "the push is staged",
        )
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            client.model.exchange(
                gradients=client.model.flat_buffers()[0], weights=client.model.flat_buffers()[1]
            )
    finally:
        thread.join()


def timed_out(client: Client, servers: list[Server]) -> None:
    with pytest.raises(WaitTimeoutError):
        client.model.exchange(
            gradients=client.model.flat_buffers()[0], weights=client.model.flat_buffers()[1]
        )


@pytest.mark.parametrize("ended", [timed_out, abandon_push])
def test_a_late_push_does_not_touch_later_work_of_its_worker(
    ended: Callable[[Client, list[Server]], None], cluster: Make
) -> None:
    """The second worker completes the round when the first push is no longer awaited. It counts as
    sent, and its weights are written to unused memory.
    """
    made = cluster(2, min_workers=2)
    timeout = 1.0 if ended is timed_out else 30.0
    clients = together(
        lambda: counter(made.address, 0, wait_timeout=timeout, lanes="shm"),
        lambda: counter(made.address, 1),
    )
    with clients[0] as client, clients[1] as late:
        buffer, weights = client.model.flat_buffers()
        numbers = np.frombuffer(buffer, np.float32)
        numbers[:] = 1.0
        ended(client, made.servers)
        numbers[:], weights[:] = 77.0, bytes([7]) * weights.nbytes
        count(late)
        outcomes = [
            server.engine.find_outcome(PushKey(client.worker, 1), 0) for server in made.servers
        ]

        assert [outcome and outcome.status for outcome in outcomes] == ["applied", "applied"]
        assert counted(late.pull()) == 1
        assert (numbers == 77).all()
        assert bytes(weights) == bytes([7]) * weights.nbytes

        numbers[:] = 5.0  # the mean with 1 of the other worker is 3
        together(
            lambda: str(client.model.exchange(gradients=buffer, weights=weights)),
            lambda: str(late.push(ONES)),
        )
        assert counted(late.pull()) == 4
        assert [memory_number(server, client.worker) for server in made.servers] == [2, 2]
        assert (np.frombuffer(weights, np.float32)[:120] == -4).all()
        until(
            lambda: all(server.engine.traffic.budget.used == 0 for server in made.servers),
            "everything is given back",
        )


def test_memory_is_not_shared_with_former_servers(cluster: Make) -> None:
    made = cluster(2)
    with counter(made.address, lanes="shm", connect_timeout=1.0) as client:
        memories = [
            server.engine.traffic.shared_buffers._buffers[client.worker].gradients
            for server in made.servers
        ]
        made.close()
        with pytest.raises(UnreachableError):
            count(client)
        client.model.flat_buffers()[0][0] = 200
        memories[1].flat[1] = 201

        assert memories[0].flat[0] != 200
        assert client.model.flat_buffers()[0][1] != 201
