"""The gRPC servicer of primaries and standbys (proto/psproto/v1/standby.proto).

It also refuses all other requests to a standby.
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

STEP_DOWN_SECONDS = 3.0
"""Time for the standby to acknowledge the records that are in flight."""


class StandbyServicer(StandbyServiceServicer):
    """Answers a standby's requests on a primary, and promotion requests on a standby.

    Args:
        replicator: The primary's replicator; None on a standby.
        promote: Promotes a standby; None on a primary.
        check: Raises MismatchError for a standby of another shard or job.
    """

    def __init__(
        self,
        replicator: PrimaryReplicator | None,
        promote: Callable[[float], pb.PromoteResponse] | None = None,
        check: Callable[[pb.ReplicateRequest], None] = lambda hello: None,
    ) -> None:
        self._replicator, self._promote, self._check = replicator, promote, check

    def Replicate(
        self, requests: Iterator[pb.ReplicateRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ReplicateResponse]:
        with answering(context):
            replicator, hello = self._primary(), next(requests, None)
            if hello is None:
                return
            check_wire_format(hello.format, "the standby", "its primary")
            self._check(hello)
            link_id = replicator.attach(hello)
            when_ended(context, lambda: replicator.handle_disconnect(link_id))
            listener = threading.Thread(
                target=_listen, args=(replicator, link_id, requests), name="acks", daemon=True
            )
            listener.start()
            try:
                yield from replicator.replicate(link_id, context.is_active)
            finally:
                replicator.handle_disconnect(link_id)

    def StepDown(
        self, request: pb.StepDownRequest, context: grpc.ServicerContext
    ) -> pb.StepDownResponse:
        with answering(context):
            replicator = self._primary()
            replicator.step_down(request.instance, STEP_DOWN_SECONDS)
            # the caller has disconnected, and may be primary nevertheless
            if not context.add_callback(replicator.end):
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
    replicator: PrimaryReplicator, link_id: int, requests: Iterator[pb.ReplicateRequest]
) -> None:
    with contextlib.suppress(grpc.RpcError):  # the standby went away
        for request in requests:
            replicator.handle_acknowledgement(link_id, request.received)


def not_primary(primary: str) -> UnreachableError:
    where = f"; its primary is {primary}" if primary else ""
    return UnreachableError(f"this server is a standby{where}", "NOT_PRIMARY")


class NotPrimary(grpc.GenericRpcHandler):
    """Refuses every method that a standby does not have, and names the primary.

    Args:
        primary: Returns the primary's address.
    """

    def __init__(self, primary: Callable[[], str]) -> None:
        self._primary = primary

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        def refuse(requests: Any, context: grpc.ServicerContext) -> Any:
            with answering(context):
                raise not_primary(self._primary())

        return grpc.stream_unary_rpc_method_handler(refuse)


def make_standby_check(identity: ServerIdentity) -> Callable[[pb.ReplicateRequest], None]:
    """Return a check that a standby belongs to this shard and job.

    After a reshard, command lines may still contain an earlier number of shards.
    """

    def check(hello: pb.ReplicateRequest) -> None:
        if hello.job:
            identity.check_job(hello.job)
        same_number = hello.shards == identity.shards or identity.layout > 0
        if hello.shard != identity.shard or not same_number:
            mine = f"{identity.shard}/{identity.shards}"
            text = f"a standby of shard {hello.shard}/{hello.shards} cannot follow shard {mine}"
            raise MismatchError(text, "SHARD_MISMATCH")

    return check
