"""Settings of a ps-server process: lanes, memory, metrics, threads and logs."""

import json
import platform
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.system.process_limits import usable_memory
from pscommon.system.thread_team import cores
from pscommon.wire.endpoint import Endpoint, open_channel
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from psproto.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from psworker import OptimizerSpec
from tests.support.malloc_probe import MAPPED
from tests.support.metrics_scrape import get
from tests.support.ports import free_port
from tests.support.programs import Program, programs_in
from tests.support.settings_coverage import server_setting
from tests.support.settings_server import Serve
from tests.support.workers import (
    connected,
    count,
    counter,
    until,
)


@server_setting("lanes")
@pytest.mark.parametrize(
    ("flags", "taken"),
    [
        ([], {"grpc", "stream", "shm"}),
        (["--lanes", "grpc"], {"grpc"}),
        (["--lanes", "stream"], {"grpc", "stream"}),
        (["--lanes", "shm"], {"shm"}),
    ],
)
def test_lanes(serve: Serve, flags: list[object], taken: set[str]) -> None:
    """Push over each lane alone; the server's description lists those that it takes."""
    for lanes in ("grpc", "stream", "shm"):
        server = serve(*flags)
        assert trained(server.address, lanes=lanes) == ("taken" if lanes in taken else "refused")
    with open_channel(Endpoint(server.address)) as channel:
        described = ParameterServerServiceStub(channel).Describe(ps.DescribeRequest(), timeout=10)
    assert set(described.features) == taken


def trained(address: str, **options: Any) -> str:
    try:
        with counter(address, **options) as client:
            count(client)
    except InvalidRequestError as error:
        return "refused" if "--lanes" in str(error) or "--in-flight" in str(error) else str(error)
    return "taken"


@server_setting("in_flight")
@pytest.mark.parametrize(
    ("flags", "expected"),
    [([], "taken"), (["--in-flight", 960], "taken"), (["--in-flight", 959], "refused")],
)
def test_in_flight(serve: Serve, flags: list[object], expected: str) -> None:
    """A push of the counters' two tensors has 512 and 448 bytes."""
    assert trained(serve(*flags).address) == expected


def test_half_of_the_memory_may_be_in_flight(serve: Serve) -> None:
    assert serve().engine.traffic.budget.limit == usable_memory() // 2


@server_setting("metrics_bind")
def test_metrics_bind(serve: Serve) -> None:
    address = f"127.0.0.1:{free_port()}"
    serve("--metrics-bind", address)

    assert get(address, "/livez").status == 200


# Runs ps-server and prints at its end how malloc maps large buffers.
SERVER = f"""
{MAPPED}
import sys
from psserver import cli
code = cli.main(sys.argv[1:])
print("mapped", mapped())
sys.exit(code)
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Program, Program]]:
    """Run two server processes with different settings until each has lost a worker and ended."""
    variants = {
        "text": ("--log-format", "text"),
        "json": ("--log-level", "warning", "--log-format", "json"),
    }
    with programs_in(tmp_path_factory.mktemp("servers")) as programs:
        started = []
        for name, flags in variants.items():
            own = ("--bind", "127.0.0.1:0", "--port-file", name, "--lease", "200ms")
            started.append(programs.start("python", "-c", SERVER, *own, *flags))
        for server, name in zip(started, variants, strict=True):
            path = programs.folder / name
            until(path.exists, "a port", seconds=60)
            with closing(
                open_channel(Endpoint(f"127.0.0.1:{path.read_text().strip()}"))
            ) as channel:
                CoordinatorServiceStub(channel).Join(co.JoinRequest(format=3), timeout=20)
            server.wait_for("worker_lost")
            server.send(signal.SIGTERM)
            assert server.wait() == 143, server.output
        yield started[0], started[1]


@server_setting("threads")
@pytest.mark.parametrize(
    ("flags", "limit"), [(("--threads", 3), 2), (("--threads", 1), 0), ((), min(4, cores()) - 1)]
)
def test_threads(flags: tuple[object, ...], limit: int, serve: Serve) -> None:
    """Count the threads of a large update besides the answering one."""
    before, large = set(threading.enumerate()), {"w": np.ones(4 << 20, np.float32)}
    with connected(serve(*flags).address) as client:
        client.register(large, OptimizerSpec("sgd", lr=1.0))
        client.push(large)
        team = [
            each
            for each in threading.enumerate()
            if each not in before and each.name.startswith("team")
        ]

        assert len(team) <= limit
        assert bool(team) == bool(limit)


@pytest.mark.full
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_large_buffers_are_reused(two: tuple[Program, Program]) -> None:
    assert [server.out.splitlines()[0] for server in two] == ["mapped False", "mapped False"]


@pytest.mark.full
@server_setting("log_level")
def test_log_level(two: tuple[Program, Program]) -> None:
    assert ["listening" in server.err for server in two] == [True, False]


@pytest.mark.full
@server_setting("log_format")
def test_log_format(two: tuple[Program, Program]) -> None:
    text, lines = (server.err.splitlines() for server in two)

    assert any("[warning] worker_lost" in line for line in text)
    assert [json.loads(line)["event"] for line in lines] == ["worker_lost"]
