"""A server's socket, and what its calls have in common."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from pscommon.core.errors import TakenError
from pscommon.wire.channel import SERVER_OPTIONS
from psserver.process.decoding import guarded
from psserver.process.rpc_metrics import Wrap, WrappedHandlers

PAUSE = 0.05


def listen(
    bind: str, calls: int, wraps: Sequence[Wrap] = (), patience: float = 0.0
) -> tuple[grpc.Server, str]:
    """A gRPC server that has its port, not started yet, and its HOST:PORT.

    calls: that it answers at a time. wraps: for the handler of each method.
    patience: seconds that whoever has the port may take to let go of it. TakenError.
    """
    deadline = time.monotonic() + patience
    while True:
        server = grpc.server(
            ThreadPoolExecutor(calls, thread_name_prefix="call"),
            interceptors=[WrappedHandlers([guarded, *wraps])],
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=calls,
        )
        try:
            return server, f"{bind.rpartition(':')[0]}:{server.add_insecure_port(bind)}"
        except RuntimeError as error:
            if time.monotonic() >= deadline:
                raise TakenError(
                    f"cannot listen on {bind}: another process has the port, or the address is "
                    f"not this "
                    "machine's; choose another --bind (port 0 picks a free one)"
                ) from error
        time.sleep(PAUSE)


def when_ended(context: grpc.ServicerContext, action: Callable[[], object]) -> None:
    """Once this call has ended: the action, in a thread of its own.

    gRPC would have it in the one thread that serves the socket: if that waited for a lock,
    nobody would be heard any more, not even whom the lock's holder waits for.
    """
    context.add_callback(
        lambda: threading.Thread(target=action, name="ended-call", daemon=True).start()
    )
