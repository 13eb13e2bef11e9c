"""Requests between primaries and standbys (proto/psproto/v1/standby.proto), and what a standby
says to all others.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from pscommon.core.errors import InvalidRequestError, MismatchError, UnreachableError
from pscommon.core.formats import check_wire_format
from pscommon.wire.status import answering
from psproto.v1 import standby_pb2 as pb
from psproto.v1.standby_pb2_grpc import StandbyServiceServicer
from psserver.core.commands.request_checks import wait_seconds
from psserver.process.grpc_server import when_ended
from psserver.process.identity import ServerIdentity
from psserver.replication.primary import PrimaryReplicator

STEP_DOWN = 3.0
"""Seconds that the standby gets for what is on its way to it."""


class StandbyServicer(StandbyServiceServicer):
    """shipper: of a primary, else None. promote: of a standby. checked: MismatchError for who is
    of another shard.
    """

    def __init__(
        self,
        replicator: PrimaryReplicator | None,
        promote: Callable[[float], pb.PromoteResponse] | None = None,
        checked: Callable[[pb.ReplicateRequest], None] = lambda hello: None,
    ) -> None:
        self._replicator, self._promote, self._checked = replicator, promote, checked

    def Replicate(
        self, requests: Iterator[pb.ReplicateRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ReplicateResponse]:
        with answering(context):
            replicator, hello = self._primary(), next(requests, None)
            if hello is None:
                return
            check_wire_format(hello.format, "the standby", "its primary")
            self._checked(hello)
            line = replicator.attach(hello)
            when_ended(context, lambda: replicator.lost(line))
            listener = threading.Thread(
                target=_listen, args=(replicator, line, requests), name="acks", daemon=True
            )
            listener.start()
            try:
                yield from replicator.replicate(line, context.is_active)
            finally:
                replicator.lost(line)

    def StepDown(
        self, request: pb.StepDownRequest, context: grpc.ServicerContext
    ) -> pb.StepDownResponse:
        with answering(context):
            replicator = self._primary()
            replicator.step_down(request.instance, STEP_DOWN)
            if not context.add_callback(
                replicator.end
            ):  # whoever asked has hung up, and may be primary all the same
                replicator.end()
            return pb.StepDownResponse()

    def Promote(
        self, request: pb.PromoteRequest, context: grpc.ServicerContext
    ) -> pb.PromoteResponse:
        with answering(context):
            if self._promote is None:
                raise InvalidRequestError("this server is primary of its shard")
            return self._promote(wait_seconds(request.wait_ms))

    def _primary(self) -> PrimaryReplicator:
        if self._replicator is None:
            raise not_primary("")
        return self._replicator


def _listen(
    replicator: PrimaryReplicator, line: int, requests: Iterator[pb.ReplicateRequest]
) -> None:
    with contextlib.suppress(grpc.RpcError):  # the standby went away
        for request in requests:
            replicator.acknowledged(line, request.received)


def not_primary(primary: str) -> UnreachableError:
    where = f"; its primary is {primary}" if primary else ""
    return UnreachableError(f"this server is a standby{where}", "NOT_PRIMARY")


class NotPrimary(grpc.GenericRpcHandler):
    """Every method that a standby does not have: it says who does. primary: its address."""

    def __init__(self, primary: Callable[[], str]) -> None:
        self._primary = primary

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        def refuse(requests: Any, context: grpc.ServicerContext) -> Any:
            with answering(context):
                raise not_primary(self._primary())

        return grpc.stream_unary_rpc_method_handler(refuse)


def of_this_shard(identity: ServerIdentity) -> Callable[[pb.ReplicateRequest], None]:
    """Checks a standby's first word: is it of this shard and job? Once the model has moved,
    command lines may still say how many there were."""

    def check(hello: pb.ReplicateRequest) -> None:
        if hello.job:
            identity.check_job(hello.job)
        same_number = hello.shards == identity.shards or identity.layout > 0
        if hello.shard != identity.shard or not same_number:
            mine = f"{identity.shard}/{identity.shards}"
            text = f"a standby of shard {hello.shard}/{hello.shards} cannot follow shard {mine}"
            raise MismatchError(text, "SHARD_MISMATCH")

    return check
