"""All requests between the processes of a job: one row for each RPC of proto/psproto/v1.

Clients call a row (`call`, `stub`), servers bind a handler to it (psserver/process/handlers.py).
docs/reference/requests.md shows the table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import grpc
from google.protobuf.message import Message

from pscommon.wire.status import translated
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1 import shard_pb2, standby_pb2, stream_pb2

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)
Sender = Literal["worker", "server", "admin", "read"]


@dataclass(frozen=True, eq=False)
class Request(Generic[Q, A]):
    """One RPC. There is one value for each, so they are compared by identity.

    Attributes:
        request: Type of the message that is sent.
        response: Type of the answer.
        senders: Who may send it. Not enforced yet.
        may_wait: The server may hold the call until it can answer.
        may_repeat: A worker that gets no answer sends the message again.
        is_framed: Messages are encoded by hand (frames.py).
        name: Its name; by default that of the message.
        service: Full name of its service.
        kind: Which messages are streams, as in the names of gRPC's functions.
    """

    request: type[Q]
    response: type[A]
    senders: frozenset[Sender]
    may_wait: bool = False
    may_repeat: bool = False
    is_framed: bool = False
    name: str = ""
    service: str = field(init=False)
    kind: str = field(init=False)

    def __post_init__(self) -> None:
        (service,) = self.request.DESCRIPTOR.file.services_by_name.values()
        name = self.name or self.request.__name__.removesuffix("Request")
        method = service.methods_by_name[name]
        streams = method.client_streaming, method.server_streaming
        kind = "_".join("stream" if each else "unary" for each in streams)
        for attribute, value in (("name", name), ("service", service.full_name), ("kind", kind)):
            object.__setattr__(self, attribute, value)

    @property
    def path(self) -> str:
        """Its name in gRPC."""
        return f"/{self.service}/{self.name}"

    def __repr__(self) -> str:
        return f"{self.service.rpartition('.')[2]}.{self.name}"


AnyRequest = Request[Any, Any]

WORKER = frozenset[Sender]({"worker"})
SERVER = frozenset[Sender]({"server"})
ADMIN = frozenset[Sender]({"admin"})
READ = frozenset[Sender]({"worker", "read"})
SHOWN = READ | ADMIN

JOIN = Request(co.JoinRequest, co.JoinResponse, WORKER, may_wait=True, may_repeat=True)
REGISTER = Request(co.RegisterRequest, co.RegisterResponse, SHOWN, may_wait=True, may_repeat=True)
# the next heartbeat takes the place of one without an answer
HEARTBEAT = Request(co.HeartbeatRequest, co.HeartbeatResponse, WORKER)
REPORT_EXIT = Request(co.ReportExitRequest, co.ReportExitResponse, ADMIN)
# the end of the lease takes the place of one without an answer
LEAVE = Request(co.LeaveRequest, co.LeaveResponse, WORKER)
NEXT_BATCH = Request(
    co.NextBatchRequest, co.NextBatchResponse, WORKER, may_wait=True, may_repeat=True
)
RETURN_BATCHES = Request(co.ReturnBatchesRequest, co.ReturnBatchesResponse, WORKER, may_repeat=True)
COLLECTIVE = Request(
    co.CollectiveRequest, co.CollectiveResponse, WORKER, may_wait=True, may_repeat=True
)
REPORT_METRICS = Request(co.ReportMetricsRequest, co.ReportMetricsResponse, WORKER, may_repeat=True)
GET_HISTORY = Request(co.GetHistoryRequest, co.GetHistoryResponse, SHOWN - WORKER)
GET_STATUS = Request(co.GetStatusRequest, co.GetStatusResponse, SHOWN, may_repeat=True)
SAVE_SNAPSHOT = Request(co.SaveSnapshotRequest, co.SaveSnapshotResponse, ADMIN, may_wait=True)
DRAIN = Request(co.DrainRequest, co.DrainResponse, ADMIN)
RESTORE_SNAPSHOT = Request(
    co.RestoreSnapshotRequest, co.RestoreSnapshotResponse, ADMIN, may_wait=True
)
SET_POLICY = Request(co.SetPolicyRequest, co.SetPolicyResponse, ADMIN)
RESHARD = Request(co.ReshardRequest, co.ReshardResponse, ADMIN, may_wait=True)
STOP_JOB = Request(co.StopJobRequest, co.StopJobResponse, ADMIN)
LINK_SHARD = Request(co.LinkShardRequest, co.LinkShardResponse, SERVER, may_wait=True)

DESCRIBE = Request(ps.DescribeRequest, ps.DescribeResponse, SHOWN | SERVER, may_repeat=True)
INTRODUCE = Request(ps.IntroduceRequest, ps.IntroduceResponse, SHOWN)
EXCHANGE = Request(
    ps.ExchangeRequest, ps.ExchangeResponse, READ, may_wait=True, may_repeat=True, is_framed=True
)
EXCHANGE_ONCE = Request(
    ps.ExchangeRequest,
    ps.ExchangeResponse,
    READ,
    may_wait=True,
    may_repeat=True,
    is_framed=True,
    name="ExchangeOnce",
)
# the next exchange makes a new offer
ATTACH_MEMORY = Request(ps.AttachMemoryRequest, ps.AttachMemoryResponse, READ)

READ_SHARD = Request(shard_pb2.ReadShardRequest, shard_pb2.ReadShardResponse, SERVER, may_wait=True)

REPLICATE = Request(
    standby_pb2.ReplicateRequest, standby_pb2.ReplicateResponse, SERVER, may_wait=True
)
STEP_DOWN = Request(
    standby_pb2.StepDownRequest, standby_pb2.StepDownResponse, SERVER, may_wait=True
)
PROMOTE = Request(standby_pb2.PromoteRequest, standby_pb2.PromoteResponse, ADMIN, may_wait=True)

REQUESTS: tuple[AnyRequest, ...] = tuple(
    row for row in list(globals().values()) if isinstance(row, Request)
)
"""All rows, in the order of the proto files."""

STREAM_FIELDS: Mapping[AnyRequest, str] = {
    row: each.name
    for each in stream_pb2.CoordinatorRequest.DESCRIPTOR.fields
    for row in REQUESTS
    if row.request.DESCRIPTOR is each.message_type
}
"""What workers send over streams where they can, and the field of a CoordinatorRequest for it."""


def stub(channel: grpc.Channel, row: AnyRequest) -> Any:
    """Return gRPC's function that makes calls of this row. The channel must be open."""
    encode, decode = (
        (None, None) if row.is_framed else (row.request.SerializeToString, row.response.FromString)
    )
    return getattr(channel, row.kind)(row.path, encode, decode)


def call(channel: grpc.Channel, row: Request[Q, A], message: Q, timeout: float, who: str) -> A:
    """Return the answer to a request.

    Args:
        timeout: Deadline in seconds.
        who: Names the server, for errors.

    Raises:
        PSError: The server has answered with an error, or not in time.
    """
    with translated(who):
        answer: A = stub(channel, row)(message, timeout=timeout)
    return answer
