"""Messages of a shard to the coordinator use the current connection and not an ended one."""

import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pscommon.core.errors import MismatchError, UnreachableError
from psproto.v1 import coordinator_pb2 as pb
from psserver.core.job.snapshot_schedule import PartReport
from psserver.core.shard.state_machine import ShardMachine
from psserver.peers.coordinator_link import CoordinatorLink
from psserver.peers.link_messages import ShardMessages
from psserver.process.identity import ServerIdentity
from psserver.shard.push_statistics import PushStatistics
from psserver.shard.transfer_stats import TransferStats


def make_messages(standby: Any = None) -> ShardMessages:
    """Return messages that have only parts of snapshots and the state of the standby to report."""
    identity = ServerIdentity(1, 2, "here:1", "there:1")
    return ShardMessages(identity, make_engine(), standby or standby_link("none"))


def make_engine() -> Any:
    transfer, pushes = TransferStats(cast(Any, None)), PushStatistics(cast(Any, None))
    return SimpleNamespace(
        make_report=ShardMachine(1).report,
        live=SimpleNamespace(store=None, version=0),
        traffic=SimpleNamespace(transfer=transfer, pushes=pushes),
    )


def standby_link(state: str) -> Any:
    return SimpleNamespace(term=1, address="b1:1", state=state, unacknowledged=0)


def make_link(search_seconds: float = 1.0) -> CoordinatorLink:
    identity, nothing = ServerIdentity(1, 2, "here:1", "there:1"), cast(Any, None)
    return CoordinatorLink(
        identity,
        lambda link: make_engine(),
        nothing,
        nothing,
        standby_link("none"),
        search_seconds,
    )


def begin(messages: ShardMessages) -> Iterator[pb.LinkShardRequest]:
    """Begin a connection; yield its requests."""
    return (make() for make in messages.begin(lambda: True))


def parts(requests: list[pb.LinkShardRequest]) -> list[int]:
    """Return the versions of the parts among these messages."""
    return [
        request.snapshot_part.version for request in requests if request.HasField("snapshot_part")
    ]


def test_an_ended_connection_takes_no_messages() -> None:
    """gRPC asks for its next request once more, after the next connection has begun."""
    messages = make_messages()
    ended = begin(messages)
    next(ended)
    current = begin(messages)
    messages.send_part(PartReport(7, 9, "part", 1, "sum"))

    assert parts(list(ended)) == []
    assert parts([next(current)]) == [7]


def test_the_last_part_is_sent_once_more_on_a_new_connection() -> None:
    messages = make_messages()
    first = begin(messages)
    messages.send_part(PartReport(7, 9, "part", 1, "sum"))
    assert parts([next(first)]) == [7]

    requests = begin(messages)

    assert parts([next(requests), next(requests)]) == [7]


def test_the_standby_state_is_sent_at_once_and_other_statistics_once_a_second() -> None:
    standby = standby_link("in sync")
    messages = make_messages(standby)
    requests = begin(messages)

    def state() -> str:
        messages.wakeup.set()
        found = next(requests).stats_json
        return json.loads(found)["standby_state"] if found else ""

    found = [state(), state()]
    standby.state = "loading"
    found += [state(), state()]

    assert found == ["in sync", "", "loading", ""]


@pytest.mark.parametrize("sends_news", [False, True])
def test_a_shard_identifies_itself_in_each_message_or_with_its_statistics(
    sends_news: bool,
) -> None:
    standby = standby_link("in sync")
    messages = make_messages(standby)
    requests = messages.begin(lambda: True, sends_news)

    def is_identified() -> bool:
        messages.wakeup.set()
        return bool(next(requests)().instance)

    found = [is_identified(), is_identified()]
    standby.state = "loading"
    found += [is_identified(), is_identified()]

    assert found == [True, not sends_news, True, not sends_news]


def test_moved_bytes_are_reported_once() -> None:
    """They are part of the statistics of each second; reports of steps do not contain them."""
    standby = standby_link("0")
    messages = make_messages(standby)
    requests, transfer = begin(messages), messages._engine.traffic.transfer

    def reports(due: bool = True) -> list[int]:
        standby.state += "." if due else ""
        messages.wakeup.set()
        return list(next(requests).alive)

    assert reports() == []
    assert list(transfer.watch_frames(7, iter([b"a", b"b"]))) == [b"a", b"b"]
    transfer.note_request(8)
    assert reports(due=False) == []
    assert sorted(reports()) == [7, 8]
    assert reports() == []


def test_moved_bytes_are_reported_with_their_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that counted from the report would be longer than a lease."""
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr(
        "psserver.shard.transfer_stats.time", SimpleNamespace(monotonic=lambda: clock.now)
    )
    messages = make_messages()
    messages._engine.traffic.transfer.note_request(7)
    clock.now = 10.75

    assert dict(next(begin(messages)).alive) == {7: 0.75}


def test_a_shard_also_tries_the_address_of_shard_0_that_a_worker_names() -> None:
    """A standby may take over before all shards have its address."""
    link = make_link()
    link._identity.job = "j"
    assert link._next_address("there:1") == "there:1"

    link._identity.introduce("b0:1", "j")

    assert [link._next_address("there:1"), link._next_address("b0:1")] == ["b0:1", "there:1"]


def test_a_restarted_shard_accepts_the_address_from_a_worker() -> None:
    """Its flags say where shard 0 was; its data directory says that it belongs to this job."""
    link = make_link()
    link._identity.only_job = "j"

    link._identity.introduce("b0:1", "j")

    assert [link._next_address("there:1"), link._next_address("b0:1")] == ["b0:1", "there:1"]


@pytest.mark.parametrize("job", ["", "another"])
def test_a_worker_of_another_job_cannot_redirect_a_shard(job: str) -> None:
    link = make_link()
    link._identity.job = "j"
    with pytest.raises(MismatchError, match="follows there:1, not b0:1"):
        link._identity.introduce("b0:1", job)
    assert link._next_address("there:1") == "there:1"


def test_a_shard_without_the_address_of_shard_0_reports_it_and_gives_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "psserver")
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr(
        "psserver.peers.coordinator_link.time", SimpleNamespace(monotonic=lambda: clock.now)
    )
    link = make_link(search_seconds=20.0)

    def no_message(seconds: float) -> str:
        clock.now += seconds
        return ""

    link._identity = cast(Any, SimpleNamespace(wait_for_coordinator=no_message))
    link._run()

    assert isinstance(link.failure, UnreachableError)
    assert "shard 0: nothing for 20 s: its address is unknown" in str(link.failure)
    assert [record.__dict__["seconds"] for record in caplog.records] == [8, 16]


@pytest.mark.parametrize("leaves", [True, False])
def test_a_connection_that_ends_while_the_server_stops_is_no_warning(
    leaves: bool, caplog: pytest.LogCaptureFixture
) -> None:
    link = make_link()
    link.engine.live = SimpleNamespace(version=3)
    if leaves:
        link.leave(60.0)
        link.stopped.clear()  # stopped is clear while the link is connected

    link._handle_disconnect(UnreachableError("cancelled"), "there:1", connected=True)

    assert [record.levelno for record in caplog.records] == ([] if leaves else [logging.WARNING])
