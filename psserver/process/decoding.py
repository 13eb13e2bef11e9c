"""Messages that cannot be decoded: refused with a reason and one log line, where gRPC logs a
traceback.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grpc

from pscommon.core.errors import InvalidRequestError
from pscommon.telemetry.logs import get_logger
from pscommon.wire.status import answering

_MAKERS = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}

log = get_logger(__name__)


class Undecodable(NamedTuple):
    """Replaces a message that could not be decoded."""

    problem: str


def guarded(method: str, handler: Any) -> Any:
    """Return a handler that refuses undecodable messages.

    A unary request is answered with INVALID_REQUEST; a stream is ended.
    """
    streaming = handler.request_streaming, handler.response_streaming
    if handler.request_deserializer is None or streaming not in _MAKERS:
        return handler
    kind, make = _MAKERS[streaming]
    behavior: Callable[[Any, Any], Any] = getattr(handler, kind)

    def decode(raw: bytes) -> Any:
        try:
            return handler.request_deserializer(raw)
        except Exception as error:
            return Undecodable(str(error) or type(error).__name__)

    def note(request: Undecodable, context: grpc.ServicerContext) -> None:
        log.warning(
            "message_undecodable", method=method, peer=context.peer(), problem=request.problem
        )

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        if isinstance(request, Undecodable):
            note(request, context)
            with answering(context):
                raise InvalidRequestError(
                    f"{method}: the message cannot be decoded: {request.problem}"
                )
        return behavior(request, context)

    def each(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        for request in requests:
            if isinstance(request, Undecodable):
                note(request, context)
                context.cancel()
                return
            yield request

    guard = (
        (lambda requests, context: behavior(each(requests, context), context))
        if streaming[0]
        else answer
    )
    return make(guard, decode, handler.response_serializer)
