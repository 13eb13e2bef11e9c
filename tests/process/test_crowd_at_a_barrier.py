"""Two thousand workers that wait for a round or at a barrier cost a server sockets, not threads."""

import resource
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.system.process_limits import raise_file_limit
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.stream_format import FrameKind
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from psproto.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from psworker import Client
from psworker.core.results import CollectiveCall
from tests.support.light_client import LightClient, join
from tests.support.programs import Program, Programs, programs_in
from tests.support.workers import until

CLIENTS = 2000
FLOATS = 64
MODEL = ModelSpec(
    (TensorSpec("w", (FLOATS,), "float32"),), OptimizerSettings("sgd", ({"lr": 1.0},))
)

pytestmark = pytest.mark.full


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as programs:
        yield programs


def usage(server: Program) -> tuple[float, int]:
    """Return MiB of memory and the number of threads of a process."""
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["VmRSS"].split()[0]) / 1024, int(fields["Threads"])


def test_waiting_workers_occupy_no_threads(programs: Programs) -> None:
    if raise_file_limit() < CLIENTS + 200:
        pytest.skip(f"the limit of open files is {resource.getrlimit(resource.RLIMIT_NOFILE)}")
    port = programs.folder / "port"
    flags = ("--bind", "127.0.0.1:0", "--port-file", port, "--lease", "10m")
    server = programs.start("ps-server", *flags)
    until(port.exists, "a port")
    address = f"127.0.0.1:{port.read_text().strip()}"
    with ExitStack() as stack:
        first = stack.enter_context(Client(address))
        first.register(
            {"w": np.zeros(FLOATS, np.float32)}, OptimizerSettings("sgd", ({"lr": 1.0},))
        )
        channel = stack.enter_context(closing(open_channel(Endpoint(address))))
        stub = CoordinatorServiceStub(channel)
        described = ParameterServerServiceStub(channel).Describe(ps.DescribeRequest())

        def add(count: int) -> list[LightClient]:
            added = [
                LightClient(join(stub, described.job, MODEL), described.stream_address)
                for _ in range(count)
            ]
            for client in added:
                stack.callback(client.sock.close)
                client.push(1, FLOATS)
            return added

        clients = add(1)
        before = usage(server)
        clients += add(CLIENTS - 1)
        waiting = usage(server)
        first.push({"w": np.ones(FLOATS, np.float32)})

        for client in clients:
            kind, message, data = client.answer()
            result = ps.ExchangeResult.FromString(message)
            assert (kind, result.outcome) == (FrameKind.RESULT, ps.OUTCOME_APPLIED)
            assert np.frombuffer(data, np.float32)[0] == pytest.approx(-1.0, rel=1e-4)

        for client in clients:
            client.enter_barrier(1)
        at_barrier = usage(server)
        assert first.collective(1, CollectiveCall("barrier"), 0).values == {}
        for client in clients:
            kind, message, _ = client.answer()
            assert (kind, co.CollectiveResponse.FromString(message).done) == (
                FrameKind.RESULT,
                True,
            )
    for now in (waiting, at_barrier):
        memory, threads = now[0] - before[0], now[1] - before[1]
        print(f"\n{CLIENTS} waiting clients: {memory:.0f} MiB and {threads} threads more than one")
        assert memory <= 100
        assert threads <= 100
