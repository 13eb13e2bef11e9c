"""Who may send which request: the role of a peer's token, and the worker of its key."""

from collections.abc import Iterable, Iterator
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from pscommon.core.errors import AuthenticationError
from pscommon.security.credentials import process_credentials
from pscommon.security.tokens import Role, includes, role_of
from pscommon.wire.requests import TOKEN_KEY, WORKER_KEY
from pscommon.wire.status import answering
from psserver.process.identity import ServerIdentity

SCHEME = "Bearer "
CHECK_HEALTH, WATCH_HEALTH = (f"/{health.SERVICE_NAME}/{name}" for name in ("Check", "Watch"))


def check_token(presented: str, needed: Role, what: str) -> None:
    """Check a token, if this server has tokens.

    Args:
        presented: The token; empty: there is none.
        needed: Least role for what it does.
        what: That, for the message.

    Raises:
        AuthenticationError: The token is absent, unknown, or of another role.
    """
    tokens = process_credentials().tokens
    if tokens is None:
        return
    if not presented:
        raise AuthenticationError(
            f"{what} needs a token of the role {needed}, and there is none. Try: `--token-file` "
            f"(PS_TOKEN_FILE) with {needed}.token of this job",
            "UNAUTHENTICATED",
        )
    role = role_of(tokens(), presented)
    if role is None:
        raise AuthenticationError(
            f"{what}: the server does not know the token. Try: the token file of this job",
            "UNAUTHENTICATED",
        )
    if not includes(role, needed):
        raise AuthenticationError(
            f"{what} needs a token of the role {needed}, and this one is of the role {role}. Try: "
            f"`--token-file` with a token of that role",
            "PERMISSION_DENIED",
        )


def check_call(metadata: Iterable[Any] | None, needed: Role, what: str) -> None:
    """Check the token of a gRPC call, which is in its metadata; see `check_token`."""
    if process_credentials().tokens is None:
        return
    values = [value for key, value in metadata or () if key == TOKEN_KEY]
    presented = str(values[0]) if len(values) == 1 else ""
    check_token(presented.removeprefix(SCHEME), needed, what)


def check_sender(context: grpc.ServicerContext, identity: ServerIdentity, message: Any) -> None:
    """Check that a gRPC call comes from the worker that its message names.

    Args:
        message: With the fields `job` and `worker`.

    Raises:
        MismatchError: It is for another job.
        PSError: As WorkerKeys.check.
    """
    worker, key = message.worker, b""
    if not worker:
        return
    metadata: Any = context.invocation_metadata() or ()
    for name, value in metadata:
        if name == WORKER_KEY:
            key = value
    if not identity.worker_keys.is_valid(worker, key):
        if message.job:
            identity.check_job(message.job)
        identity.worker_keys.check(worker, key)


class Reflection(reflection.ReflectionServicer):  # type: ignore[misc]
    """gRPC's description of the services, for those who may read."""

    def ServerReflectionInfo(
        self, request_iterator: Iterator[Any], context: grpc.ServicerContext
    ) -> Iterator[Any]:
        """Answer as gRPC's reflection does, after a check of the token."""
        with answering(context):
            check_call(context.invocation_metadata(), "read", "reflection")
        yield from super().ServerReflectionInfo(request_iterator, context)


class Health(grpc.GenericRpcHandler):
    """gRPC's health service. Without a token, a peer learns only whether this server serves.

    The message of such a call is not received: it may take MAX_MESSAGE_BYTES. To watch needs a
    token: each watcher occupies one of the calls that a server can serve at a time.
    """

    def __init__(self, servicer: health.HealthServicer) -> None:
        request, response = health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
        codecs = request.FromString, response.SerializeToString
        self._methods = {
            CHECK_HEALTH: grpc.unary_unary_rpc_method_handler(servicer.Check, *codecs),
            WATCH_HEALTH: grpc.unary_stream_rpc_method_handler(servicer.Watch, *codecs),
        }
        self._open = grpc.stream_unary_rpc_method_handler(
            lambda _, context: servicer.Check(request(), context), *codecs
        )

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Return what answers a call; None: it is for another service."""
        method = self._methods.get(details.method)
        if method is not None:
            try:
                check_call(details.invocation_metadata, "read", "to watch the health")
            except AuthenticationError as refusal:
                return self._open if details.method == CHECK_HEALTH else refusing(refusal)
        return method


def refusing(refusal: AuthenticationError) -> "grpc.RpcMethodHandler[Any, Any]":
    """Return a method that refuses a call without receiving its messages."""

    def refuse(messages: Any, context: grpc.ServicerContext) -> Any:
        with answering(context):
            raise refusal

    # of a stream, no message is received until the method asks for it
    return grpc.stream_unary_rpc_method_handler(refuse)
