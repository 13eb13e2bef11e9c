"""One worker's connection to a job: transport, membership, and their threads."""

import atexit
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from pscommon.core.errors import InvalidRequestError, PSError
from pscommon.core.formats import check_wire_format, spoken_format
from pscommon.security.credentials import use_environment
from pscommon.settings.values import Lanes
from pscommon.system.process_id import process_id
from pscommon.telemetry.logs import get_logger
from pscommon.wire.requests import DESCRIBE, JOIN, LEAVE
from psproto.v1 import coordinator_pb2 as co
from psproto.v1 import parameter_server_pb2 as ps
from psworker.connection.discovery import addresses_of, discover, use_tokens_of
from psworker.connection.membership import Heartbeat, WorkerMembership
from psworker.connection.retry import (
    FIRST_PAUSE_SECONDS,
    PendingRequests,
    RetryDeadline,
    TimeLimits,
)
from psworker.session import metrics
from psworker.session.arguments import security_of
from psworker.session.drain import Drain
from psworker.session.reports import ReportBuffer, ValueReport
from psworker.transport.executor import SequentialExecutor, ShardExecutor
from psworker.transport.grpc_transport import GrpcTransport
from psworker.transport.interface import Transport

LEAVE_SECONDS = 2.0
LEAVE_AFTER_SILENCE_SECONDS = 0.5
"""Deadline of the leave request to servers that did not answer earlier requests."""

POLL_SECONDS = 0.1
UNANSWERED_SECONDS = 0.75
"""Age of a call in flight at which the servers are probed, once the worker was asked to leave."""
PROBE_SECONDS = 0.75

DROPPED = "its Client was dropped without close()"
ENDED = "its process ended without close()"

log = get_logger(__name__)


