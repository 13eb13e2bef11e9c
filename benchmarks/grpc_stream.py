"""Contender: the bytes alone over a bare bidirectional gRPC stream, 1 MiB frames each way. Args: MB."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np

from benchmarks.contender import serve
from pscommon.malloc import tune_malloc
from pscommon.wire.channel import CLIENT_OPTIONS, FRAME_BYTES, SERVER_OPTIONS

METHOD = "/bare.Stream/Swap"


def frames(memory: memoryview) -> Iterator[bytes]:
    for start in range(0, len(memory), FRAME_BYTES):
        yield bytes(memory[start : start + FRAME_BYTES])


def fill(memory: memoryview, incoming: Iterator[bytes]) -> None:
    position = 0
    for frame in incoming:
        memory[position : position + len(frame)] = frame
        position += len(frame)


def server(nbytes: int) -> None:
    """Takes a whole message into its memory, then sends it back."""
    memory = np.zeros(nbytes, np.uint8).data

    def swap(incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        fill(memory, incoming)
        yield from frames(memory)

    handler = grpc.stream_stream_rpc_method_handler(swap)
    made = grpc.server(ThreadPoolExecutor(4), options=SERVER_OPTIONS)
    made.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Stream", {"Swap": handler}),))
    print(made.add_insecure_port("127.0.0.1:0"), flush=True)
    made.start()
    sys.stdin.read()
    made.stop(None)


def main(megabytes: int) -> None:
    nbytes = megabytes * 1_000_000
    command = [sys.executable, "-m", "benchmarks.grpc_stream", str(megabytes), "server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        channel = grpc.insecure_channel(f"127.0.0.1:{process.stdout.readline().strip()}", options=CLIENT_OPTIONS)
        stub = channel.stream_stream(METHOD)
        out, into = np.zeros(nbytes, np.uint8).data, np.zeros(nbytes, np.uint8).data

        def work() -> float:
            began = time.perf_counter()
            fill(into, stub(frames(out)))
            return time.perf_counter() - began

        serve(work)
        channel.close()
        process.stdin.close()


if __name__ == "__main__":
    tune_malloc()
    if sys.argv[2:] == ["server"]:
        server(int(sys.argv[1]) * 1_000_000)
    else:
        main(int(sys.argv[1]))
