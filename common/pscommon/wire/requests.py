"""All requests between the processes of a job: one row for each RPC of proto/psproto/v1.

Clients call a row (`call`, `Stub`), servers bind a handler to it (psserver/process/handlers.py).
docs/reference/requests.md shows the table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from pscommon.security.credentials import process_credentials
from pscommon.security.tokens import Role, token_for
from pscommon.wire.status import translated
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1 import shard_pb2, standby_pb2, stream_pb2

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)


@dataclass(frozen=True, eq=False)
class Request(Generic[Q, A]):
    """One RPC. There is one value for each, so they are compared by identity.

    Attributes:
        request: Type of the message that is sent.
        response: Type of the answer.
        role: The role that may send it; admin may send everything, and every role what read may.
        may_wait: The server may hold the call until it can answer.
        may_repeat: A worker that gets no answer sends the message again.
        is_framed: Messages are encoded by hand (frames.py).
        names_sender: The message names the worker that sends it, whose key is checked.
        name: Its name; by default that of the message.
        service: Full name of its service.
        kind: Which messages are streams, as in the names of gRPC's functions.
    """

    request: type[Q]
    response: type[A]
    role: Role
    may_wait: bool = False
    may_repeat: bool = False
    is_framed: bool = False
    name: str = ""
    service: str = field(init=False)
    kind: str = field(init=False)
    names_sender: bool = field(init=False)

    def __post_init__(self) -> None:
        (service,) = self.request.DESCRIPTOR.file.services_by_name.values()
        name = self.name or self.request.__name__.removesuffix("Request")
        method = service.methods_by_name[name]
        streams = method.client_streaming, method.server_streaming
        kind = "_".join("stream" if each else "unary" for each in streams)
        has_worker = self.is_framed or "worker" in self.request.DESCRIPTOR.fields_by_name
        values = {
            "name": name,
            "service": service.full_name,
            "kind": kind,
            "names_sender": has_worker and self.role in ("worker", "read"),
        }
        for attribute, value in values.items():
            object.__setattr__(self, attribute, value)

    @property
    def path(self) -> str:
        """Its name in gRPC."""
        return f"/{self.service}/{self.name}"

    def __repr__(self) -> str:
        return f"{self.service.rpartition('.')[2]}.{self.name}"


AnyRequest = Request[Any, Any]

TOKEN_KEY = "authorization"
"""Key of the metadata with the token, as in HTTP: "Bearer TOKEN"."""

WORKER_KEY = "ps-worker-key-bin"
"""Key of the metadata with the sending worker's own key."""

JOIN = Request(co.JoinRequest, co.JoinResponse, "worker", may_wait=True, may_repeat=True)
REGISTER = Request(co.RegisterRequest, co.RegisterResponse, "read", may_wait=True, may_repeat=True)
# the next heartbeat takes the place of one without an answer
HEARTBEAT = Request(co.HeartbeatRequest, co.HeartbeatResponse, "worker")
REPORT_EXIT = Request(co.ReportExitRequest, co.ReportExitResponse, "admin")
# the end of the lease takes the place of one without an answer
LEAVE = Request(co.LeaveRequest, co.LeaveResponse, "worker")
NEXT_BATCH = Request(
    co.NextBatchRequest, co.NextBatchResponse, "worker", may_wait=True, may_repeat=True
)
RETURN_BATCHES = Request(
    co.ReturnBatchesRequest, co.ReturnBatchesResponse, "worker", may_repeat=True
)
COLLECTIVE = Request(
    co.CollectiveRequest, co.CollectiveResponse, "worker", may_wait=True, may_repeat=True
)
REDUCE = Request(co.ReduceRequest, co.ReduceResponse, "worker", may_wait=True, may_repeat=True)
REPORT_METRICS = Request(
    co.ReportMetricsRequest, co.ReportMetricsResponse, "worker", may_repeat=True
)
GET_HISTORY = Request(co.GetHistoryRequest, co.GetHistoryResponse, "read")
GET_STATUS = Request(co.GetStatusRequest, co.GetStatusResponse, "read", may_repeat=True)
GET_TRACE = Request(co.GetTraceRequest, co.GetTraceResponse, "read")
SAVE_SNAPSHOT = Request(co.SaveSnapshotRequest, co.SaveSnapshotResponse, "admin", may_wait=True)
DRAIN = Request(co.DrainRequest, co.DrainResponse, "admin")
SCALE_WORKERS = Request(co.ScaleWorkersRequest, co.ScaleWorkersResponse, "admin")
RESTORE_SNAPSHOT = Request(
    co.RestoreSnapshotRequest, co.RestoreSnapshotResponse, "admin", may_wait=True
)
SET_POLICY = Request(co.SetPolicyRequest, co.SetPolicyResponse, "admin")
RESHARD = Request(co.ReshardRequest, co.ReshardResponse, "admin", may_wait=True)
STOP_JOB = Request(co.StopJobRequest, co.StopJobResponse, "admin")
LINK_SHARD = Request(co.LinkShardRequest, co.LinkShardResponse, "server", may_wait=True)

