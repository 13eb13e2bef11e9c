"""Settings of ps-server for place, job and snapshots change what a server does."""

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.snapshot import SnapshotDirectory
from pscommon.wire.endpoint import Endpoint, open_channel
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from psproto.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from psserver.server import Server
from tests.support.ports import free_port, free_port_below
from tests.support.settings_coverage import server_setting
from tests.support.settings_server import Serve
from tests.support.workers import (
    DEADLINE,
    ONES,
    connected,
    count,
    counted,
    counter,
    snapshots,
    status,
    until,
)


def stop(server: Server) -> None:
    """Stop with the last snapshot."""
    server.stop("enough")
    assert server.ended.wait(30)


# ---- place ---------------------------------------------------------------------------------------


@server_setting("shard", "join")
def test_shard_and_join(serve: Serve) -> None:
    leader = serve("--shard", "0/2")
    assert status_of(leader)["state"] == "waiting for servers"

    other = serve("--shard", "1/2", "--join", leader.address)

    until(lambda: status_of(leader)["state"] == "waiting for a model", "a second server")
    assert [row["address"] for row in status_of(leader)["servers"]] == [
        leader.address,
        other.address,
    ]


def status_of(server: Server) -> dict[str, Any]:
    """Return the status, also while servers are missing."""
    with closing(open_channel(Endpoint(server.address))) as channel:
        answer = CoordinatorServiceStub(channel).GetStatus(co.GetStatusRequest(), timeout=20)
    found: dict[str, Any] = json.loads(answer.status_json)
    return found


@server_setting("bind")
def test_bind(serve: Serve) -> None:
    port = free_port()

    assert serve("--bind", f"127.0.0.1:{port}").address == f"127.0.0.1:{port}"
    with connected(f"127.0.0.1:{port}"):
        pass


@server_setting("advertise")
def test_advertise(serve: Serve) -> None:
    port = free_port()
    serve("--bind", f"0.0.0.0:{port}", "--insecure", "--advertise", f"localhost:{port}")

    assert status(f"127.0.0.1:{port}")["servers"][0]["address"] == f"localhost:{port}"


@server_setting("stream_bind", "advertise_stream")
def test_the_stream_port(serve: Serve) -> None:
    port = free_port()
    server = serve("--stream-bind", f"127.0.0.1:{port}")
    advertised = serve(
        "--stream-bind", "0.0.0.0:0", "--insecure", "--advertise-stream", f"localhost:{port}"
    )

    assert describe(server.address).stream_address == f"127.0.0.1:{port}"
    assert describe(advertised.address).stream_address == f"localhost:{port}"


@server_setting("bind", "advertise", "stream_bind")
def test_the_stream_port_by_default(serve: Serve) -> None:
    """1000 above the port of --bind, on the host of --advertise."""
    port, bound = free_port_below(1000), free_port()
    server = serve("--bind", f"0.0.0.0:{port}", "--insecure", "--advertise", f"localhost:{port}")
    other = serve("--stream-bind", f"0.0.0.0:{bound}", "--insecure", "--advertise", "localhost:1")

    assert describe(server.address).stream_address == f"localhost:{port + 1000}"
    assert describe(other.address).stream_address == f"localhost:{bound}"
    socket.create_connection(("127.0.0.1", port + 1000), 10.0).close()
    socket.create_connection(("127.0.0.1", bound), 10.0).close()


def describe(address: str) -> ps.DescribeResponse:
    with open_channel(Endpoint(address)) as channel:
        return ParameterServerServiceStub(channel).Describe(ps.DescribeRequest(), timeout=10)


@server_setting("join_timeout")
def test_join_timeout(serve: Serve) -> None:
    unused_address = f"127.0.0.1:{free_port()}"

    server = serve("--shard", "1/2", "--join", unused_address, "--join-timeout", "300ms")

    assert server.ended.wait(30)
    assert server.failure is not None
    assert server.failure.exit_code == 20
    assert unused_address in str(server.failure)


@server_setting("port_file")
def test_port_file(serve: Serve, tmp_path: Path) -> None:
    mine = tmp_path / "port.tmp"
    mine.write_text("something else")
    server = serve("--port-file", tmp_path / "port.0")

    assert (tmp_path / "port.0").read_text() == server.address.rpartition(":")[2] + "\n"
    server.close()
    assert list(tmp_path.iterdir()) == [mine]
    assert mine.read_text() == "something else"


def test_a_pipe_as_port_file_is_not_replaced_and_blocks_no_server(
    serve: Serve, tmp_path: Path
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    server = serve("--port-file", path)

    assert path.read_text() == server.address.rpartition(":")[2] + "\n"
    server.close()
    assert path.is_fifo()


# ---- job -----------------------------------------------------------------------------------------


def pushes_alone(address: str) -> int:
    """Return how many pushes of one worker count, up to 4, while another one pushes nothing."""
    with (
        ThreadPoolExecutor(1) as pool,
        counter(address, rank=0) as quick,
        counter(address, rank=1) as other,
    ):
        pushing = pool.submit(count, quick, 4)

        def waits() -> bool:
            waiting_for = status(address)["waiting_for"]
            return "rank 1" in waiting_for and "rank 0" not in waiting_for

        until(lambda: pushing.done() or waits(), "all pushes, or a waiting push")
        made: int = status(address)["workers"][0]["steps"]
        other.leave("enough")  # ends the wait of the first worker
        pushing.result(DEADLINE)
        return made


@server_setting("policy", "staleness")
@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        (["--policy", "sync"], 0),
        (["--policy", "async"], 4),
        (["--policy", "ssp", "--staleness", 1], 1),
        (["--policy", "ssp", "--staleness", 2], 2),
    ],
)
def test_policy_and_staleness_bound_the_progress_of_a_single_worker(
    serve: Serve, flags: list[object], steps: int
) -> None:
    assert pushes_alone(serve("--min-workers", 2, *flags).address) == steps


