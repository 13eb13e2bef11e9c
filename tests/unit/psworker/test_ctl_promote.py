"""ps-ctl promote: its request, output and refusals; standbys in the status."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import grpc
import pytest

from pscommon.core.errors import MismatchError
from pscommon.wire.endpoint import SERVER_OPTIONS
from psproto.v1 import standby_pb2 as pb
from psserver.process.handlers import grpc_handler
from psserver.replication.handlers import primary_handlers, standby_handlers
from psworker.ctl import views
from psworker.ctl.cli import main

Output = pytest.CaptureFixture[str]
Serve = Callable[[Callable[[float], pb.PromoteResponse] | None], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a standby (None: a primary) that answers Promote like this; return its address."""
    servers = []

    def start(promote: Callable[[float], pb.PromoteResponse] | None) -> str:
        server = grpc.server(ThreadPoolExecutor(2), options=SERVER_OPTIONS)
        handlers = (
            standby_handlers(promote) if promote else primary_handlers(Mock(), Mock(), Mock())
        )
        server.add_generic_rpc_handlers((grpc_handler(handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(None).wait(10)


def test_promote_prints_the_new_primary(serve: Serve, capsys: Output) -> None:
    asked: list[float] = []

    def promote(seconds: float) -> pb.PromoteResponse:
        asked.append(seconds)
        return pb.PromoteResponse(term=3, version=12, note="the primary did not answer")

    address = serve(promote)

    assert main(["promote", address, "--output", "json"]) == 0
    document = {"primary": address, "term": 3, "version": 12, "note": "the primary did not answer"}
    assert json.loads(capsys.readouterr().out) == document
    assert asked == [10.0]


def test_a_refusal_is_printed_with_its_remedy(serve: Serve, capsys: Output) -> None:
    def promote(seconds: float) -> pb.PromoteResponse:
        raise MismatchError(
            "this standby is behind: wait until ps-ctl status shows it in sync", "NOT_IN_SYNC"
        )

    assert main(["promote", serve(promote)]) == 11
    assert "wait until ps-ctl status shows it in sync" in capsys.readouterr().err


def test_promoting_a_primary_is_a_usage_error(serve: Serve, capsys: Output) -> None:
    assert main(["promote", serve(None)]) == 2
    assert "this server is primary of its shard" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("server", "shown"),
    [
        ({}, ""),
        ({"standby": "", "standby_state": "none"}, ""),
        ({"standby": "h:1", "standby_state": "in sync", "standby_behind": 0}, "h:1 in sync"),
        (
            {"standby": "h:1", "standby_state": "loading", "standby_behind": 7},
            "h:1 loading, 7 records behind",
        ),
    ],
)
def test_the_status_shows_standbys(server: dict[str, object], shown: str) -> None:
    assert views.servers({"servers": [server]}).rows[0][-1] == shown
