"""Answer the requests between primaries and standbys (proto/psproto/v1/standby.proto).

It also refuses all other requests to a standby.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Never

import grpc

from pscommon.core.errors import InvalidRequestError, MismatchError, UnreachableError
from pscommon.core.formats import check_wire_format
from pscommon.core.limits import ALLREDUCE
from pscommon.wire.requests import PROMOTE, REPLICATE, STEP_DOWN
from pscommon.wire.status import answering
from psproto.v1 import standby_pb2 as pb
from psserver.process.handlers import Handlers, when_ended
from psserver.process.identity import ServerIdentity
from psserver.replication.primary import CopyState, PrimaryReplicator
from psserver.waiting import ThreadWaiter, Waiter

STEP_DOWN_SECONDS = 3.0
"""Time for the standby to acknowledge the records that are in flight."""


def primary_handlers(
    replicator: PrimaryReplicator, identity: ServerIdentity, copy_state: CopyState
) -> Handlers:
    """Return the handlers of a primary: its standby follows it, and may ask it to step down."""
    return {
        REPLICATE: partial(_replicate, replicator, identity, copy_state),
        STEP_DOWN: partial(_step_down, replicator),
        PROMOTE: _refuse_promotion,
    }


def standby_handlers(promote: Callable[[float], pb.PromoteResponse]) -> Handlers:
    """Return the handlers of a standby. promote: Promotes it, within a time in seconds."""
    return {
        REPLICATE: _refuse_standby,
        STEP_DOWN: _refuse_standby,
        PROMOTE: partial(_promote, promote),
    }


def _replicate(
    replicator: PrimaryReplicator,
    identity: ServerIdentity,
    copy_state: CopyState,
    requests: Iterator[pb.ReplicateRequest],
    context: grpc.ServicerContext,
) -> Iterator[pb.ReplicateResponse]:
    if (hello := next(requests, None)) is None:
        return
    check_wire_format(hello.format, "the standby", "its primary")
    check_standby(identity, hello)
    link_id = replicator.attach(hello, copy_state)
    when_ended(context, lambda: replicator.handle_disconnect(link_id))
    listener = threading.Thread(
        target=_listen, args=(replicator, link_id, requests), name="acks", daemon=True
    )
    listener.start()
    try:
        yield from replicator.replicate(link_id, context.is_active)
    finally:
        replicator.handle_disconnect(link_id)


async def _step_down(
    replicator: PrimaryReplicator, request: pb.StepDownRequest, waiter: ThreadWaiter
) -> pb.StepDownResponse:
    replicator.step_down(request.instance, STEP_DOWN_SECONDS)
    waiter.when_over(replicator.end)
    return pb.StepDownResponse()


async def _promote(
    promote: Callable[[float], pb.PromoteResponse], request: pb.PromoteRequest, waiter: Waiter
) -> pb.PromoteResponse:
    return await waiter.do(partial(promote, request.wait_ms / 1000))


async def _refuse_promotion(request: pb.PromoteRequest, waiter: Waiter) -> Never:
    raise InvalidRequestError("this server is primary of its shard")


def _refuse_standby(requests: object, call: object) -> Never:
    raise not_primary("")


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


def check_standby(identity: ServerIdentity, hello: pb.ReplicateRequest) -> None:
    """Check that a standby belongs to this shard and job.

    After a reshard, command lines may still contain an earlier number of shards.

    Raises:
        MismatchError: It belongs to another one, or the policy excludes standbys.
    """
    if hello.job:
        identity.check_job(hello.job)
    same_number = hello.shards == identity.shards or identity.reshard_count > 0
    if hello.shard != identity.shard or not same_number:
        mine = f"{identity.shard}/{identity.shards}"
        text = f"a standby of shard {hello.shard}/{hello.shards} cannot follow shard {mine}"
        raise MismatchError(text, "SHARD_MISMATCH")
    if identity.policy == ALLREDUCE:  # the standby of shard 0 compares the settings
        raise MismatchError(
            "standby refused: under policy allreduce the workers have the weights. Try: policy "
            "sync",
            "SHARD_MISMATCH",
        )
