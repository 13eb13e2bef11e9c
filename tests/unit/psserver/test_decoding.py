"""Messages that cannot be decoded: the caller gets a reason, the log one line, and the server
continues.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress

import grpc
import pytest

from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.status import error_from
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from tests.support.cluster import Cluster, cluster  # a fixture  # noqa: F401
from tests.support.events import event_key, events
from tests.support.workers import until

GARBAGE = b"\xff\xff\xff\xffgarbage"
UNARY = [
    "CoordinatorService/Join",
    "CoordinatorService/GetStatus",
    "ParameterServerService/Describe",
    "ShardService/ReadShard",
]


@pytest.fixture
def channel(cluster: Callable[..., Cluster]) -> Iterator[grpc.Channel]:  # noqa: F811
    with open_channel(Endpoint(cluster(1).address)) as channel:
        yield channel


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Collect the methods of which an undecodable message was logged; nothing else may be
    logged.
    """
    records = [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert {event_key(record) for record in records} <= {"message_undecodable"}
    assert [record.exc_info for record in records if record.exc_info] == []
    assert all(record.__dict__["peer"].startswith("ipv4:") for record in records)
    return [record.__dict__["method"] for record in records]


@pytest.mark.parametrize("method", UNARY)
def test_an_undecodable_request_is_refused_with_one_log_line(
    channel: grpc.Channel, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    path = f"/psproto.v1.{method}"
    streams = method.endswith("ReadShard")
    for _ in range(3):
        with pytest.raises(grpc.RpcError) as raised:
            next(
                channel.unary_stream(path)(GARBAGE, timeout=10)
            ) if streams else channel.unary_unary(path)(GARBAGE)
        error = error_from(raised.value, "the server")
        assert (error.reason, error.exit_code) == ("INVALID_REQUEST", 2)
        assert f"{method.partition('/')[2]}Request" in str(error)

    assert lines(caplog) == [path]
    assert (
        ParameterServerServiceStub(channel).Describe(ps.DescribeRequest(), timeout=10).shards == 1
    )


@pytest.mark.parametrize("method", ["CoordinatorService/LinkShard", "StandbyService/Replicate"])
def test_a_stream_with_an_undecodable_message_ends(
    channel: grpc.Channel, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    call = channel.stream_stream(f"/psproto.v1.{method}")
    with pytest.raises(grpc.RpcError) as raised:
        list(call(iter([GARBAGE]), timeout=10))

    assert raised.value.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.INVALID_ARGUMENT)
    assert lines(caplog) == [f"/psproto.v1.{method}"]


def test_a_stream_ends_at_a_later_undecodable_message(
    channel: grpc.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    call = channel.stream_stream("/psproto.v1.CoordinatorService/LinkShard")
    # the first message is valid, so the server reads the next one
    request = co.LinkShardRequest(format=3, shard=1, shards=2, address="h:1", instance="i")
    with suppress(grpc.RpcError):
        list(call(iter([request.SerializeToString(), GARBAGE]), timeout=10))
    until(lambda: "message_undecodable" in events(caplog), "a log line")
    assert not any(record.exc_info for record in caplog.records)
