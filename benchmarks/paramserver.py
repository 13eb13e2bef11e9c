"""Contender: `workers` clients push gradients to one server and pull the new weights; SGD, sync. Args: MB workers."""

import sys
import threading
import time

import numpy as np

import psworker
from benchmarks.contender import serve
from benchmarks.shapes import resnet_like
from pscommon.core.model import ModelSpec, OptimizerSpec, TensorSpec
from pscommon.core.tape import Plan
from pscommon.malloc import tune_malloc
from psworker.local_servers import LocalServers


def main(megabytes: int, workers: int) -> None:
    tune_malloc()
    shapes = resnet_like(megabytes * 1_000_000 // 4)
    with LocalServers(1, workers, "sync", None) as servers:
        clients = [psworker.Client(servers.address, rank=rank) for rank in range(workers)]
        spec = ModelSpec(
            tuple(TensorSpec(n, s, "float32") for n, s in shapes.items()), OptimizerSpec("sgd", ({"lr": 0.1},))
        )
        tapes = [[np.zeros(Plan(spec, 1).nbytes, np.uint8).data for _ in range(2)] for _ in clients]

        def begin(rank: int) -> None:
            clients[rank].agree(spec)
            clients[rank].start(tapes[rank][0])

        def step(rank: int) -> None:
            weights, gradients = tapes[rank]
            clients[rank].exchange(gradients=gradients, weights=weights)

        def work() -> float:
            began = time.perf_counter()
            _all(clients, step)
            return time.perf_counter() - began

        _all(clients, begin)

        serve(work)
        for client in clients:
            client.close()


def _all(clients, action) -> None:  # type: ignore[no-untyped-def]
    threads = [threading.Thread(target=action, args=(rank,)) for rank in range(1, len(clients))]
    for thread in threads:
        thread.start()
    action(0)
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
