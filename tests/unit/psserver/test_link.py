"""What a shard says to the coordinator goes over the line of now, not over one that has ended."""

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pscommon.core.errors import MismatchError, UnreachableError
from psproto.v1 import coordinator_pb2 as pb
from psserver.core.job.snapshot_schedule import PartReport
from psserver.core.shard.state_machine import ShardMachine
from psserver.process.identity import ServerIdentity
from psserver.shard.coordinator_link import CoordinatorLink
from psserver.shard.transfer_stats import TransferStats


def make_link(standby: Any = None, patience: float = 1.0) -> CoordinatorLink:
    """Of a shard that has nothing to tell but parts of snapshots, and how its standby is."""
    engine = cast(
        Any,
        SimpleNamespace(
            make_report=ShardMachine(1).report,
            traffic=SimpleNamespace(transfer=TransferStats(cast(Any, None))),
        ),
    )
    line = standby or SimpleNamespace(term=1, address="", state="none")
    return CoordinatorLink(
        ServerIdentity(1, 2, "here:1", "there:1"),
        engine,
        cast(Any, None),
        cast(Any, None),
        lambda: {"is": line.state},
        patience,
        line,
    )


def parts(requests: list[pb.LinkShardRequest]) -> list[int]:
    """The versions of the parts among these."""
    return [
        request.snapshot_part.version for request in requests if request.HasField("snapshot_part")
    ]


def test_a_line_that_has_ended_takes_nothing_of_what_is_to_be_said() -> None:
    """gRPC asks for its next request once more, after the next line has begun."""
    link = make_link()
    ended = link._requests(link._outbox)
    next(ended)
    link._reset_outbox()
    link._send_part(PartReport(7, 9, "part", 1, "sum"))

    assert parts(list(ended)) == []
    assert parts([next(link._requests(link._outbox))]) == [7]


def test_the_last_part_is_said_again_on_a_new_line_and_once() -> None:
    link = make_link()
    link._send_part(PartReport(7, 9, "part", 1, "sum"))
    first = link._requests(link._outbox)
    assert parts([next(first)]) == [7]

    link._reset_outbox()
    requests = link._requests(link._outbox)

    assert parts([next(requests), next(requests)]) == [7]


def test_how_its_standby_is_is_said_at_once_and_the_rest_once_a_second() -> None:
    standby = SimpleNamespace(term=1, address="b1:1", state="in sync")
    link = make_link(standby)
    requests = link._requests(link._outbox)

    def told() -> str:
        link._wakeup.set()
        return next(requests).stats_json

    found = [told(), told()]
    standby.state = "loading"
    found += [told(), told()]

    assert found == ['{"is": "in sync"}', "", '{"is": "loading"}', ""]


def test_whose_bytes_have_moved_is_said_once() -> None:
    """And with what is said once a second, not with each report: a step must not cost more for
    it.
    """
    standby = SimpleNamespace(term=1, address="b1:1", state="0")
    link = make_link(standby)
    requests = link._requests(link._outbox)

    def told(due: bool = True) -> list[int]:
        standby.state += "." if due else ""
        link._wakeup.set()
        return list(next(requests).alive)

    assert told() == []
    assert list(link._engine.traffic.transfer.watch_frames(7, iter([b"a", b"b"]))) == [b"a", b"b"]
    link._engine.traffic.transfer.note_request(8)
    assert told(due=False) == []
    assert sorted(told()) == [7, 8]
    assert told() == []


def test_bytes_are_told_with_the_seconds_since_they_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that counted from when it is told would be longer than a lease."""
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr(
        "psserver.shard.transfer_stats.time", SimpleNamespace(monotonic=lambda: clock.now)
    )
    link = make_link()
    requests = link._requests(link._outbox)
    link._engine.traffic.transfer.note_request(7)
    clock.now = 10.75

    assert dict(next(requests).alive) == {7: 0.75}


def test_shard_0_is_also_looked_for_where_a_worker_of_the_job_says() -> None:
    """A standby may take over before all shards have heard that it was there."""
    link = make_link()
    link._identity.job = "j"
    assert link._next_address("there:1") == "there:1"

    link._identity.introduce("b0:1", "j")

    assert [link._next_address("there:1"), link._next_address("b0:1")] == ["b0:1", "there:1"]


def test_one_that_was_started_again_hears_it_too() -> None:
    """Its command line says where shard 0 was; that it is of this job, its data directory says."""
    link = make_link()
    link._identity.bound = "j"

    link._identity.introduce("b0:1", "j")

    assert [link._next_address("there:1"), link._next_address("b0:1")] == ["b0:1", "there:1"]


@pytest.mark.parametrize("job", ["", "another"])
def test_a_stranger_cannot_send_a_shard_elsewhere(job: str) -> None:
    link = make_link()
    link._identity.job = "j"
    with pytest.raises(MismatchError, match="follows there:1, not b0:1"):
        link._identity.introduce("b0:1", job)
    assert link._next_address("there:1") == "there:1"


def test_a_shard_that_nobody_tells_where_shard_0_is_says_so_and_gives_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "psserver")
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr(
        "psserver.shard.coordinator_link.time", SimpleNamespace(monotonic=lambda: clock.now)
    )
    link = make_link(patience=20.0)

    def nobody(seconds: float) -> str:
        clock.now += seconds
        return ""

    link._identity = cast(Any, SimpleNamespace(wait_for_coordinator=nobody))
    link._run()

    assert isinstance(link.failure, UnreachableError)
    assert "shard 0: nothing for 20 s: its address is unknown" in str(link.failure)
    assert [record.__dict__["seconds"] for record in caplog.records] == [8, 16]


@pytest.mark.parametrize("leaves", [True, False])
def test_a_line_that_ends_while_this_server_ends_too_is_no_warning(
    leaves: bool, caplog: pytest.LogCaptureFixture
) -> None:
    link = make_link()
    link._engine.live = SimpleNamespace(version=3)
    if leaves:
        link.leave(60.0)
        link.stopped.clear()  # it was connected

    link._handle_disconnect(UnreachableError("cancelled"), "there:1", connected=True)

    assert [record.levelno for record in caplog.records] == ([] if leaves else [logging.WARNING])
