"""Bind the rows of the table of requests to what answers them.

Every transport calls the same handler of a row, through `answer`. Over gRPC, each call is timed,
and a message that cannot be decoded, or has a number out of its range, is refused with a reason,
where gRPC logs a traceback.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import grpc

from pscommon.core.errors import AuthenticationError, InvalidRequestError
from pscommon.telemetry.logs import get_logger
from pscommon.wire.requests import REQUESTS, AnyRequest
from pscommon.wire.status import answering
from pscommon.wire.stream_format import decode_message
from psserver.process.access import check_call, check_sender
from psserver.process.identity import ServerIdentity
from psserver.waiting import ThreadWaiter, Waiter, run

Handlers = Mapping[AnyRequest, Callable[..., Any]]
"""What answers each row:

- a unary row that may wait: a coroutine function of the message and a Waiter
- another unary row: a function of the message
- a row with streams or frames: its driver for gRPC, a function of messages and ServicerContext
"""

Method: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Record = Callable[[str, str, float], None]  # name of the row, canonical status code, seconds

log = get_logger(__name__)


async def answer(handlers: Handlers, row: AnyRequest, message: Any, waiter: Waiter) -> Any:
    """Return the answer to a unary request. A handler without a waiter may still block."""
    if row.may_wait:
        return await handlers[row](message, waiter)
    return await waiter.do(partial(handlers[row], message))


def grpc_handler(
    handlers: Handlers,
    identity: ServerIdentity | None = None,
    record: Record = lambda name, code, seconds: None,
) -> grpc.GenericRpcHandler:
    """Return gRPC's handler of all rows of the services that these rows belong to.

    Args:
        identity: Has the keys of workers; None: no row is sent by workers.
        record: Called at the end of each call; a stream ends with its last response or a
            cancellation.

    Raises:
        KeyError: A row of one of the services has no handler.
    """
    names = {row.service for row in handlers}
    rows = [row for row in REQUESTS if row.service in names]
    methods = {row.path: (row, _method(handlers, row, identity, record)) for row in rows}
    return _Rows(methods, record)


def when_ended(context: grpc.ServicerContext, action: Callable[[], object]) -> None:
    """Run the action in a new thread once this call has ended.

    gRPC would run it in the one thread that serves the socket. If the action waited for a lock
    there, no message would be received, not even the one that the lock's owner waits for.
    """
    context.add_callback(
        lambda: threading.Thread(target=action, name="ended-call", daemon=True).start()
    )


class _Rows(grpc.GenericRpcHandler):
    """Finds the method of a call, and refuses a call without the role of its row.

    It does so before the call's messages are received: each may take MAX_MESSAGE_BYTES.
    """

    def __init__(self, methods: Mapping[str, tuple[AnyRequest, Method]], record: Record) -> None:
        """methods: By their paths."""
        self._methods, self._record = methods, record

    def service(self, details: grpc.HandlerCallDetails) -> "Method | None":
        """Return what answers a call; None: there is no such row."""
        row, method = self._methods.get(details.method, (None, None))
        if row is not None:
            try:
                check_call(details.invocation_metadata, row.role, str(row))
            except AuthenticationError as refusal:
                return self._refusing(row, refusal)
        return method

    def _refusing(self, row: AnyRequest, refusal: AuthenticationError) -> Method:
        def refuse(messages: Any, context: grpc.ServicerContext) -> Any:
            with _timing(row, context, self._record), answering(context):
                raise refusal

        # of a stream, no message is received until the handler asks for it
        return grpc.stream_unary_rpc_method_handler(refuse)


def _method(
    handlers: Handlers, row: AnyRequest, identity: ServerIdentity | None, record: Record
) -> Method:
    driver = handlers[row]

    def unary(message: Any, context: grpc.ServicerContext) -> Any:
        with _timing(row, context, record), answering(context):
            if row.is_framed:
                return driver(message, context)
            _check(row, message, context)
            if row.names_sender and identity is not None:
                check_sender(context, identity, message)
            return run(answer(handlers, row, message, ThreadWaiter(context)))

    def stream(messages: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        with _timing(row, context, record), answering(context):
            if row.kind == "unary_stream":
                _check(row, messages, context)
            elif not row.is_framed:
                messages = _decoded(row, messages, context)
            yield from driver(messages, context)

    def decode(raw: bytes) -> Any:
        try:
            return decode_message(row.request, raw)
        except InvalidRequestError as error:  # gRPC would log a traceback
            return error

    make: Callable[..., Method]
    make = getattr(grpc, f"{row.kind}_rpc_method_handler")
    behaviour = unary if row.kind == "unary_unary" else stream
    codecs = () if row.is_framed else (decode, row.response.SerializeToString)
    return make(behaviour, *codecs)


@contextmanager
def _timing(row: AnyRequest, context: Any, record: Record) -> Iterator[None]:
    """context: A ServicerContext; the stubs lack its code()."""
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
        record(row.name, code.name, time.perf_counter() - begin)


def _check(row: AnyRequest, message: Any, context: grpc.ServicerContext) -> None:
    if isinstance(message, InvalidRequestError):
        if message.reason != "OUT_OF_RANGE":
            _log(row, message, context)
        raise message


def _decoded(
    row: AnyRequest, messages: Iterator[Any], context: grpc.ServicerContext
) -> Iterator[Any]:
    """Yield the messages of a stream, which ends at one that is refused.

    Another thread may read all but the first one, so the refusal of those only ends the call.
    """
    for number, message in enumerate(messages):
        if number == 0:
            _check(row, message, context)
        if isinstance(message, InvalidRequestError):
            _log(row, message, context)
            context.cancel()
            return
        yield message


def _log(row: AnyRequest, error: InvalidRequestError, context: grpc.ServicerContext) -> None:
    log.warning(
        "message_undecodable",
        limited=True,
        method=row.path,
        peer=context.peer(),
        problem=str(error),
    )
