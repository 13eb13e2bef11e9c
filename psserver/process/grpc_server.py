"""A server's socket, and what its calls share."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc

from pscommon.core.errors import TakenError
from pscommon.wire.channel import SERVER_OPTIONS

RETRY_PAUSE_SECONDS = 0.05


def listen(bind: str, calls: int, retry_seconds: float = 0.0) -> tuple[grpc.Server, str]:
    """Create a gRPC server that has its port and is not started yet.

    Args:
        calls: Concurrent calls.
        retry_seconds: Time to wait for a port that another process still uses.

    Returns:
        The server and its HOST:PORT.

    Raises:
        TakenError: The port or the address is not available.
    """
    deadline = time.monotonic() + retry_seconds
    while True:
        server = grpc.server(
            ThreadPoolExecutor(calls, thread_name_prefix="call"),
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=calls,
        )
        try:
            return server, f"{bind.rpartition(':')[0]}:{server.add_insecure_port(bind)}"
        except RuntimeError as error:
            if time.monotonic() >= deadline:
                raise TakenError(
                    f"cannot listen on {bind}: another process has the port, or the address "
                    f"belongs to another machine. Try: another `--bind` (port 0 picks a free port)"
                ) from error
        time.sleep(RETRY_PAUSE_SECONDS)


def when_ended(context: grpc.ServicerContext, action: Callable[[], object]) -> None:
    """Run the action in a new thread once this call has ended.

    gRPC would run it in the one thread that serves the socket. If the action waited for a lock
    there, no message would be received, not even the one that the lock's owner waits for.
    """
    context.add_callback(
        lambda: threading.Thread(target=action, name="ended-call", daemon=True).start()
    )