@server_setting("max_staleness")
@pytest.mark.parametrize(("flags", "outcome"), [([], "applied"), (["--max-staleness", 1], "stale")])
def test_max_staleness(serve: Serve, flags: list[object], outcome: str) -> None:
    address = serve("--policy", "async", *flags).address
    with counter(address) as quick, counter(address) as slow:
        slow.pull()
        count(quick, 2)

        assert slow.push(ONES).status == outcome


@server_setting("min_workers")
@pytest.mark.parametrize(
    ("flags", "state"), [([], "running"), (["--min-workers", 2], "waiting for workers")]
)
def test_min_workers(serve: Serve, flags: list[object], state: str) -> None:
    address = serve(*flags).address
    with counter(address):
        assert status(address)["state"] == state


@server_setting("max_workers")
@pytest.mark.parametrize(("flags", "admitted"), [([], 2), (["--max-workers", 1], 1)])
def test_max_workers(serve: Serve, flags: list[object], admitted: int) -> None:
    """A restarted worker takes the place of its rank."""
    address = serve(*flags).address
    with counter(address, rank=0):
        with ExitStack() as stack:
            if admitted == 1:
                stack.enter_context(pytest.raises(InvalidRequestError, match="--max-workers"))
            with counter(address, rank=1):
                pass
        with counter(address, rank=0, wait_timeout=5.0):
            pass


@server_setting("lease")
def test_lease(serve: Serve) -> None:
    server = serve("--lease", "200ms")
    silent_joins(server)

    until(
        lambda: status_of(server)["workers"][0]["state"] == "lost",
        "a worker that was dropped",
        seconds=4,
    )


def silent_joins(server: Server) -> None:
    """Join as a worker that stays silent."""
    with closing(open_channel(Endpoint(server.address))) as channel:
        CoordinatorServiceStub(channel).Join(co.JoinRequest(format=3), timeout=20)


@server_setting("job")
def test_job(serve: Serve) -> None:
    assert status_of(serve("--job", "otter"))["job"] == "otter"
    assert status_of(serve())["job"] not in ("", "otter")


@server_setting("exit_when_done")
@pytest.mark.parametrize(("flags", "ends"), [([], False), (["--exit-when-done"], True)])
def test_exit_when_done(serve: Serve, flags: list[object], ends: bool) -> None:
    server = serve(*flags)
    with counter(server.address) as client:
        count(client)

    assert server.ended.wait(30 if ends else 1) is ends


# ---- snapshots -----------------------------------------------------------------------------------


@server_setting("data_dir")
def test_data_dir(serve: Serve, tmp_path: Path) -> None:
    server = serve("--data-dir", tmp_path / "job")
    with counter(server.address) as client:
        count(client)
    stop(server)

    assert SnapshotDirectory(tmp_path / "job").versions() == [1]


@server_setting("snapshot_every")
@pytest.mark.parametrize(("every", "wanted"), [("2steps", [2]), ("1h", []), ("3steps", [3])])
def test_snapshot_every(serve: Serve, tmp_path: Path, every: str, wanted: list[int]) -> None:
    server = serve("--data-dir", tmp_path, "--snapshot-every", every)
    with counter(server.address) as client:
        count(client, 3)

    until(lambda: snapshots(server.address) == wanted, f"{wanted}")


@server_setting("snapshot_keep")
@pytest.mark.parametrize("keep", [1, 2])
def test_snapshot_keep(serve: Serve, tmp_path: Path, keep: int) -> None:
    server = serve("--data-dir", tmp_path, "--snapshot-every", "1steps", "--snapshot-keep", keep)
    with counter(server.address) as client:
        for version in (1, 2, 3):
            count(client)
            until(lambda version=version: version in snapshots(server.address), "a snapshot")

        # older snapshots are removed after the new one is complete
        until(lambda: len(snapshots(server.address)) <= keep, "the end of older snapshots")
        assert snapshots(server.address) == [1, 2, 3][-keep:]


@server_setting("resume")
@pytest.mark.parametrize(
    ("flags", "version"), [([], 2), (["--resume", "never"], 0), (["--resume", 1], 1)]
)
def test_resume(serve: Serve, tmp_path: Path, flags: list[object], version: int) -> None:
    first = serve("--data-dir", tmp_path, "--snapshot-every", "1steps")
    with counter(first.address) as client:
        for wanted in (1, 2):
            count(client)
            until(lambda wanted=wanted: wanted in snapshots(first.address), "a snapshot")
    first.close()

    with counter(serve("--data-dir", tmp_path, *flags).address) as client:
        assert counted(client.pull()) == version
