"""Both ends of a bare gRPC contender: a server process with one method, and channels to it; our
channel settings.
"""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from benchmarks.setup import Setup
from pscommon.wire.endpoint import CLIENT_OPTIONS, SERVER_OPTIONS


def answer(handler: Any, threads: int = 4) -> None:
    """The server's life: says its port, answers calls of /bare.Bare/Call, ends with its standard
    input.
    """
    made = grpc.server(ThreadPoolExecutor(threads), options=SERVER_OPTIONS)
    made.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("bare.Bare", {"Call": handler}),)
    )
    port = made.add_insecure_port("127.0.0.1:0")
    made.start()
    print(port, flush=True)
    sys.stdin.read()
    made.stop(None)


@contextmanager
def bare_server(module: str, setup: Setup) -> Iterator[tuple[int, str]]:
    """The process `python -m module SETUP server`, and where it listens."""
    command = [sys.executable, "-m", module, setup.to_json(), "server"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield process.pid, f"127.0.0.1:{process.stdout.readline().strip()}"
        process.stdin.close()


def bare_channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, options=CLIENT_OPTIONS)
