"""Collective calls of one worker."""

from pscommon.core.errors import WaitTimeoutError
from pscommon.core.script_place import ScriptPlace
from pscommon.wire.messages import place_fields
from pscommon.wire.requests import COLLECTIVE
from psproto.v1 import coordinator_pb2 as co
from psworker.connection.connection import Connection
from psworker.core.results import CollectiveCall, CollectiveResult


class CollectiveClient:
    """The collective method of `Client`, which documents its arguments."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def call(self, number: int, call: CollectiveCall, place: ScriptPlace | int) -> CollectiveResult:
        connection, membership = self._connection, self._connection.membership
        what = f"{call.kind} (collective call {number})"
        retry = connection.new_retry(what)
        while True:
            wait_seconds = retry.next_wait_seconds()
            request = co.CollectiveRequest(
                job=membership.job,
                worker=membership.worker,
                number=number,
                kind=call.kind,
                names=call.values,
                values=call.values.values(),
                samples=call.samples,
                json=call.text,
                wait_ms=round(wait_seconds * 1000),
                **place_fields(place),
            )
            answer = connection.call(what, COLLECTIVE, request, wait_seconds)
            if answer.done:
                membership.require_version(answer.version)
                values = dict(zip(call.values, answer.values, strict=True))
                return CollectiveResult(values, answer.json, answer.version)
            try:
                retry.handle_wait(answer.waiting_for)
            except WaitTimeoutError as error:
                raise WaitTimeoutError(
                    f"{error}. Try: the same calls on all workers, or a larger wait_timeout",
                    error.reason,
                ) from error
