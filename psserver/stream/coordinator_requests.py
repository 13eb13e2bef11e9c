"""Requests of workers to the coordinator, over streams."""

from functools import partial
from typing import Any

from pscommon.core.errors import InvalidRequestError
from pscommon.wire.stream_format import decode_message
from psproto.v1 import stream_pb2 as pb
from psserver.coordinator.service import CoordinatorService
from psserver.coordinator.servicer import ControlPlaneServicer
from psserver.stream.stream_service import StreamService, StreamWaiter

METHOD_NAMES = {
    "heartbeat": "Heartbeat",
    "next_batch": "NextBatch",
    "return_batches": "ReturnBatches",
    "collective": "Collective",
    "report_metrics": "ReportMetrics",
}
"""Names of the requests in metrics, as over gRPC."""


class StreamRequests:
    """Answers the requests. One that waits occupies no thread."""

    def __init__(self, coordinator: CoordinatorService, service: StreamService) -> None:
        self._service, servicer = service, ControlPlaneServicer(coordinator)
        self._methods: dict[str, Any] = {
            "heartbeat": servicer.Heartbeat,
            "return_batches": servicer.ReturnBatches,
            "report_metrics": servicer.ReportMetrics,
        }
        self._waiting: dict[str, Any] = {
            "next_batch": servicer.next_batch,
            "collective": servicer.collective,
        }

    async def answer(self, message: bytes) -> bytes:
        """Return the response to a CoordinatorRequest. Raises PSErrors."""
        sent = decode_message(pb.CoordinatorRequest, message)
        name = sent.WhichOneof("request")
        if name is None:
            raise InvalidRequestError("the coordinator does not know this request")
        request, waiter = getattr(sent, name), StreamWaiter(self._service)
        with self._service.timing(METHOD_NAMES[name]):
            if name in self._waiting:
                answer = await self._waiting[name](request, waiter)
            else:
                answer = await waiter.do(partial(self._methods[name], request, None))
        return bytes(answer.SerializeToString())
