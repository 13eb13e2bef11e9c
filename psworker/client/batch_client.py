"""Batch leases of one worker from the job's data ledger."""

import threading
from collections.abc import Sequence

from pscommon.core.data_stream import Spec, StreamSpec
from pscommon.core.log_entries import BatchKey
from pscommon.core.script_place import PassName, ScriptPlace
from pscommon.telemetry.logs import get_logger
from pscommon.tracing.recorder import worker_spans
from pscommon.wire import messages as codec
from pscommon.wire.requests import NEXT_BATCH, RETURN_BATCHES
from psproto.v1 import coordinator_pb2 as co
from psworker.connection.connection import Connection
from psworker.connection.retry import RetryDeadline
from psworker.core.results import Lease
from psworker.exchange.model_exchange import ModelExchange

log = get_logger(__name__)


class BatchClient:
    """Batches of the job's loops, for one worker."""

    def __init__(self, connection: Connection, exchange: ModelExchange) -> None:
        self._connection = connection
        self._exchange = exchange
        self._lock = threading.Lock()
        self._has_warned = False

    def next_batches(
        self,
        loop: Spec,
        count: int = 1,
        idle: bool = False,
        first_open: ScriptPlace | int | None = None,
    ) -> Lease:
        """Lease up to `count` batches of a loop.

        The first request does not sit out of rounds, so a worker that gets batches at once
        misses no round. With `idle`, later requests wait for batches or for the end of the loop,
        and sit out of rounds. Each update of the job restarts the wait timeout. A worker that was
        asked to leave does not wait.

        Args:
            loop: The loop.
            count: Largest number of batches.
            idle: The worker has no batch: wait for one or for the loop's end, and sit out of
                rounds meanwhile. False: return at once, perhaps without batches.
            first_open: Number of the first loop that the script is in or may still begin; None:
                this loop. Other workers get batches left in earlier loops, until all have passed
                them. Or the place of a script, which names the pass; the job gives its number.
        """
        place = loop.loop if first_open is None else first_open
        connection, version, wait_seconds = self._connection, self._exchange.version, 0.0
        name: PassName | int = loop.loop
        if isinstance(place, ScriptPlace) and place.current is not None:
            name = place.current
        retry: RetryDeadline | None = None
        with self._lock:
            while True:
                membership = connection.membership
                received = membership.received_batches.get(name, 0)
                request = co.NextBatchRequest(
                    job=membership.job,
                    worker=membership.worker,
                    loop=codec.loop_to_proto(loop),
                    count=count,
                    idle=retry is not None,
                    wait_ms=round(wait_seconds * 1000),
                    received=received,
                    **codec.place_fields(place),
                )
                asking = connection.new_retry("asking for data")
                began = worker_spans.now()
                answer = asking.ask(NEXT_BATCH, request, wait_seconds)
                if began:
                    worker_spans.add_of_step("lease", began, received)
                membership.received_batches[name] = received + len(answer.numbers)
                if answer.numbers or answer.end or not idle:
                    break
                if retry is None:
                    retry = connection.new_retry(f"the wait for data of loop {loop.loop}")
                elif connection.drain.asked:
                    break
                else:
                    if answer.version > version:
                        version = answer.version
                        retry.restart()
                    retry.handle_wait(self._missing_source(loop) or answer.waiting_for)
                if answer.weights_wanted:
                    self._exchange.offer_weights()
                wait_seconds = retry.next_wait_seconds()
            if retry is None:
                return _lease(answer)
            membership.require_version(answer.version)
            return _lease(answer, sat_out=answer.version > self._exchange.version)

    def share(self, loop: Spec) -> int:
        """Return how many batches of a loop this worker can expect, with the current workers."""
        connection, membership = self._connection, self._connection.membership
        request = co.NextBatchRequest(
            job=membership.job,
            worker=membership.worker,
            loop=codec.loop_to_proto(loop),
            share_only=True,
        )
        retry = connection.new_retry("asking for the share of a loop")
        return retry.ask(NEXT_BATCH, request).share

    def has_ended(self, loop: PassName) -> bool:
        """Return whether this pass had ended when this worker joined."""
        return self._connection.membership.has_ended(loop)

    def return_batches(self, batches: Sequence[BatchKey], used: bool = False) -> None:
        """Return unused batches, so that other workers may lease them.

        used: Mark them as used without a push instead, so that no other worker leases them.
        """
        connection, membership = self._connection, self._connection.membership
        request = co.ReturnBatchesRequest(
            job=membership.job,
            worker=membership.worker,
            batches=codec.batches_to_proto(batches),
            used=used,
        )
        connection.new_retry("returning batches").ask(RETURN_BATCHES, request)

    def _missing_source(self, loop: Spec) -> str:
        """Return what a worker waits for that got no source of a stream; warn of it once."""
        membership = self._connection.membership
        if not isinstance(loop, StreamSpec) or membership.received_batches.get(loop.loop, 0):
            return ""
        workers = membership.workers
        if not loop.laps < workers:
            return ""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "stream_sources_too_few",
                sources=loop.sources,
                epochs=loop.epochs,
                workers=workers,
                effect="one worker reads a source, so this worker has no data of this pass",
                remedy=f"data that can be read as {workers} sources, and sources={workers} in "
                "job.batches; or fewer workers",
            )
        return f"the pass's end: each of its {loop.laps} sources has another worker"


def _lease(answer: co.NextBatchResponse, sat_out: bool = False) -> Lease:
    has_loop = answer.HasField("loop")
    return Lease(
        tuple(answer.numbers),
        answer.end,
        sat_out,
        tuple(answer.following),
        answer.share,
        answer.loop if has_loop else None,
        answer.first_epoch if has_loop else None,
    )
