"""Two servers with the real wire protocol and fixed answers instead of a job."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from pscommon.core.errors import PSError
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from pscommon.wire.endpoint import SERVER_OPTIONS
from pscommon.wire.messages import model_to_proto
from pscommon.wire.status import answering
from psproto.v1 import coordinator_pb2 as pb
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1.coordinator_pb2_grpc import (
    CoordinatorServiceServicer,
    add_CoordinatorServiceServicer_to_server,
)
from psproto.v1.parameter_server_pb2_grpc import (
    ParameterServerServiceServicer,
    add_ParameterServerServiceServicer_to_server,
)

MODEL = ModelSpec(
    (
        TensorSpec("net.weight", (300, 4), "float32"),
        TensorSpec("net.seen", (), "int64", "buffer"),
    ),
    OptimizerSettings("adam", ({"lr": 0.1},)),
)

STATUS: dict[str, Any] = {
    "job": "job-7",
    "policy": "ssp",
    "staleness": 3,
    "state": "running",
    "version": 120,
    "steps": 240,
    "samples": 7680,
    "seconds": 200.0,
    "waiting_for": "worker 2 (host-b, pid 17)",
    "min_workers": 2,
    "servers": [
        {
            "shard": shard,
            "address": f"10.0.0.{shard}:50051",
            "connected": not shard,
            "version": 120,
            "parameter_bytes": 2432,
            "state_bytes": 4864,
            "received_bytes": 12_345_678,
            "sent_bytes": 5,
            "apply_seconds": 0.5,
            "pid": 40 + shard,
        }
        for shard in range(2)
    ],
    "workers": [
        {
            "worker": 1,
            "rank": 0,
            "host": "host-a",
            "pid": 16,
            "device": "cuda:0",
            "state": "active",
            "clock": 121,
            "steps": 121,
            "staleness": 0,
            "phase_seconds": {"data": 1.5, "compute": 20.0, "push": 2.0, "wait": 5.0},
            "step_seconds": 0.25,
            "samples_per_second": 128.0,
            "phase": "compute",
            "silent_seconds": 0.5,
            "reason": "",
            "health": "slow",
            "own_seconds": 0.125,
            "draining": False,
        },
        {
            "worker": 2,
            "rank": 1,
            "host": "host-b",
            "pid": 17,
            "device": "cpu",
            "state": "lost",
            "clock": 119,
            "steps": 119,
            "staleness": 3,
            "phase_seconds": {"data": 1.0, "compute": 8000.0},
            "step_seconds": 90.0,
            "samples_per_second": 0.1,
            "phase": "",
            "silent_seconds": None,
            "reason": "lease ended",
            "health": "lost",
            "own_seconds": None,
            "draining": False,
        },
    ],
    "data": [
        {
            "loop": 0,
            "size": 1000,
            "batch_size": 32,
            "epochs": 3,
            "epoch": 1,
            "committed": 40,
            "leased": 2,
            "total": 94,
        }
    ],
    "snapshots": [
        {"version": 100, "path": "/data/snapshots/000000000100", "nbytes": 7300, "seconds": 61.0}
    ],
    "snapshot_age_seconds": 61.0,
    "pushes": {"applied": 240, "duplicate": 0, "stale": 1, "rejected": 0},
    "metrics": {"accuracy\x1b[31m": 0.97},
    "model": {
        "tensors": 2,
        "parameters": 1201,
        "bytes": 4808,
        "plan_digest": "d",
        "optimizer": "adam",
    },
    "optimizers": [{"optimizer": "", "gradient_norm": 0.75, "learning_rates": [0.1, None, 0.1]}],
    "finished": 0,
}


@dataclass
class Cluster(CoordinatorServiceServicer, ParameterServerServiceServicer):
    """Shard 0 of 2 and its received requests. `error`: answer of every coordinator call instead."""

    shard: int = 0
    shards: int = 2
    coordinator: str = ""
    status: dict[str, Any] = field(default_factory=lambda: dict(STATUS))
    model: ModelSpec | None = MODEL
    error: PSError | None = None
    hang: threading.Event = field(default_factory=threading.Event)
    stopped: list[str] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    drained: list[int] = field(default_factory=list)
    scaled: list[int] = field(default_factory=list)
    policies: list[tuple[str, int | None, int | None]] = field(default_factory=list)
    has_traces: bool = True
    on_trace: Callable[[], None] = lambda: None
    traced: list[int | None] = field(default_factory=list)
    traces: list[pb.GetTraceResponse] = field(default_factory=list)
    restored: list[int] = field(default_factory=list)
    address: str = ""

    def __post_init__(self) -> None:
        self.hang.set()

    def Describe(
        self, request: ps.DescribeRequest, context: grpc.ServicerContext
    ) -> ps.DescribeResponse:
        self.hang.wait(30)
        return ps.DescribeResponse(
            format=3,
            job="job-7",
            shard=self.shard,
            shards=self.shards,
            coordinator=self.coordinator,
        )

    def GetStatus(
        self, request: pb.GetStatusRequest, context: grpc.ServicerContext
    ) -> pb.GetStatusResponse:
        with self._answering(context):
            return pb.GetStatusResponse(status_json=json.dumps(self.status))

    def Register(
        self, request: pb.RegisterRequest, context: grpc.ServicerContext
    ) -> pb.RegisterResponse:
        with self._answering(context):
            assert request.observe
            if self.model is None:
                return pb.RegisterResponse(
                    state=pb.RegisterResponse.STATE_PENDING, waiting_for="the first worker"
                )
            return pb.RegisterResponse(
                state=pb.RegisterResponse.STATE_READY, model=model_to_proto(self.model)
            )

    def GetTrace(
        self, request: pb.GetTraceRequest, context: grpc.ServicerContext
    ) -> pb.GetTraceResponse:
        if not self.has_traces:
            return super().GetTrace(request, context)
        self.on_trace()
        with self._answering(context):
            after = request.after if request.HasField("after") else None
            self.traced.append(after)
            return self.traces.pop(0) if self.traces else pb.GetTraceResponse(next=after or 0)

    def SaveSnapshot(
        self, request: pb.SaveSnapshotRequest, context: grpc.ServicerContext
    ) -> pb.SaveSnapshotResponse:
        with self._answering(context):
            self.waits.append(request.wait_ms)
            return pb.SaveSnapshotResponse(version=121, path="/data/snapshots/000000000121")

    def RestoreSnapshot(
        self, request: pb.RestoreSnapshotRequest, context: grpc.ServicerContext
    ) -> pb.RestoreSnapshotResponse:
        with self._answering(context):
            self.waits.append(request.wait_ms)
            self.restored.append(request.version)
            return pb.RestoreSnapshotResponse()

    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.DrainResponse:
        with self._answering(context):
            self.drained.append(request.worker)
            return pb.DrainResponse()

    def ScaleWorkers(
        self, request: pb.ScaleWorkersRequest, context: grpc.ServicerContext
    ) -> pb.ScaleWorkersResponse:
        with self._answering(context):
            self.scaled.append(request.workers)
            return pb.ScaleWorkersResponse()

    def SetPolicy(
        self, request: pb.SetPolicyRequest, context: grpc.ServicerContext
    ) -> pb.SetPolicyResponse:
        with self._answering(context):
            staleness = request.staleness if request.HasField("staleness") else None
            max_staleness = request.max_staleness if request.HasField("max_staleness") else None
            self.policies.append((request.policy, staleness, max_staleness))
            return pb.SetPolicyResponse()

    def StopJob(
        self, request: pb.StopJobRequest, context: grpc.ServicerContext
    ) -> pb.StopJobResponse:
        with self._answering(context):
            self.stopped.append(request.reason)
            return pb.StopJobResponse()

    @contextlib.contextmanager
    def _answering(self, context: grpc.ServicerContext) -> Iterator[None]:
        with answering(context):
            if self.error is not None:
                raise self.error
            yield


@contextlib.contextmanager
def serving(cluster: Cluster) -> Iterator[Cluster]:
    """Serve on a free port of 127.0.0.1 in this context; cluster.address is the address."""
    server = grpc.server(ThreadPoolExecutor(4), options=SERVER_OPTIONS)
    add_CoordinatorServiceServicer_to_server(cluster, server)
    add_ParameterServerServiceServicer_to_server(cluster, server)
    cluster.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield cluster
    finally:
        cluster.hang.set()
        server.stop(None).wait(10)
