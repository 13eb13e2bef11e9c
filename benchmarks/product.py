"""What of the system under test a contender needs to know: how a job is started and what it can do."""

import inspect
from collections.abc import Sequence
from typing import Any

from benchmarks.setup import Setup
from benchmarks.shapes import shapes
from pscommon.core.model import ModelSpec, OptimizerSpec, TensorSpec
from psworker.client import Client
from psworker.local_servers import LocalServers

HAS_LANES = "lanes" in inspect.signature(Client.__init__).parameters
HAS_FLAGS = "flags" in inspect.signature(LocalServers.__init__).parameters
LANES = ("grpc", "shm") if HAS_LANES else ("grpc",)


def flags(setup: Setup) -> list[str]:
    """Of ps-server, beside those that LocalServers sets."""
    if not HAS_FLAGS:
        return []
    return ["--lanes", setup.lanes, *(["--in-flight", str(setup.in_flight)] if setup.in_flight else [])]


def servers(setup: Setup) -> LocalServers:
    """For a `with`; its address is shard 0's."""
    more: dict[str, Any] = {"flags": flags(setup)} if HAS_FLAGS else {}
    return LocalServers(setup.servers, setup.workers, setup.policy, None, **more)


def client(address: str, rank: int, setup: Setup) -> Client:
    more: dict[str, Any] = {"lanes": setup.lanes} if HAS_LANES else {}
    return Client(address, rank=rank, **more)


def spec(setup: Setup) -> ModelSpec:
    """The model as the servers see it: float32, one parameter group."""
    tensors = tuple(TensorSpec(name, shape, "float32") for name, shape in shapes(setup.model, setup.nbytes).items())
    return ModelSpec(tensors, OptimizerSpec(setup.optimizer, ({"lr": setup.rate},)))


def tapes(made: Client, nbytes: int) -> Sequence[memoryview]:
    """Gradients and weights, in the memory that is fastest for this client's lane."""
    if HAS_LANES:
        return made.tapes()
    return memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
