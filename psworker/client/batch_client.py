"""Batch leases of one worker from the job's data ledger."""

import threading
from collections.abc import Sequence

from pscommon.core.data_stream import Spec
from pscommon.core.log_entries import BatchKey
from pscommon.wire import messages as codec
from psproto.v1 import coordinator_pb2 as co
from psworker.connection.connection import Connection
from psworker.connection.shard_call import SLICE_SECONDS
from psworker.core.results import Lease
from psworker.exchange.model_exchange import ModelExchange


class BatchClient:
    """The data methods of `Client`, which documents their arguments."""

    def __init__(self, connection: Connection, model: ModelExchange) -> None:
        self._connection = connection
        self._model = model
        self._turn = threading.Lock()
        self._first_open = 0

    def take(self, loop: Spec, count: int, idle: bool, first_open: int) -> Lease:
        """Lease batches of a loop.

        The first request does not sit out of rounds, so a worker that gets batches at once
        misses no round.
        """
        with self._turn:
            self._first_open = first_open
            answer = self._ask(loop, count)
            if answer.numbers or answer.end or not idle:
                return _lease(answer)
            answer = self._wait(loop, count)
            self._connection.place.expect(answer.version)
            return _lease(answer, sat_out=answer.version > self._model.version)

    def share(self, loop: Spec) -> int:
        place, lane = self._connection.place, self._connection.lane
        request = co.NextBatchRequest(
            job=place.job, worker=place.worker, loop=codec.loop_to_proto(loop), share_only=True
        )
        return self._connection.call(
            "asking for the share of a loop",
            lambda: lane.next_batch(request, self._connection.call_seconds),
        ).share

    def give_back(self, batches: Sequence[BatchKey], used: bool = False) -> None:
        connection, place = self._connection, self._connection.place
        request = co.ReturnBatchesRequest(
            job=place.job, worker=place.worker, batches=codec.batches_to_proto(batches), used=used
        )
        connection.call(
            "returning batches",
            lambda: connection.lane.return_batches(request, connection.call_seconds),
        )

    def _wait(self, loop: Spec, count: int) -> co.NextBatchResponse:
        """Wait for batches or for the end of the loop, sitting out of rounds.

        Each update of the job restarts the wait timeout. A worker that was asked to leave does
        not wait.
        """
        retry, seen = (
            self._connection.new_retry(f"the wait for data of loop {loop.loop}"),
            self._model.version,
        )
        while True:
            answer = self._ask(loop, count, retry.next_wait_seconds(SLICE_SECONDS), idle=True)
            if answer.numbers or answer.end or self._connection.drain.asked:
                return answer
            if answer.version > seen:
                seen = answer.version
                retry.restart()
            retry.handle_wait(answer.waiting_for)

    def _ask(
        self, loop: Spec, count: int, wait: float = 0.0, idle: bool = False
    ) -> co.NextBatchResponse:
        lane, place = self._connection.lane, self._connection.place
        received = place.received.get(loop.loop, 0)
        request = co.NextBatchRequest(
            job=place.job,
            worker=place.worker,
            loop=codec.loop_to_proto(loop),
            count=count,
            idle=idle,
            wait_ms=round(wait * 1000),
            received=received,
            first_open=self._first_open,
        )
        timeout = wait + self._connection.call_seconds
        answer = self._connection.call("asking for data", lambda: lane.next_batch(request, timeout))
        place.received[loop.loop] = received + len(answer.numbers)
        return answer


def _lease(answer: co.NextBatchResponse, sat_out: bool = False) -> Lease:
    return Lease(tuple(answer.numbers), answer.end, sat_out, tuple(answer.following), answer.share)
