"""A push that names its parts: the bytes arrive, are logged and are replayed in their order."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.frames import encode_data, encode_header
from pscommon.wire.stream_format import FrameKind
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from psserver.server import Server
from psworker import OptimizerSpec
from tests.support.cluster import Cluster
from tests.support.light_client import LightClient, join
from tests.support.wire_calls import exchange
from tests.support.workers import connected

Make = Callable[..., Cluster]

FLOATS = 64
VALUES = np.arange(FLOATS, dtype=np.float32)
DATA = VALUES.tobytes()
CUT = 96
MODEL = ModelSpec(
    (TensorSpec("w", (FLOATS,), "float32"),), OptimizerSettings("sgd", ({"lr": 1.0},))
)
RAW = {"target": ps.TARGET_MODEL, "encoding": ps.ENCODING_RAW}
PARTS = [
    ps.Part(ranges=[CUT, len(DATA)], **RAW),  # type: ignore[arg-type]
    ps.Part(ranges=[32, CUT, 0, 32], **RAW),  # type: ignore[arg-type]
]
IN_ORDER_OF_PARTS = DATA[CUT:] + DATA[32:CUT] + DATA[:32]


def push_over_stream(server: Server, joined: co.JoinResponse) -> None:
    client = LightClient(joined, server.identity.stream_address)
    with closing(client.sock):
        client.begin_push(1, len(DATA), parts=PARTS)
        client.sock.sendall(IN_ORDER_OF_PARTS)
        kind, message, _ = client.answer()
    assert kind is FrameKind.RESULT
    assert ps.ExchangeResult.FromString(message).outcome == ps.OUTCOME_APPLIED


def push_over_grpc(server: Server, joined: co.JoinResponse) -> None:
    header = ps.PushPullHeader(
        job=joined.job,
        worker=joined.worker,
        seq=1,
        has_data=True,
        samples=1,
        parts=PARTS,
        pull=ps.PULL_NONE,
        wait_ms=20_000,
    )
    with closing(open_channel(Endpoint(server.address))) as channel:
        frames = [encode_header(header), encode_data(memoryview(IN_ORDER_OF_PARTS))]
        (answer,) = exchange(channel, frames, joined.key)
    assert ps.ExchangeResponse.FromString(answer).header.outcome == ps.OUTCOME_APPLIED


def weights(servers: Cluster) -> list[float]:
    with connected(servers.address, observe=True) as observer:
        return observer.pull()["w"].tolist()


@pytest.mark.parametrize("push", [push_over_stream, push_over_grpc])
def test_named_parts_have_their_bytes_in_any_order(
    cluster: Make, tmp_path: Path, push: Callable[[Server, co.JoinResponse], None]
) -> None:
    lasting = {"policy": "async", "durability": "log", "data_dir": tmp_path}
    servers = cluster(1, **lasting)
    with connected(servers.address) as first:
        first.register({"w": np.zeros(FLOATS, np.float32)}, OptimizerSpec("sgd", lr=1.0))
        with closing(open_channel(Endpoint(servers.address))) as channel:
            joined = join(CoordinatorServiceStub(channel), servers.servers[0].identity.job, MODEL)
        push(servers.servers[0], joined)
        assert weights(servers) == (-VALUES).tolist()

    servers.close()
    assert weights(cluster(1, **lasting)) == (-VALUES).tolist()
