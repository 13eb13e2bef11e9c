"""Each wait is logged with its peer, and every call waits for servers that are away for a while."""

import logging
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pscommon.core.data_loop import LoopSpec
from pscommon.core.errors import PSError, UnreachableError
from pscommon.core.log_entries import BatchKey
from pscommon.core.model_spec import OptimizerSettings
from psworker.client.client import Client
from psworker.connection import retry as patience
from tests.support.fake_server import FakeCluster, FakeServer

SGD = OptimizerSettings("sgd", ({"lr": 0.5},))
ONES = {"w": np.ones(50, np.float32)}


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(shards=2, lease=0.05) as cluster:
        yield cluster


def connect(cluster: FakeCluster, connect_timeout: float = 20.0) -> Client:
    client = Client(cluster.addresses, connect_timeout=connect_timeout, wait_timeout=20.0)
    client.register(ONES, SGD)
    return client


class ShardLogLines(logging.Handler):
    """Log lines about requests to shard 1; `has_text` is set by the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.has_text = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if re.match(r"request_.* shard 1 at ", record.getMessage()):
            self.texts.append(record.getMessage())
            self.has_text.set()


@pytest.fixture
def fast_lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShardLogLines]:
    """Log lines fifty times as often."""
    handler, log = ShardLogLines(), logging.getLogger("psworker")
    monkeypatch.setattr(patience, "LOG_SECONDS", 0.2)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)
    log.setLevel(level)


def test_a_server_that_delays_a_push_is_named_during_the_delay(
    cluster: FakeCluster, fast_lines: ShardLogLines
) -> None:
    """The log line has the number of the push, the shard and its address."""
    with connect(cluster) as client:
        cluster.before[1].append(lambda: _until(fast_lines.has_text))

        client.push(ONES)

    assert (
        fast_lines.texts[0]
        == f"request_unanswered request=push 1 of worker 1 on shard 1 at {cluster.addresses[1]} "
        "silent_seconds=0"
    )


def test_a_server_that_delays_the_end_of_a_push_is_named_but_the_script_not(
    cluster: FakeCluster, fast_lines: ShardLogLines
) -> None:
    with connect(cluster) as client:
        seen = len(cluster.beats)
        flow = client.model.begin()
        cluster.wait_until(lambda: len(cluster.beats) > seen + 15)
        assert fast_lines.texts == []

        cluster.after[1].append(lambda: _until(fast_lines.has_text))
        flow.finish()
        flow.close()
        count = len(fast_lines.texts)
        seen = len(cluster.beats)
        cluster.wait_until(lambda: len(cluster.beats) > seen + 15)

    assert (
        fast_lines.texts[0]
        == f"request_unanswered request=push 1 of worker 1 on shard 1 at {cluster.addresses[1]} "
        "silent_seconds=0"
    )
    assert len(fast_lines.texts) == count


def _until(event: threading.Event) -> None:
    assert event.wait(20)


CALLS: dict[str, Callable[[Client], Any]] = {
    "push": lambda client: client.push(ONES),
    "pull": lambda client: client.pull(),
    "flow": lambda client: (flow := client.model.begin(), flow.finish(), flow.close()),
    "data": lambda client: client.data.next_batches(LoopSpec(0, 4, 1)),
    "back": lambda client: client.data.return_batches([BatchKey(0, 1)]),
    "report": lambda client: client.report(loss=1.0),
    "rejoin": lambda client: client.rejoin(),
    "register": lambda client: client.model.agree(client.plan.spec),
}


@pytest.mark.every(5)
@pytest.mark.parametrize("reason", ["UNREACHABLE", "NOT_READY", "NOT_ATTACHED", "STOPPING"])
@pytest.mark.parametrize("what", CALLS)
def test_every_call_survives_a_server_that_is_away_for_a_while(
    cluster: FakeCluster, what: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is stopped, or not ready after a restart, for less than --connect-timeout."""
    monkeypatch.setattr(patience, "LONGEST_PAUSE_SECONDS", 0.05)

    def away() -> None:
        raise UnreachableError("not now", reason)

    with connect(cluster) as client:
        cluster.deal(0)
        for hooks in (
            *(cluster.before[shard] for shard in (0, 1)),
            *map(cluster.control.__getitem__, METHODS),
        ):
            hooks.extend([away] * 12)

        CALLS[what](client)


METHODS = ("NextBatch", "ReturnBatches", "ReportMetrics", "Join", "Register", "Heartbeat")


@pytest.mark.parametrize("what", ["push", "data", "report", "rejoin"])
def test_no_call_survives_connect_timeout(cluster: FakeCluster, what: str) -> None:
    with connect(cluster, connect_timeout=0.5) as client:
        for server in cluster.servers:
            server.stop()
        with pytest.raises(UnreachableError, match=r"tried for \d s"):
            CALLS[what](client)


@pytest.mark.full
def test_a_refusing_port_is_found_soon_after_it_listens(cluster: FakeCluster) -> None:
    """Pauses between attempts to connect are short in gRPC and in the client."""
    with connect(cluster) as client, ThreadPoolExecutor(1) as pool:
        address = cluster.servers[1].address
        cluster.servers[1].stop()
        pushing = pool.submit(client.push, ONES)
        with pytest.raises(TimeoutError):
            pushing.result(3)  # after 3 s gRPC makes its longest pauses

        cluster.servers[1] = FakeServer(cluster, 1, True, bind=address)

        assert pushing.result(3).status == "applied"


def test_an_invalid_request_is_not_repeated(cluster: FakeCluster) -> None:
    def wrong() -> None:
        raise PSError("a bug")

    with connect(cluster) as client:
        cluster.before[0].append(wrong)
        with pytest.raises(PSError, match="a bug"):
            client.push(ONES)
