"""Requests of workers to the coordinator, over streams."""

import time
from functools import partial
from typing import Any

from pscommon.core.errors import InvalidRequestError
from pscommon.wire.stream_format import decode_message
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import stream_pb2 as pb
from psserver.coordinator.service import CoordinatorService
from psserver.coordinator.servicer import ControlPlaneServicer
from psserver.core.commands.request_checks import wait_seconds
from psserver.stream.stream_service import StreamService
from psserver.stream.wakeup import Wakeup

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
        self._executor, self._service = coordinator.executor, service
        self._servicer = ControlPlaneServicer(coordinator)
        self._methods: dict[str, Any] = {
            "heartbeat": self._servicer.Heartbeat,
            "return_batches": self._servicer.ReturnBatches,
            "report_metrics": self._servicer.ReportMetrics,
        }

    async def answer(self, message: bytes, wakeup: Wakeup) -> bytes:
        """Return the response to a CoordinatorRequest. Raises PSErrors."""
        sent = decode_message(pb.CoordinatorRequest, message)
        name = sent.WhichOneof("request")
        if name is None:
            raise InvalidRequestError("the coordinator does not know this request")
        request = getattr(sent, name)
        with self._service.timing(METHOD_NAMES[name]):
            if isinstance(request, co.NextBatchRequest | co.CollectiveRequest):
                answer = await self._wait(request, wakeup)
            else:
                answer = await self._service.do(partial(self._methods[name], request, None))
        return bytes(answer.SerializeToString())

    async def _wait(
        self, request: co.NextBatchRequest | co.CollectiveRequest, wakeup: Wakeup
    ) -> Any:
        """Repeat a request until there is an answer, or its time is over."""
        deadline = time.monotonic() + wait_seconds(request.wait_ms)
        while True:
            seen = self._executor.revision
            answer = await self._service.do(partial(self._try, request))
            left = deadline - time.monotonic()
            if left <= 0 or _is_complete(answer):
                return answer
            with self._executor.watch(request.worker, wakeup.wake):
                await wakeup.until(partial(self._executor.has_news, request.worker, seen), left)

    def _try(
        self, request: co.NextBatchRequest | co.CollectiveRequest
    ) -> co.NextBatchResponse | co.CollectiveResponse:
        if isinstance(request, co.NextBatchRequest):
            return self._servicer.next_batch(request, 0.0)
        return self._servicer.collective(request, 0.0)


def _is_complete(answer: co.NextBatchResponse | co.CollectiveResponse) -> bool:
    if isinstance(answer, co.NextBatchResponse):
        return bool(answer.numbers) or answer.end
    return answer.done
