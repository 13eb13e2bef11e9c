"""Wraps the handlers of a gRPC server and times every call."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

Record = Callable[[str, str, float], None]  # short method name, canonical status code, seconds
Wrap = Callable[[str, Any], Any]  # full method name and handler to handler

_KINDS = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


class WrappedHandlers(grpc.ServerInterceptor):
    """Applies functions to the handler of each method, the innermost first, once per handler.

    Unknown methods are not wrapped: callers could create any number of names.
    """

    def __init__(self, wraps: Sequence[Wrap]) -> None:
        self._wraps = wraps
        self._wrapped: dict[str, tuple[Any, Any]] = {}

    def intercept_service(
        self, continuation: Any, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler, method = continuation(handler_call_details), handler_call_details.method
        if handler is None:
            return None
        known, wrapped = self._wrapped.get(method, (None, None))
        if known is not handler:
            wrapped = handler
            for wrap in self._wraps:
                wrapped = wrap(method, wrapped)
            self._wrapped[method] = handler, wrapped
        return wrapped


class RpcTimer:
    """Calls `record` at the end of each call; a stream ends with its last response or a
    cancellation.
    """

    def __init__(self, record: Record) -> None:
        self._record = record

    def wrap(self, method: str, handler: Any) -> Any:
        """Return a handler that does the same and is timed."""
        kind, make = _KINDS[handler.request_streaming, handler.response_streaming]
        wrap = self._stream if handler.response_streaming else self._unary
        behavior = wrap(method.rpartition("/")[2], getattr(handler, kind))
        return make(behavior, handler.request_deserializer, handler.response_serializer)

    def _unary(self, method: str, behavior: Callable[..., Any]) -> Callable[..., Any]:
        def timed(request: Any, context: grpc.ServicerContext) -> Any:
            with self._timing(method, context):
                return behavior(request, context)

        return timed

    def _stream(self, method: str, behavior: Callable[..., Any]) -> Callable[..., Any]:
        def timed(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with self._timing(method, context):
                yield from behavior(request, context)

        return timed

    @contextmanager
    def _timing(
        self, method: str, context: Any
    ) -> Iterator[None]:  # a ServicerContext; the stubs lack its code()
        begin = time.perf_counter()
        unnamed = grpc.StatusCode.UNKNOWN  # what gRPC answers after an exception without a status
        try:
            yield
            unnamed = grpc.StatusCode.OK
        except GeneratorExit:
            unnamed = grpc.StatusCode.CANCELLED
            raise
        finally:
            code = context.code() or unnamed
            self._record(method, code.name, time.perf_counter() - begin)
