"""What of the system under test a contender needs to know: how a job is started and joined."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext

from benchmarks.setup import Setup
from benchmarks.shapes import shapes
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.wire.endpoint import Endpoint, open_channel
from psproto.v1.coordinator_pb2 import GetStatusRequest, SaveSnapshotRequest
from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from psworker.client.client import Client
from psworker.local_servers import local_servers

LANES = ("grpc", "stream", "shm")
POLL_INTERVAL_SECONDS = 0.05
"""Seconds between two looks whether a standby is in sync."""


def configure(setup: Setup, is_server: bool = False) -> None:
    """Servers and workers that this process starts or becomes take their lane and budget from
    its environment.
    """
    os.environ["PS_LANES"] = setup.lanes
    if setup.tls:
        prefix = "" if is_server else "client-"
        os.environ["PS_TLS_CA"] = f"{setup.tls}/ca.pem"
        os.environ["PS_TLS_CERT"] = f"{setup.tls}/{prefix}cert.pem"
        os.environ["PS_TLS_KEY"] = f"{setup.tls}/{prefix}key.pem"
    if setup.in_flight:
        os.environ["PS_IN_FLIGHT"] = str(setup.in_flight)


@contextmanager
def servers(setup: Setup) -> Iterator[str]:
    """Yield the address of shard 0. Snapshots are taken when they are asked for."""
    configure(setup, is_server=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        if setup.durability:
            os.environ |= {
                "PS_DATA_DIR": folder,
                "PS_SNAPSHOT_EVERY": "1h",
                "PS_SNAPSHOT_KEEP": "1",
            }
            os.environ |= {"PS_DURABILITY": setup.durability, "PS_LOG_FSYNC": setup.fsync}
        with (
            local_servers(setup.servers, setup.workers, setup.policy, None, os.environ) as address,
            standby(address, setup) if setup.standby else nullcontext(),
        ):
            yield address


@contextmanager
def standby(address: str, setup: Setup) -> Iterator[None]:
    """Of the only server; in sync from the beginning."""
    rules = ["--policy", setup.policy, "--min-workers", str(setup.workers)]
    command = [
        sys.executable,
        "-m",
        "psserver",
        "--standby-of",
        address,
        "--bind",
        "127.0.0.1:0",
        *rules,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with closing(open_channel(Endpoint(address))) as channel:
            stub = CoordinatorServiceStub(channel)
            while '"in sync"' not in stub.GetStatus(GetStatusRequest(), timeout=10).status_json:
                time.sleep(POLL_INTERVAL_SECONDS)
        yield
    finally:
        process.terminate()
        process.wait()


def save(address: str) -> None:
    """A snapshot of the version that stands; returns when it is on the disk."""
    with closing(open_channel(Endpoint(address))) as channel:
        CoordinatorServiceStub(channel).SaveSnapshot(
            SaveSnapshotRequest(wait_ms=60_000), timeout=70
        )


def client(address: str, rank: int, setup: Setup) -> Client:
    configure(setup)
    return Client(address, rank=rank)


def spec(setup: Setup) -> ModelSpec:
    """The model as the servers see it: float32, one parameter group."""
    tensors = tuple(
        TensorSpec(name, shape, "float32")
        for name, shape in shapes(setup.model, setup.nbytes).items()
    )
    return ModelSpec(
        tensors, OptimizerSettings(setup.optimizer, ({"lr": setup.rate},), setup.clip_norm)
    )
