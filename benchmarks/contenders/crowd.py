"""One process that stands for many workers, each a client of its own; all push at once. Args:
SETUP ADDRESS RANK.

They share one tape of gradients, so that only the server needs memory for each of them.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np

from benchmarks import product
from benchmarks.setup import Setup
from benchmarks.speaker import Measurements, serve
from pscommon.system.process_limits import tune_malloc


def main(setup: Setup, address: str) -> None:
    tune_malloc()
    with ExitStack() as stack, ThreadPoolExecutor(setup.clients) as pool:
        clients = [
            stack.enter_context(product.client(address, rank, setup))
            for rank in range(setup.clients)
        ]
        plan = clients[0].model.agree(product.spec(setup))
        weights = np.zeros(plan.nbytes, np.uint8).data
        gradients = np.ones(plan.nbytes // 4, np.float32).view(np.uint8).data
        clients[0].model.start(weights)
        for client in clients[1:]:
            client.model.agree(product.spec(setup))
            client.model.start(weights)

        def turn() -> Measurements:
            began = time.perf_counter()
            for _ in range(setup.pieces):
                results = list(
                    pool.map(
                        lambda client: client.model.exchange(gradients=gradients, weights=None),
                        clients,
                    )
                )
                if any(result.status != "applied" for result in results):
                    raise RuntimeError(f"not all pushes counted: {results}")
            return {"seconds": (time.perf_counter() - began) / setup.pieces, "count": setup.pieces}

        serve({"go": turn}, 1)


if __name__ == "__main__":
    main(Setup.from_json(sys.argv[1]), sys.argv[2])
