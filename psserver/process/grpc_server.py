"""A server's socket, and what its calls share."""

import threading
from collections.abc import Callable, Sequence

import grpc

from pscommon.wire.endpoint import Endpoint, listen_grpc
from psserver.process.decoding import guarded
from psserver.process.rpc_metrics import Wrap, WrappedHandlers


def listen(
    bind: str, calls: int, wraps: Sequence[Wrap] = (), retry_seconds: float = 0.0
) -> tuple[grpc.Server, str]:
    """Call listen_grpc for a server that checks requests, with wrappers for each method."""
    interceptors = [WrappedHandlers([guarded, *wraps])]
    return listen_grpc(Endpoint(bind), calls, (), interceptors, retry_seconds)


def when_ended(context: grpc.ServicerContext, action: Callable[[], object]) -> None:
    """Run the action in a new thread once this call has ended.

    gRPC would run it in the one thread that serves the socket. If the action waited for a lock
    there, no message would be received, not even the one that the lock's owner waits for.
    """
    context.add_callback(
        lambda: threading.Thread(target=action, name="ended-call", daemon=True).start()
    )
