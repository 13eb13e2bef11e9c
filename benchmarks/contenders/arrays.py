"""One of our workers: as a script without a framework, numpy arrays by name. Args: SETUP ADDRESS
RANK.
"""

import sys
import time

import numpy as np

from benchmarks import product
from benchmarks.contenders.exchange import WARM_UP_COUNT, check_weights
from benchmarks.setup import Setup
from benchmarks.shapes import shapes
from benchmarks.speaker import Measurements, serve
from pscommon.core.model_spec import OptimizerSettings
from pscommon.system.process_limits import tune_malloc


def main(setup: Setup, address: str, rank: int) -> None:
    tune_malloc()
    named = shapes(setup.model, setup.nbytes).items()
    with product.client(address, rank, setup) as client:
        weights = {name: np.zeros(shape, np.float32) for name, shape in named}
        gradients = {name: np.ones(shape, np.float32) for name, shape in named}
        client.register(
            weights, OptimizerSettings(setup.optimizer, ({"lr": setup.rate},), setup.clip_norm)
        )

        def turn() -> Measurements:
            began = time.perf_counter()
            for _ in range(setup.pieces):
                result = client.push_pull(gradients, out=weights)
            seconds = (time.perf_counter() - began) / setup.pieces
            check_weights(
                np.array([array.flat[-1] for array in weights.values()]), setup, result.version
            )
            return {"seconds": seconds, "count": setup.pieces}

        serve({"go": turn}, WARM_UP_COUNT)


if __name__ == "__main__":
    main(Setup.from_json(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
