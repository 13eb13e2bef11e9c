"""One worker's connection to a job: transport, membership, and their threads."""

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from pscommon.core.errors import InvalidRequestError, PSError
from pscommon.core.formats import check_wire_format, spoken_format
from pscommon.system import signals as interruptible
from pscommon.system.process_id import process_id
from psproto.v1 import coordinator_pb2 as co
from psworker.connection.discovery import addresses_of, discover
from psworker.connection.membership import Heartbeat, StepProgress, WorkerMembership
from psworker.connection.retry import FIRST_PAUSE, PendingRequests, RetryDeadline, TimeLimits
from psworker.connection.shard_call import ShardCall, run_in_turn
from psworker.connection.unanswered import end_unanswered
from psworker.session import metrics
from psworker.session.drain import Drain
from psworker.session.reports import ReportBuffer, ValueReport
from psworker.transport.executor import ShardExecutor
from psworker.transport.grpc import GrpcTransport, Transport
from psworker.transport.streams import Cancellation

CALL_SECONDS = 10.0
"""Longest deadline of a call that the coordinator answers at once."""

LEAVE_SECONDS = 2.0
LAST_WORD_SECONDS = 0.5
"""Deadline of the leave request to servers that did not answer earlier requests."""

T = TypeVar("T")
Call = TypeVar("Call", bound=ShardCall)

log = logging.getLogger("psworker")


