"""Contender: the bytes alone over a bare bidirectional gRPC stream, 1 MiB frames each way. Args:
SETUP [server].
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np

from benchmarks.contenders.bare import answer, bare_channel, bare_server
from benchmarks.setup import Setup
from benchmarks.speaker import Measurements, serve
from pscommon.system.process_limits import tune_malloc
from pscommon.wire.frames import FRAME_BYTES

WARM_UP_COUNT = 3


def frames(memory: memoryview) -> Iterator[bytes]:
    for start in range(0, len(memory), FRAME_BYTES):
        yield bytes(memory[start : start + FRAME_BYTES])


def fill(memory: memoryview, incoming: Iterator[bytes]) -> None:
    """RuntimeError unless they fill it exactly."""
    position = 0
    for frame in incoming:
        memory[position : position + len(frame)] = frame
        position += len(frame)
    if position != len(memory):
        raise RuntimeError(f"{position} bytes came instead of {len(memory)}")


def server(nbytes: int) -> None:
    """Takes a whole message into its memory, then sends it back."""
    memory = np.zeros(nbytes, np.uint8).data

    def swap(incoming: Iterator[bytes], context: Any) -> Iterator[bytes]:
        fill(memory, incoming)
        yield from frames(memory)

    answer(grpc.stream_stream_rpc_method_handler(swap))


def client(setup: Setup, address: str) -> None:
    """The client's life: a contender's."""
    with bare_channel(address) as channel:
        stub: Any = channel.stream_stream("/bare.Bare/Call")
        out, into = np.ones(setup.nbytes, np.uint8).data, np.zeros(setup.nbytes, np.uint8).data

        def turn() -> Measurements:
            began = time.perf_counter()
            for _ in range(setup.pieces):
                fill(into, stub(frames(out)))
            return {"seconds": (time.perf_counter() - began) / setup.pieces, "count": setup.pieces}

        serve({"go": turn}, WARM_UP_COUNT)
        if into != out:
            raise RuntimeError("other bytes came back")


def main(setup: Setup) -> None:
    with bare_server("benchmarks.contenders.grpc_stream", setup) as (_, address):
        client(setup, address)


if __name__ == "__main__":
    tune_malloc()
    if sys.argv[2:] == ["server"]:
        server(Setup.from_json(sys.argv[1]).nbytes)
    else:
        main(Setup.from_json(sys.argv[1]))
