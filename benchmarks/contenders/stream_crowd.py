"""Contender: bare gRPC streams of several clients at once, a process each. Args: SETUP [server |
ADDRESS].
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import numpy as np

from benchmarks import processes
from benchmarks.contenders.bare import answer, bare_server
from benchmarks.contenders.grpc_stream import client, fill, frames
from benchmarks.setup import Setup
from benchmarks.speaker import Command, Measurements, Speaker, Team, serve
from pscommon.system.process_limits import tune_malloc

MODULE = "benchmarks.contenders.stream_crowd"


class OwnMemory(threading.local):
    """Of a thread: a message must not come to lie where another one comes to lie at the same
    time.
    """

    def __init__(self, nbytes: int) -> None:
        self.memory = np.zeros(nbytes, np.uint8).data


def server(setup: Setup) -> None:
    own = OwnMemory(setup.nbytes)

    def swap(incoming: Iterator[bytes], context: Any) -> Iterator[bytes]:
        memory = own.memory
        fill(memory, incoming)
        yield from frames(memory)

    answer(grpc.stream_stream_rpc_method_handler(swap), threads=setup.workers)


def main(setup: Setup) -> None:
    with bare_server(MODULE, setup) as (pid, address), ExitStack() as clients:
        command = Command(MODULE, (setup.to_json(), address))
        team = Team([clients.enter_context(Speaker(command)) for _ in range(setup.workers)])

        def turn() -> Measurements:
            before = processes.cpu_seconds([pid])
            measured = team.go()
            spent = processes.cpu_seconds([pid]) - before
            return {**measured, "server_cpu": spent / (measured["count"] * setup.workers)}

        serve({"go": turn})


if __name__ == "__main__":
    tune_malloc()
    given = Setup.from_json(sys.argv[1])
    match sys.argv[2:]:
        case []:
            main(given)
        case ["server"]:
            server(given)
        case [where]:
            client(given, where)
