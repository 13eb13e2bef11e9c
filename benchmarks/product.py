"""What of the system under test a contender needs to know: how a job is started and joined."""

import os

from benchmarks.setup import Setup
from benchmarks.shapes import shapes
from pscommon.core.model import ModelSpec, OptimizerSpec, TensorSpec
from psworker.client import Client
from psworker.local_servers import LocalServers

LANES = ("grpc", "shm")


def configure(setup: Setup) -> None:
    """Servers and workers that this process starts or becomes take their lane and budget from its environment."""
    os.environ["PS_LANES"] = setup.lanes
    if setup.in_flight:
        os.environ["PS_IN_FLIGHT"] = str(setup.in_flight)


def servers(setup: Setup) -> LocalServers:
    """For a `with`; its address is shard 0's."""
    configure(setup)
    return LocalServers(setup.servers, setup.workers, setup.policy, None)


def client(address: str, rank: int, setup: Setup) -> Client:
    configure(setup)
    return Client(address, rank=rank)


def spec(setup: Setup) -> ModelSpec:
    """The model as the servers see it: float32, one parameter group."""
    tensors = tuple(TensorSpec(name, shape, "float32") for name, shape in shapes(setup.model, setup.nbytes).items())
    return ModelSpec(tensors, OptimizerSpec(setup.optimizer, ({"lr": setup.rate},)))
