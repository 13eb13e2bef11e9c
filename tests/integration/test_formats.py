"""Formats of newer releases are refused with a remedy, on the wire and on disk."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from pscommon.core import formats
from pscommon.core.errors import FormatError, PSError
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.status import translated
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import standby_pb2 as sb
from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from psproto.v1.standby_pb2_grpc import StandbyServiceStub
from psserver.coordinator.status import describe
from tests.contract.wire.conversation import (
    FIXTURE,
    PLACEHOLDERS,
    SHARD_0,
    SHARD_1,
    STANDBY,
    WORKER,
    Conversation,
    Event,
    encoded,
    parsed,
)
from tests.contract.wire.parties import SETTINGS, work
from tests.contract.wire.play import (
    Make,
    play_to_shard_0,
    play_to_shard_1,
    play_to_standby,
    play_to_worker,
    real_standby,
)
from tests.contract.wire.player import WAIT_SECONDS, Player
from tests.support.snapshot_files import unpack

RECORDED = Conversation.load(FIXTURE)
NEWER = 4


def marked(method: str, kind: str = "") -> Conversation:
    """Return the conversation with the newer format in messages of these calls. kind: only in
    messages of this kind.
    """

    def mark(event: Event) -> Event:
        path = RECORDED.calls[event.call].method
        if (
            event.kind not in ("request", "answer")
            or kind not in ("", event.kind)
            or method not in path
        ):
            return event
        message: Any = parsed(path, event.kind, event.data)
        if "format" not in message.DESCRIPTOR.fields_by_name or getattr(message, "received", 0):
            return event
        message.format = NEWER
        return event._replace(data=encoded(message))

    return RECORDED._replace(events=[mark(event) for event in RECORDED.events])


def refusal(error: BaseException | None) -> str:
    """Return the text of a refusal; AssertionError for anything else."""
    assert isinstance(error, FormatError), repr(error)
    assert (error.reason, error.exit_code) == ("FORMAT", 11)
    assert re.search(
        r"format 4\b.* 3\. Try: install the newer release of paramserver for ", str(error)
    ), str(error)
    return str(error)


# ---- newer responses -----------------------------------------------------------------------------


def begun(method: str) -> Conversation:
    """Return the conversation up to the first answer with the newer format."""
    conversation = marked(method, "answer")
    changed = zip(conversation.events, RECORDED.events, strict=True)
    first = next(number for number, (event, recorded) in enumerate(changed) if event != recorded)
    call = conversation.events[first].call
    ends = [
        number
        for number, event in enumerate(conversation.events)
        if (event.call, event.kind) == (call, "end")
    ]
    return conversation._replace(events=conversation.events[: max([first, *ends]) + 1])


@pytest.mark.parametrize("method", ["Describe", "Join"])
def test_a_worker_refuses_newer_servers(method: str) -> None:
    with Player(begun(method), WORKER) as player, ThreadPoolExecutor(1) as pool:
        player.serve(SHARD_1)
        address = player.serve(SHARD_0)
        working = pool.submit(work, address, player.wait_for)
        player.play()

        assert f"at {address} uses" in refusal(working.exception(WAIT_SECONDS))


def test_a_shard_refuses_a_newer_shard_0(cluster: Make) -> None:
    with Player(begun("LinkShard"), SHARD_1) as player:
        address = {"advertise": PLACEHOLDERS[SHARD_1], "join": player.serve(SHARD_0)}
        server = cluster(0).add(1, 2, **SETTINGS, **address)
        player.set_address(SHARD_1, server.address)
        player.play()

        assert server.ended.wait(WAIT_SECONDS)
        assert "this shard uses format 3" in refusal(server.failure)


def test_a_standby_refuses_a_newer_primary() -> None:
    with Player(begun("Replicate"), STANDBY) as player, real_standby(player) as standby:
        player.play()

        assert standby.ended.wait(WAIT_SECONDS)
        assert "this standby uses format 3" in refusal(standby.failure)


# ---- newer requests ------------------------------------------------------------------------------


def join(channel: grpc.Channel, spoken: int | None = NEWER) -> object:
    request = co.JoinRequest(format=spoken)
    return CoordinatorServiceStub(channel).Join(request, timeout=WAIT_SECONDS)


def link_shard(channel: grpc.Channel, spoken: int | None = NEWER) -> object:
    request = co.LinkShardRequest(shard=1, shards=2, instance="newer", format=spoken)
    return next(CoordinatorServiceStub(channel).LinkShard(iter([request]), timeout=WAIT_SECONDS))


def replicate(channel: grpc.Channel, spoken: int | None = NEWER) -> object:
    request = sb.ReplicateRequest(shard=0, shards=2, instance="newer", format=spoken)
    return next(StandbyServiceStub(channel).Replicate(iter([request]), timeout=WAIT_SECONDS))


@pytest.mark.parametrize("ask", [join, link_shard, replicate])
def test_a_server_refuses_newer_workers_shards_and_standbys(
    cluster: Make, ask: Callable[..., object]
) -> None:
    server = cluster(0).add(0, 2, **SETTINGS)
    with (
        open_channel(Endpoint(server.address)) as channel,
        pytest.raises(PSError) as caught,
        translated("shard 0"),
    ):
        ask(channel)

    refusal(caught.value)
    status = describe(server.service) if server.service is not None else {}
    assert (status["workers"], status["servers"][1]["connected"], server.replicator.state) == (
        [],
        False,
        "none",
    )


# ---- messages of a newer release -----------------------------------------------------------------


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> Conversation:
    """Let this process be the newer release; return the conversation between such processes."""
    monkeypatch.setattr(formats, "WIRE_FORMAT", NEWER)
    return marked("")


def test_a_newer_release_states_its_format_in_every_handshake(
    newer: Conversation, cluster: Make
) -> None:
    play_to_shard_0(newer, cluster)
    play_to_shard_1(newer, cluster)
    play_to_standby(newer)
    play_to_worker(newer)


def test_peers_of_the_first_format_are_refused(cluster: Make) -> None:
    """They send no number."""
    server = cluster(0).add(0, 2, **SETTINGS)
    for ask in (join, link_shard, replicate):
        with (
            open_channel(Endpoint(server.address)) as channel,
            pytest.raises(FormatError, match=r"message format 1\b.* format 3\. Try: .* for "),
            translated("shard 0"),
        ):
            ask(channel, None)


# ---- disk ----------------------------------------------------------------------------------------


def with_newer_manifest(data_dir: Path) -> Path:
    *_, path = sorted(data_dir.glob("snapshots/*/MANIFEST.json"))
    path.write_text(path.read_text().replace('"format": 1', '"format": 4', 1))
    return path


def with_newer_log(data_dir: Path, folder: str) -> Path:
    *_, path = sorted(data_dir.glob(f"{folder}/*.log"))
    raw = bytearray(path.read_bytes())
    raw[7] = NEWER
    path.write_bytes(raw)
    return path


NEWER_FILES: dict[str, Callable[[Path], Path]] = {
    "snapshot": with_newer_manifest,
    "the job's log": lambda data_dir: with_newer_log(data_dir, "log-job"),
    "a shard's log": lambda data_dir: with_newer_log(data_dir, "log-shard-0"),
}


@pytest.mark.parametrize("durability", ["log", "snapshot"])
@pytest.mark.parametrize("kind", NEWER_FILES)
def test_a_server_refuses_a_newer_data_directory_and_changes_nothing(
    cluster: Make, tmp_path: Path, kind: str, durability: str
) -> None:
    data_dir = unpack("sync-adam-1", tmp_path)
    path = NEWER_FILES[kind](data_dir)
    before = contents(data_dir)

    with pytest.raises(FormatError) as caught:
        cluster(1, data_dir=data_dir, durability=durability)

    assert caught.value.exit_code == 11
    assert f"{path} has format 4, but this release reads formats up to 1. Try: the release" in str(
        caught.value
    )
    assert contents(data_dir) == before


def test_a_new_job_moves_newer_snapshots_aside(cluster: Make, tmp_path: Path) -> None:
    data_dir = unpack("sync-adam-1", tmp_path)
    path = with_newer_manifest(data_dir)
    cluster(1, data_dir=data_dir, resume="never").close()

    assert [aside.name for aside in data_dir.glob(f"snapshots/{path.parent.name}.*")] == [
        f"{path.parent.name}.aside-1"
    ]
    cluster(1, data_dir=data_dir)


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
