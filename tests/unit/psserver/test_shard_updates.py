"""What shard 0 sends to a shard that is connected over a stream, and when."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Event

import pytest

from pscommon.core.formats import WIRE_FORMAT
from pscommon.core.log_entries import PushKey, Reject
from pscommon.wire.messages import report_to_proto
from psproto.v1 import coordinator_pb2 as pb
from psserver.coordinator import shard_stream
from psserver.coordinator.service import CoordinatorService
from psserver.coordinator.shard_stream import MakeResponse, serve_shard
from psworker.simulation import simulated


class ConnectedShard:
    """Shard 1, which follows the log, and all that is sent to it.

    is_full: its connection takes nothing without waiting.
    sent: what it receives.
    """

    def __init__(self, service: CoordinatorService) -> None:
        self.is_full = False
        self.sent: list[pb.LinkShardResponse] = []
        self._service, self._ended = service, Event()
        self._makers = serve_shard(
            service, self._requests(), lambda: True, lambda action: None, self._try_send
        )
        self.serve()

    def _requests(self) -> Iterator[pb.LinkShardRequest]:
        report = report_to_proto(replace(self._service.engine.make_report(), shard=1))
        me = {"shard": 1, "shards": 2, "address": "s1:1", "instance": "i"}
        yield pb.LinkShardRequest(**me, term=2, report=report, format=WIRE_FORMAT)
        self._ended.wait()

    def _try_send(self, make: MakeResponse) -> bool:
        if not self.is_full:
            self._send(make)
        return not self.is_full

    def _send(self, make: MakeResponse) -> None:
        if (response := make()) is not None:
            self.sent.append(response)

    def serve(self) -> None:
        """Let the thread that serves the shard continue until it waits again."""
        self._send(next(self._makers))

    def append(self, count: int = 1) -> None:
        """Append entries to the log, as a report of a shard does."""
        with self._service.executor.step(quiet=True) as (recorder, _):
            log = recorder.coordinator.log
            for _ in range(count):
                log.append(Reject(log.next, PushKey(9, log.next), "STALE", ""))

    def take(self) -> list[tuple[bool, int]]:
        """Return whether each message has only entries, and how many; forget them."""
        found = [(message.only_entries, len(message.entries)) for message in self.sent]
        self.sent.clear()
        return found

    def close(self) -> None:
        self._ended.set()
        self._makers.close()  # type: ignore[attr-defined]


@pytest.fixture
def shard(monkeypatch: pytest.MonkeyPatch) -> Iterator[ConnectedShard]:
    """A shard that has received all there is, so that the next wait would be a long one."""
    monkeypatch.setattr(shard_stream, "UPDATE_INTERVAL_SECONDS", 60.0)
    service = simulated(2, 1, "async", None).service
    connected = ConnectedShard(service)
    assert connected.take() == [(False, 0)]
    yield connected
    connected.close()


def test_new_entries_are_sent_at_once_and_alone(shard: ConnectedShard) -> None:
    shard.append(2)
    shard.append()

    assert shard.take() == [(True, 2), (True, 1)]


def test_entries_that_do_not_fit_now_are_sent_by_the_serving_thread(shard: ConnectedShard) -> None:
    shard.is_full = True
    shard.append(2)
    assert shard.take() == []

    shard.serve()

    assert shard.take() == [(True, 2)]


def add_server(service: CoordinatorService) -> None:
    service.shard_connections.connect(2, 3, "s2:1", "j")


def wake(service: CoordinatorService) -> None:
    service.executor.wake()


@pytest.mark.parametrize("change", [add_server, wake])
def test_other_changes_are_followed_by_everything(
    shard: ConnectedShard, change: Callable[[CoordinatorService], None]
) -> None:
    change(shard._service)
    shard.serve()

    assert shard.take() == [(False, 0)]


def test_a_shard_without_the_job_s_model_gets_everything(
    shard: ConnectedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard._service.shard_connections, "next_entries", lambda *facts: None)
    shard.append()
    assert shard.take() == []

    shard.serve()

    assert shard.take() == [(False, 1)]


def test_everything_is_due_after_the_interval(
    shard: ConnectedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_stream, "UPDATE_INTERVAL_SECONDS", 0.0)
    shard.serve()
    shard.serve()

    assert shard.take() == [(False, 0), (False, 0)]
