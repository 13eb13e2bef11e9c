"""Contender: a parameter server as torch.distributed.rpc has it (TensorPipe). Args: KIND SETUP
[STORE].

KIND: "best" for what TensorPipe chooses on one host, which is shared memory; "tcp" for what it
has between two hosts. One call pushes all gradients and returns the new weights; the server
applies SGD, in one thread as ours.
"""

import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed import rpc

from benchmarks.contenders.exchange import check_weights
from benchmarks.setup import Setup
from benchmarks.shapes import shapes
from benchmarks.speaker import Measurements, guarded, serve

WARM_UP_COUNT = 3

WEIGHTS: list[Tensor] = []
"""The server's: a function that is called over RPC finds its state in its module."""


def push_pull(gradients: Sequence[Tensor], rate: float) -> Sequence[Tensor]:
    """On the server: one SGD step; the first call makes the weights, 0 everywhere."""
    if not WEIGHTS:
        WEIGHTS.extend(torch.zeros_like(gradient) for gradient in gradients)
    torch._foreach_add_(WEIGHTS, list(gradients), alpha=-rate)
    return WEIGHTS


def join(kind: str, store: str, rank: int) -> None:
    ways = {"best": {}, "tcp": {"_transports": ["uv"], "_channels": ["basic"]}}[kind]
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", rpc_timeout=60, **ways)
    rpc.init_rpc(("worker", "server")[rank], rank=rank, world_size=2, rpc_backend_options=options)  # type: ignore[no-untyped-call]


def main(kind: str, setup: Setup) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        command = [
            sys.executable,
            "-m",
            "benchmarks.contenders.torch_rpc",
            kind,
            setup.to_json(),
            store,
        ]
        with subprocess.Popen(guarded(command)) as process:
            join(kind, store, 0)
            # called as a function of the module by that name, on both sides
            from benchmarks.contenders.torch_rpc import push_pull as call

            gradients = [torch.ones(shape) for shape in shapes(setup.model, setup.nbytes).values()]
            updates = 0

            def turn() -> Measurements:
                nonlocal updates
                began = time.perf_counter()
                for _ in range(setup.pieces):
                    weights = rpc.rpc_sync("server", call, args=(gradients, setup.rate))
                seconds = (time.perf_counter() - began) / setup.pieces
                updates += setup.pieces
                check_weights(
                    np.array([weight.flatten()[-1] for weight in weights]), setup, updates
                )
                return {"seconds": seconds, "count": setup.pieces}

            serve({"go": turn}, WARM_UP_COUNT)
            rpc.shutdown()
            process.wait(30)


if __name__ == "__main__":
    torch.set_num_threads(1)
    # torch's own use of its own module
    warnings.filterwarnings("ignore", message="You are using a Backend")
    if len(sys.argv) > 3:
        join(sys.argv[1], sys.argv[3], 1)
        rpc.shutdown()  # answers calls until the worker shuts down as well
    else:
        main(sys.argv[1], Setup.from_json(sys.argv[2]))
