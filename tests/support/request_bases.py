"""A valid message of each request, for tests that change it."""

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from pscommon.core.data_loop import LoopSpec
from pscommon.core.formats import spoken_format
from pscommon.core.model_spec import ModelSpec
from pscommon.wire import requests as rows
from pscommon.wire.messages import loop_to_proto, model_to_proto
from pscommon.wire.requests import AnyRequest
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import parameter_server_pb2 as ps
from psproto.v1 import shard_pb2, standby_pb2

LOOP = LoopSpec(0, size=1000, batch_size=1)


def bases(job: str, model: ModelSpec, worker: int, push_nbytes: int) -> Mapping[AnyRequest, Any]:
    """Return a message of each row; apart from one of its numbers it can be valid.

    worker: A member that the test can do without.
    push_nbytes: Bytes of a push to the server.
    """
    own: dict[str, Any] = {"job": job, "worker": worker}
    speaks = {"format": spoken_format()}
    header = ps.PushPullHeader(seq=1, has_data=True, samples=1, pull=ps.PULL_NONE, **own)
    exchange = ps.ExchangeRequest(header=header, data=bytes(push_nbytes))
    values = [co.ReportedValue(name="x")]
    found: dict[AnyRequest, Message] = {
        rows.JOIN: co.JoinRequest(**speaks),
        rows.REGISTER: co.RegisterRequest(model=model_to_proto(model), **own),
        rows.HEARTBEAT: co.HeartbeatRequest(values=values, **own),
        rows.LEAVE: co.LeaveRequest(job=job, worker=10**6),
        rows.NEXT_BATCH: co.NextBatchRequest(loop=loop_to_proto(LOOP), count=1, **own),
        rows.RETURN_BATCHES: co.ReturnBatchesRequest(**own),
        rows.COLLECTIVE: co.CollectiveRequest(number=1, kind="barrier", **own),
        rows.REPORT_METRICS: co.ReportMetricsRequest(values=values, **own),
        rows.SCALE_WORKERS: co.ScaleWorkersRequest(workers=1),
        rows.RESTORE_SNAPSHOT: co.RestoreSnapshotRequest(version=2**40),
        rows.SET_POLICY: co.SetPolicyRequest(policy="async"),
        rows.RESHARD: co.ReshardRequest(shards=1),
        rows.LINK_SHARD: co.LinkShardRequest(
            shard=1, shards=2, address="127.0.0.1:1", instance="i", term=1, **speaks
        ),
        rows.EXCHANGE: exchange,
        rows.EXCHANGE_ONCE: exchange,
        rows.READ_SHARD: shard_pb2.ReadShardRequest(job=job, current=True),
        rows.REPLICATE: standby_pb2.ReplicateRequest(
            shards=1, instance="s", address="127.0.0.1:1", **speaks
        ),
    }
    return {row: found.get(row, row.request()) for row in rows.REQUESTS}