class Connection:
    """A worker's connection, open until `close`.

    Attributes:
        lane: Transport to the servers.
        place: The membership; that of an observer (worker 0) until `join`.
        bad_gradients: The job's handling of gradients with NaN or Inf; empty until `join`.
        drain: Whether this worker was asked to leave.
        reports: Values that the script has reported.
    """

    def __init__(self, lane: Transport, limits: TimeLimits, place: WorkerMembership) -> None:
        self.lane = lane
        self.place = place
        self.bad_gradients = ""
        self.drain = Drain(lane.clock, None if lane.direct else self._end_unanswered)
        self.reports = ReportBuffer(lane.clock.now)
        self._limits = limits
        self._waits = PendingRequests()
        self._crew = ShardExecutor("psworker-shard")
        self._request = co.JoinRequest()
        self._heartbeat: Heartbeat | None = None
        self._pid = os.getpid()
        self._closed = False
        self._left = True

    @property
    def call_seconds(self) -> float:
        """Deadline in seconds of a call that the coordinator answers at once.

        At most the time for which a server may be silent.
        """
        return min(CALL_SECONDS, self._limits.connect)

    def join(self, rank: int | None, attempt: int, device: str) -> None:
        """Join the job and keep the membership with heartbeats.

        Args:
            rank: Place in a round's sum; None: not set.
            attempt: Number of earlier starts of this rank by a launcher.
            device: The worker's device, for the status.

        Raises:
            MismatchError: The servers run another job.
        """
        host, process = socket.gethostname(), "" if self.lane.direct else process_id()
        self._request = co.JoinRequest(
            host=host, pid=os.getpid(), device=device, process=process, format=spoken_format()
        )
        if rank is not None:
            self._request.rank, self._request.attempt = rank, attempt
        self._enter()
        self.drain.opens()

    def rejoin(self, reason: str) -> None:
        """Join the same job again as a new worker, and leave the old membership.

        reason: Why the worker leaves its old membership.
        """
        self._check_open()
        old, heartbeat = self.place, self._heartbeat
        if not old.worker:
            raise InvalidRequestError("an observer has no place in the job to come back to")
        self._enter()
        if heartbeat is not None:
            heartbeat.stop()
        self._say_goodbye(old, reason)

    def _enter(self) -> None:
        lane, self._request.job = self.lane, self.place.job
        limits = self._watched(lambda: None, self.drain.check)
        answer = RetryDeadline("joining the job", lane.clock, limits).ask(
            lambda: lane.join(self._request, self.call_seconds)
        )
        check_wire_format(answer.format, f"shard 0 at {lane.addresses[0]}", "this worker")
        lane.learn(answer.job, answer.addresses, [0] * len(answer.addresses), answer.standbys)
        self.place = WorkerMembership(
            answer.job,
            answer.worker,
            answer.open_loop,
            answer.policy,
            answer.known_loops,
            answer.open_loops,
        )
        self._left = False
        self.place.reports = self.reports
        self.place.learn_standing(answer)
        self.bad_gradients = answer.bad_gradients
        metrics.in_job(True)
        if not lane.direct:
            self._heartbeat = Heartbeat(
                self.place, lane, answer.lease_ms / 1000, self.drain, self._waits
            )

    def call(self, what: str, call: Callable[[], T]) -> T:
        """Return the coordinator's answer to a request, repeated while no server answers."""
        return self.new_retry(what).ask(call)

    def new_retry(self, what: str) -> RetryDeadline:
        """Return the retry state of a new request. what: Names the request in logs and errors."""
        self.check()
        return RetryDeadline(
            what, self.lane.clock, self._watched(self.place.check, self.drain.check)
        )

    def exchange(
        self, parts: Callable[[TimeLimits, Cancellation], Sequence[Call]]
    ) -> Sequence[Call]:
        """Run the shards' parts and return them; at the same time unless the lane is direct."""
        self.check()
        cancellation = Cancellation(alone=len(self.lane.addresses) == 1)
        exchanges = parts(
            self._watched(cancellation.check, self.place.check, self.drain.check), cancellation
        )
        if self.lane.direct:
            run_in_turn(exchanges)
        else:
            with interruptible.deferred(cancellation.cancel):
                self._crew.run([part.run for part in exchanges], cancellation)
        return exchanges

    def find_servers(self) -> bool:
        """Get the servers' addresses from shard 0; return whether they have changed.

        Returns False while shard 0 does not know the addresses of all shards.
        """
        lane = self.lane
        found = self.call("finding the servers", lambda: lane.whereabouts(self.call_seconds))
        if not all(found) or list(found) == list(lane.addresses):
            self.lane.clock.sleep(FIRST_PAUSE)
            return False
        lane.relocate(found)
        return True

    def check(self) -> None:
        """Raise if the connection cannot be used: closed, left, forked, or membership lost."""
        self._check_open()
        self.drain.begin()
        self.place.check()

    def touch(self) -> None:
        """Record a call of the script that may make no request."""
        self.drain.begin()
        self._waits.touch()

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise InvalidRequestError(
                f"this Client belongs to process {self._pid}, from which this one was forked: use "
                f"it there"
            )
        if self._closed:
            raise InvalidRequestError("this Client is closed")
        if self._left and self.place.worker:
            raise InvalidRequestError("this Client has left the job")
        self.drain.check_answered()

    def _end_unanswered(self) -> None:
        end_unanswered(self.lane, self.drain, self._waits, lambda: self._left)

    def show(self, progress: StepProgress) -> None:
        """Set the progress for the next heartbeat; with a direct lane, send a heartbeat now."""
        self.touch()
        self.place.progress = progress
        if self.lane.direct:
            self.place.beat(self.lane, self.call_seconds, self.drain)

    def leave(self, reason: str) -> None:
        """Leave the job, so that no other worker waits for this one.

        An unanswered request does no harm, because the lease ends.

        reason: Why the worker leaves; empty if it is done.
        """
        if self._left or self._pid != os.getpid():
            return
        self._left = True
        metrics.in_job(False)
        self.drain.closes()
        if self._heartbeat is not None:
            self._heartbeat.stop()
        # Reading a value may fail on a broken device; the worker must leave nevertheless.
        with suppress(Exception):
            self.reports.settle(final=True)
        self._say_goodbye(self.place, reason, self.reports.unsent())

    def send_reports(self) -> None:
        """Send the reported values that no heartbeat has delivered."""
        self.reports.settle(final=True)
        if not (reports := self.reports.unsent()):
            return
        place = self.place
        request = co.ReportMetricsRequest(
            job=place.job, worker=place.worker, values=place.wire_values(reports)
        )
        self.call("reporting", lambda: self.lane.report(request, self.call_seconds))
        self.reports.confirm(reports)

    def _say_goodbye(
        self, place: WorkerMembership, reason: str, reports: Sequence[ValueReport] = ()
    ) -> None:
        request = co.LeaveRequest(
            job=place.job, worker=place.worker, reason=reason, version=place.at_least
        )
        request.values.extend(place.wire_values(reports))
        try:
            self.lane.leave(request, LAST_WORD_SECONDS if self.drain.given_up else LEAVE_SECONDS)
        except PSError as error:
            log.debug("worker %d could not say that it leaves: %s", place.worker, error)

    def close(self, reason: str = "") -> None:
        """Leave the job, end the threads and close the channels.

        May be called again; does nothing in a forked process.
        """
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        try:
            self.leave(reason)
        finally:
            self._crew.close()
            self.lane.close()

    def _watched(self, *checks: Callable[[], None]) -> TimeLimits:
        place, drain = self.place, self.drain

        def check() -> None:
            for each in checks:
                each()

        return replace(
            self._limits,
            check=check,
            unanswered=drain.unanswered,
            hurry=lambda: place.stopping,
            deadline=lambda: drain.deadline,
            waits=self._waits,
        )


def connected(
    servers: str | Sequence[str] | None,
    lane: Transport | None,
    environment: Mapping[str, str],
    limits: TimeLimits,
) -> Connection:
    """Return a connection over `lane`, or over gRPC to the job of these servers."""
    job = environment.get("PS_JOB", "")
    if lane is not None:
        return Connection(lane, limits, WorkerMembership(job, 0))
    given = addresses_of(servers)
    cluster = discover(given, limits.connect)
    return Connection(
        GrpcTransport(cluster.addresses, given), limits, WorkerMembership(job or cluster.job, 0)
    )
