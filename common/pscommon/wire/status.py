"""Errors in transit: a PSError leaves one process as a google.rpc.Status and comes out of the
other as a PSError.

The reason decides everything (google.rpc.ErrorInfo, domain "paramserver"); the text is for
people and never parsed.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Never

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from pscommon.core.errors import (
    REASONS,
    AuthenticationError,
    MismatchError,
    PSError,
    UnreachableError,
    error_for,
)
from pscommon.telemetry.logs import get_logger

DOMAIN = "paramserver"
DETAILS_KEY = "grpc-status-details-bin"
RETRY_SECONDS = 0.2
# the text travels twice, the second time in base64, and has to fit the metadata limit
# (endpoint.py)
MAX_TEXT_CHARACTERS = 6_000

log = get_logger(__name__)


def abort(context: grpc.ServicerContext, error: PSError) -> Never:
    """Ends a call on the server with what the client needs to raise the same error."""
    context.abort_with_status(rpc_status.to_status(status_of(error)))


def status_of(error: PSError) -> status_pb2.Status:
    """The google.rpc.Status of an error: canonical code, text, ErrorInfo, and RetryInfo where a
    retry may help.
    """
    row = REASONS.get(error.reason, REASONS["INTERNAL"])
    status = status_pb2.Status(
        code=grpc.StatusCode[row.status].value[0], message=_shortened(str(error))
    )
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))
    if row.retryable:
        delay = Duration(nanos=round(RETRY_SECONDS * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def error_from(failure: grpc.RpcError, who: str) -> PSError:
    """The error that a failed call stands for. `who` names the server and the method, for the
    text.
    """
    code, text = _code(failure), _text(failure)
    reason = _reason(_status(failure))
    if reason in REASONS and reason != "INTERNAL":
        return error_for(reason, text)
    match code:
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return UnreachableError(f"{who} does not answer: {text}", "UNREACHABLE")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:  # a server with all its threads taken
            return UnreachableError(f"{who} accepts no more calls: {text}", "UNREACHABLE")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return UnreachableError(f"{who} did not answer in time", "UNREACHABLE")
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return AuthenticationError(f"{who} refused the call: {text}", code.name)
        case grpc.StatusCode.UNIMPLEMENTED:
            return MismatchError(
                f"{who} is not a parameter server of this release: {text}", "SHARD_MISMATCH"
            )
        case _:
            return PSError(f"{who} failed: {reason or code.name}: {text}")


def error_of(raw: bytes, who: str) -> PSError:
    """The error of a serialized google.rpc.Status. `who` names the server, for the text."""
    status = status_pb2.Status.FromString(raw)
    reason = _reason(status)
    if reason in REASONS and reason != "INTERNAL":
        return error_for(reason, status.message)
    return PSError(f"{who} failed: {reason}: {status.message}")


@contextlib.contextmanager
def translated(who: str) -> Iterator[None]:
    """Client side: what fails inside as gRPC leaves as a PSError."""
    try:
        yield
    except grpc.RpcError as failure:
        raise error_from(failure, who) from failure


@contextlib.contextmanager
def answering(context: grpc.ServicerContext | None) -> Iterator[None]:
    """Server side, around a method's body: a PSError goes to the client, anything else is logged
    as a bug first.

    Without a context the method was called in this process, and its errors are raised as they
    are.
    """
    if context is None:
        yield
        return
    try:
        yield
    except PSError as error:
        abort(context, error)
    except grpc.RpcError:  # the client is gone; grpc expects its own exception back
        raise
    except Exception as bug:
        if context.code() is not None:  # type: ignore[attr-defined]  # raised by an abort inside
            raise
        abort(context, error_for_peer(bug))


def error_for_peer(failure: Exception) -> PSError:
    """The error to answer a request with. Anything but a PSError is logged as a bug."""
    if isinstance(failure, PSError):
        return failure
    log.error("rpc_failed", limited=True, exc_info=failure)
    return PSError(f"{type(failure).__name__}: {failure}")


def _reason(status: status_pb2.Status) -> str:
    """The reason that our own server gave, or "" for failures that are not from it."""
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN:
            return str(info.reason)
    return ""


def _status(failure: grpc.RpcError) -> status_pb2.Status:
    trailing: Any = getattr(failure, "trailing_metadata", tuple)() or ()
    for key, value in trailing:
        if key == DETAILS_KEY:
            with contextlib.suppress(DecodeError):
                return status_pb2.Status.FromString(value)
    return status_pb2.Status()


def _code(failure: grpc.RpcError) -> grpc.StatusCode:
    code: grpc.StatusCode | None = getattr(failure, "code", lambda: None)()
    return code or grpc.StatusCode.UNKNOWN


def _text(failure: grpc.RpcError) -> str:
    text: str | None = getattr(failure, "details", lambda: None)()
    return text or ""


def _shortened(text: str) -> str:
    more = len(text) - MAX_TEXT_CHARACTERS
    return text if more <= 0 else f"{text[:MAX_TEXT_CHARACTERS]}... ({more} more characters)"