class Connection:
    """A worker's connection, open until `close`.

    Attributes:
        transport: Transport to the servers.
        membership: The membership; that of an observer (worker 0) until `join`.
        bad_gradients: The job's handling of gradients with NaN or Inf; empty until `join`.
        drain: Whether this worker was asked to leave.
        executor: Runs the calls of a request to all shards.
        reports: Values that the script has reported.
        limits: Time limits of this membership's requests.
        lease_seconds: How long the servers wait for a sign of life; set by `join`.
    """

    def __init__(
        self, transport: Transport, limits: TimeLimits, membership: WorkerMembership
    ) -> None:
        self.transport = transport
        self.membership = membership
        self.bad_gradients = ""
        self.seed = 0
        self.drain = Drain(transport.clock, None if transport.direct else self._end_unanswered)
        self.reports = ReportBuffer(transport.clock.now)
        self.executor = (
            SequentialExecutor() if transport.direct else ShardExecutor("psworker-shard")
        )
        self._waits = PendingRequests()
        self.limits = self._watched(limits, membership)
        self._join_request = co.JoinRequest()
        self.lease_seconds = 0.0
        self._heartbeat: Heartbeat | None = None
        self._pid = os.getpid()
        self._is_closed = False
        self._has_left = True

    def join(self, rank: int | None, attempt: int, device: str, training: str = "") -> None:
        """Join the job and keep the membership with heartbeats.

        Args:
            rank: Place in a round's sum; None: not set.
            attempt: Number of earlier starts of this rank by a launcher.
            device: The worker's device, for the status.
            training: Name of the script's training; empty: that of the job.

        Closes the connection on failure.

        Raises:
            MismatchError: The servers run another job.
            TrainingOver: The training is over.
            WaitTimeoutError: Workers are still in another training.
        """
        host, process = socket.gethostname(), "" if self.transport.direct else process_id()
        self._join_request = co.JoinRequest(
            host=host,
            pid=os.getpid(),
            device=device,
            process=process,
            format=spoken_format(),
            training=training,
        )
        if rank is not None:
            self._join_request.rank, self._join_request.attempt = rank, attempt
        try:
            self._join()
        except BaseException:
            self.close()
            raise
        self.drain.opens()

    def rejoin(self, reason: str) -> None:
        """Join the same job again as a new worker, and leave the old membership.

        reason: Why the worker leaves its old membership.
        """
        self._check_open()
        old, heartbeat = self.membership, self._heartbeat
        if not old.worker:
            raise InvalidRequestError("cannot rejoin: an observer has no membership")
        self._join()
        if heartbeat is not None:
            heartbeat.stop()
        self._send_leave(old, reason)

    def _join(self) -> None:
        transport, self._join_request.job = self.transport, self.membership.job
        limits = replace(self.limits, check=self.drain.check)
        retry = RetryDeadline("joining the job", transport, limits)
        answer = co.JoinResponse()
        while not answer.worker:
            wait_seconds = retry.next_wait_seconds() if self._join_request.training else 0.0
            self._join_request.wait_ms = round(wait_seconds * 1000)
            answer = retry.ask(JOIN, self._join_request, wait_seconds)
            check_wire_format(answer.format, f"shard 0 at {transport.addresses[0]}", "this worker")
            if not answer.worker:
                retry.handle_wait(answer.waiting_for)
        transport.learn(answer.job, answer.addresses, [0] * len(answer.addresses), answer.standbys)
        self.membership = WorkerMembership(
            answer.job,
            answer.worker,
            answer.policy,
            answer.loaders,
            answer.known_loops,
            answer.training,
        )
        self.limits = self._watched(self.limits, self.membership)
        self._has_left = False
        self.membership.reports = self.reports
        self.membership.learn_standing(answer)
        self.bad_gradients = answer.bad_gradients
        metrics.in_job(True)
        self.lease_seconds = answer.lease_ms / 1000
        if not transport.direct:
            self._heartbeat = Heartbeat(
                self.membership, transport, self.lease_seconds, self.drain, self._waits
            )

    def new_retry(self, what: str) -> RetryDeadline:
        """Return the retry state of a new request. what: Names the request in logs and errors."""
        self.check()
        return RetryDeadline(what, self.transport, self.limits)

    def find_servers(self) -> bool:
        """Get the servers' addresses from shard 0; return whether they have changed.

        Returns False while shard 0 does not know the addresses of all shards.
        """
        answer = self.new_retry("finding the servers").ask(DESCRIBE, ps.DescribeRequest())
        if self.transport.relocate(answer.addresses):
            return True
        self.transport.clock.sleep(FIRST_PAUSE_SECONDS)
        return False

    def check(self) -> None:
        """Raise if the connection cannot be used: closed, left, forked, or membership lost."""
        self._check_open()
        self.drain.begin()
        self.membership.check()

    def touch(self) -> None:
        """Record a call of the script that may make no request."""
        self.drain.begin()
        self._waits.calls += 1

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise InvalidRequestError(
                f"this Client belongs to process {self._pid}, and this process is a fork of it. "
                "Try: use the Client in that process only"
            )
        if self._is_closed:
            raise InvalidRequestError("this Client is closed")
        if self._has_left and self.membership.worker:
            raise InvalidRequestError("this Client has left the job")
        if self.drain.given_up:
            self.drain.check_answered()

    def _end_unanswered(self) -> None:
        """End the script's calls when a server does not answer; in a thread of a drain.

        Runs until the worker has left. When a server does not answer a probe, all calls end and
        the drain gives up. A call to servers that answer may take any time.
        """
        drain, waits, since = self.drain, self._waits, time.monotonic()
        while not self._has_left:
            time.sleep(POLL_SECONDS)
            now = time.monotonic()
            if not waits.open:
                if now >= drain.deadline:  # before the deadline a failed call may be repeated soon
                    since = now
            elif now - since >= UNANSWERED_SECONDS and now >= drain.deadline - UNANSWERED_SECONDS:
                if not self.transport.answers(PROBE_SECONDS) and waits.open:
                    drain.give_up()
                    self.transport.end_calls()
                    return
                since = time.monotonic()

    def leave(self, reason: str) -> None:
        """Leave the job, so that no other worker waits for this one.

        An unanswered request does no harm, because the lease ends.

        reason: Why the worker leaves; empty if it is done.
        """
        if self._has_left or self._pid != os.getpid():
            return
        self._has_left = True
        metrics.in_job(False)
        self.drain.closes()
        if self._heartbeat is not None:
            self._heartbeat.stop()
        # Reading a value may fail on a broken device; the worker must leave nevertheless.
        with suppress(Exception):
            self.reports.settle(final=True)
        self._send_leave(self.membership, reason, self.reports.unsent())

    def _send_leave(
        self, membership: WorkerMembership, reason: str, reports: Sequence[ValueReport] = ()
    ) -> None:
        request = co.LeaveRequest(
            job=membership.job,
            worker=membership.worker,
            reason=reason,
            version=membership.min_version,
        )
        request.values.extend(membership.wire_values(reports))
        try:
            self.transport.request(
                LEAVE,
                request,
                LEAVE_AFTER_SILENCE_SECONDS if self.drain.given_up else LEAVE_SECONDS,
            )
        except PSError as error:
            log.debug("leave_unanswered", worker=membership.worker, problem=str(error))

    def close(self, reason: str = "") -> None:
        """Leave the job, end the threads and close the channels.

        May be called again; does nothing in a forked process.
        """
        if self._is_closed or self._pid != os.getpid():
            return
        self._is_closed = True
        try:
            self.leave(reason)
        finally:
            self.executor.close()
            self.transport.close()

    def _watched(self, limits: TimeLimits, membership: WorkerMembership) -> TimeLimits:
        """Return time limits that hold while this membership does."""
        drain = self.drain

        def check() -> None:
            membership.check()
            drain.check()

        return replace(
            limits,
            check=check,
            unanswered=drain.unanswered,
            hurry=lambda: membership.stopping,
            deadline=lambda: drain.wait_deadline,
            waits=self._waits,
        )


