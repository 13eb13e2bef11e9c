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
from typing import Any

import grpc

from pscommon.core.errors import InvalidRequestError
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

Record = Callable[[str, str, float], None]  # name of the row, canonical status code, seconds

log = get_logger(__name__)


async def answer(handlers: Handlers, row: AnyRequest, message: Any, waiter: Waiter) -> Any:
    """Return the answer to a unary request. A handler without a waiter may still block."""
    if row.may_wait:
        return await handlers[row](message, waiter)
    return await waiter.do(partial(handlers[row], message))


def grpc_services(
    handlers: Handlers,
    identity: ServerIdentity | None = None,
    record: Record = lambda name, code, seconds: None,
) -> list[grpc.GenericRpcHandler]:
    """Return the gRPC services of these rows.

    Args:
        identity: Has the keys of workers; None: no row is sent by workers.
        record: Called at the end of each call; a stream ends with its last response or a
            cancellation.

    Raises:
        KeyError: A row of one of the services has no handler.
    """
    services: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = {
        row.service: {} for row in handlers
    }
    for row in REQUESTS:
        if row.service in services:
            services[row.service][row.name] = _method(handlers, row, identity, record)
    return list(map(grpc.method_handlers_generic_handler, services, services.values()))


def when_ended(context: grpc.ServicerContext, action: Callable[[], object]) -> None:
    """Run the action in a new thread once this call has ended.

    gRPC would run it in the one thread that serves the socket. If the action waited for a lock
    there, no message would be received, not even the one that the lock's owner waits for.
    """
    context.add_callback(
        lambda: threading.Thread(target=action, name="ended-call", daemon=True).start()
    )


def _method(
    handlers: Handlers, row: AnyRequest, identity: ServerIdentity | None, record: Record
) -> "grpc.RpcMethodHandler[Any, Any]":
    driver = handlers[row]

    def unary(message: Any, context: grpc.ServicerContext) -> Any:
        with _timing(row, context, record), answering(context):
            check_call(context, row.role, str(row))
            if row.is_framed:
                return driver(message, context)
            _check(row, message, context)
            if row.names_sender and identity is not None:
                check_sender(context, identity, message)
            return run(answer(handlers, row, message, ThreadWaiter(context)))

    def stream(messages: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        with _timing(row, context, record), answering(context):
            check_call(context, row.role, str(row))
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

    make: Callable[..., grpc.RpcMethodHandler[Any, Any]]
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
