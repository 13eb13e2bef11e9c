"""Contender: the least that two processes can do through shared memory, with copies. Args: SETUP
[FD].

The worker copies its gradients in; the server applies SGD to weights that lie there, with torch
in one thread as ours; the worker copies the weights out. A byte each way over a pipe says whose
turn it is.
"""

import mmap
import os
import subprocess
import sys
import time

import numpy as np
import torch

from benchmarks.contenders.exchange import check_weights
from benchmarks.setup import Setup
from benchmarks.speaker import Measurements, serve

WARM_UP_COUNT = 3


def server(setup: Setup, file: int) -> None:
    torch.set_num_threads(1)
    memory = torch.frombuffer(mmap.mmap(file, 2 * setup.nbytes), dtype=torch.float32)
    gradients, weights = memory.chunk(2)
    while os.read(0, 1):
        weights.add_(gradients, alpha=-setup.rate)
        os.write(1, b".")


def main(setup: Setup) -> None:
    file = os.memfd_create("gradients and weights")
    os.ftruncate(file, 2 * setup.nbytes)
    shared = np.frombuffer(mmap.mmap(file, 2 * setup.nbytes), np.float32)
    shared_gradients, shared_weights = np.split(shared, 2)
    gradients, weights = np.ones_like(shared_gradients), np.zeros_like(shared_weights)
    command = [
        sys.executable,
        "-m",
        "benchmarks.contenders.shared_copy",
        setup.to_json(),
        str(file),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, pass_fds=[file]
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        to_server, from_server = process.stdin, process.stdout
        updates = 0

        def step() -> None:
            np.copyto(shared_gradients, gradients)
            to_server.write(b".")
            from_server.read(1)
            np.copyto(weights, shared_weights)

        def turn() -> Measurements:
            nonlocal updates
            began = time.perf_counter()
            for _ in range(setup.pieces):
                step()
            seconds = (time.perf_counter() - began) / setup.pieces
            updates += setup.pieces
            check_weights(weights[[0, -1]], setup, updates)
            return {"seconds": seconds, "count": setup.pieces}

        serve({"go": turn}, WARM_UP_COUNT)
        to_server.close()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        server(Setup.from_json(sys.argv[1]), int(sys.argv[2]))
    else:
        main(Setup.from_json(sys.argv[1]))