def connected(
    servers: str | Sequence[str] | None,
    transport: Transport | None,
    environment: Mapping[str, str],
    limits: TimeLimits,
    lanes: Lanes,
) -> Connection:
    """Return a connection over `transport`, or over the network to the job of these servers."""
    job = environment.get("PS_JOB", "")
    if transport is not None:
        return Connection(transport, limits, WorkerMembership(job, 0))
    use_environment(security_of(os.environ))
    given = use_tokens_of(addresses_of(servers))
    cluster = discover(given, limits.connect)
    return Connection(
        GrpcTransport(cluster.addresses, given, lanes),
        limits,
        WorkerMembership(job or cluster.job, 0),
    )


class ClientFinalizer:
    """Closes connections whose owners the script drops without `close`, or leaves open.

    The garbage collector may find a dropped client at any point of the program. At some points a
    close is unsafe: inside a call on the same channel gRPC's core aborts the process, and under a
    lock that the close needs it deadlocks. So the finalizer only puts the connection into a queue,
    and a thread closes it. SimpleQueue's `put` is reentrant.
    """

    def __init__(self) -> None:
        self._watched: set[Connection] = set()
        self._dropped: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, owner: object, connection: Connection) -> None:
        """Close the connection once its owner has been collected."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._close_dropped, name="abandoned-clients", daemon=True
            )
            self._thread.start()
        self._watched.add(connection)
        weakref.finalize(owner, self._drop, connection).atexit = False

    def end(self) -> None:
        """Close all connections and end the thread."""
        for connection in list(self._watched):
            connection.close(ENDED)
        if self._thread is not None:
            self._dropped.put(None)
            self._thread.join()

    @property
    def is_used(self) -> bool:
        """Whether this process has had a connection."""
        return self._thread is not None

    def _drop(self, connection: Connection) -> None:
        self._watched.discard(connection)
        self._dropped.put(connection)

    def _close_dropped(self) -> None:
        while (connection := self._dropped.get()) is not None:
            connection.close(DROPPED)


_finalizer = ClientFinalizer()
close_after = _finalizer.watch
close_all = _finalizer.end
atexit.register(close_all)


def is_used() -> bool:
    """Return whether this process has been connected to servers: gRPC survives no fork then."""
    return _finalizer.is_used
