"""The report that a worker is lost, from another process of its group."""

from contextlib import closing
from typing import NamedTuple

from pscommon.wire.endpoint import Endpoint, open_channel
from pscommon.wire.requests import LEAVE, Stub
from psproto.v1 import coordinator_pb2 as co

REPORT_SECONDS = 1.0


class LossTicket(NamedTuple):
    """What a process needs to report a worker.

    Attributes:
        address: Address of shard 0.
        key: The worker's key, hexadecimal.
    """

    address: str
    job: str
    worker: int
    key: str


def report_loss(ticket: LossTicket, reason: str) -> None:
    """Tell the servers that the worker is lost, so that --on-worker-loss decides at once.

    Raises grpc.RpcError; then the worker's lease ends later.
    """
    request = co.LeaveRequest(job=ticket.job, worker=ticket.worker, reason=reason, lost=True)
    with closing(open_channel(Endpoint(ticket.address))) as channel:
        Stub(channel, LEAVE)(request, REPORT_SECONDS, bytes.fromhex(ticket.key))
