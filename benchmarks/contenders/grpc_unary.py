"""Contender: bare unary gRPC calls, words "go" (the model's bytes each way) and "empty". Args:
SETUP [server].
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import grpc

from benchmarks.contenders.bare import answer, bare_channel, bare_server
from benchmarks.setup import Setup
from benchmarks.speaker import Measurements, serve
from pscommon.system.process_limits import tune_malloc

WARM_UP_COUNT = 3


def main(setup: Setup) -> None:
    with (
        bare_server("benchmarks.contenders.grpc_unary", setup) as (_, address),
        bare_channel(address) as channel,
    ):
        stub: Any = channel.unary_unary("/bare.Bare/Call")

        def calls(message: bytes) -> Callable[[], Measurements]:
            def turn() -> Measurements:
                began = time.perf_counter()
                for _ in range(setup.pieces):
                    echo = stub(message)
                seconds = (time.perf_counter() - began) / setup.pieces
                if echo != message:
                    raise RuntimeError("other bytes came back")
                return {"seconds": seconds, "count": setup.pieces}

            return turn

        serve({"go": calls(bytes(setup.nbytes)), "empty": calls(b"")}, WARM_UP_COUNT)


if __name__ == "__main__":
    tune_malloc()
    if sys.argv[2:] == ["server"]:
        answer(grpc.unary_unary_rpc_method_handler(lambda message, context: message))
    else:
        main(Setup.from_json(sys.argv[1]))