DESCRIBE = Request(ps.DescribeRequest, ps.DescribeResponse, "read", may_repeat=True)
INTRODUCE = Request(ps.IntroduceRequest, ps.IntroduceResponse, "worker")
EXCHANGE = Request(
    ps.ExchangeRequest, ps.ExchangeResponse, "read", may_wait=True, may_repeat=True, is_framed=True
)
EXCHANGE_ONCE = Request(
    ps.ExchangeRequest,
    ps.ExchangeResponse,
    "read",
    may_wait=True,
    may_repeat=True,
    is_framed=True,
    name="ExchangeOnce",
)

READ_SHARD = Request(
    shard_pb2.ReadShardRequest, shard_pb2.ReadShardResponse, "server", may_wait=True
)

REPLICATE = Request(
    standby_pb2.ReplicateRequest, standby_pb2.ReplicateResponse, "server", may_wait=True
)
STEP_DOWN = Request(
    standby_pb2.StepDownRequest, standby_pb2.StepDownResponse, "server", may_wait=True
)
PROMOTE = Request(standby_pb2.PromoteRequest, standby_pb2.PromoteResponse, "admin", may_wait=True)

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


class Stub:
    """Makes calls of one row, and sends a token of its role where the process has tokens."""

    def __init__(self, channel: grpc.Channel, row: AnyRequest, kind: str = "") -> None:
        """kind: That of gRPC's function; empty: the row's. The channel must be open."""
        encode, decode = (
            (None, None)
            if row.is_framed
            else (row.request.SerializeToString, row.response.FromString)
        )
        self._call = getattr(channel, kind or row.kind)(row.path, encode, decode)
        self._role = row.role

    def __call__(self, message: Any, timeout: float | None = None, key: bytes = b"") -> Any:
        """Return the answer, or an iterator over a stream of answers. Raises grpc.RpcError.

        key: That of the worker which the message names; empty: none.
        """
        return self._call(message, timeout=timeout, metadata=self._metadata(key))

    def future(self, message: Any, timeout: float | None = None, key: bytes = b"") -> Any:
        """Send the message without waiting for the answer."""
        return self._call.future(message, timeout=timeout, metadata=self._metadata(key))

    def _metadata(self, key: bytes) -> Sequence[tuple[str, str | bytes]] | None:
        own = ((WORKER_KEY, key),) if key else ()
        tokens = process_credentials().tokens
        if tokens is None:
            return own or None
        return ((TOKEN_KEY, f"Bearer {token_for(tokens(), self._role)}"), *own)


def call(channel: grpc.Channel, row: Request[Q, A], message: Q, timeout: float, who: str) -> A:
    """Return the answer to a request.

    Args:
        timeout: Deadline in seconds.
        who: Names the server, for errors.

    Raises:
        PSError: The server has answered with an error, or not in time.
    """
    with translated(who):
        answer: A = Stub(channel, row)(message, timeout)
    return answer
