"""A server as a standby: it follows its shard's primary until it becomes primary itself."""

import json
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import grpc

from pscommon.core.errors import (
    AuthenticationError,
    MismatchError,
    PSError,
    UnreachableError,
)
from pscommon.core.formats import check_wire_format, spoken_format
from pscommon.system.thread_team import ThreadTeam
from pscommon.telemetry.logs import get_logger
from pscommon.wire.endpoint import Endpoint, listen_grpc, open_channel
from pscommon.wire.metrics_port import serve_metrics
from pscommon.wire.requests import REPLICATE, STEP_DOWN, Stub, call
from pscommon.wire.status import error_from
from pscommon.wire.tls_probe import cause_of
from psproto.v1 import standby_pb2 as pb
from psserver.core.shard.failover import FailoverMachine, LeaseStore, PrimaryRecord
from psserver.core.shard.state_machine import LogInvariantError
from psserver.durability.record_sink import RecordSource
from psserver.durability.shard_state import LogUnfitError
from psserver.durability.state_records import StateRecord, StateRecordKind, received
from psserver.process.config import ServerConfig
from psserver.process.handlers import grpc_handler
from psserver.process.job_files import JobIdFile
from psserver.process.metrics import standby_metrics
from psserver.replication.handlers import NotPrimary, standby_handlers
from psserver.replication.hello import Hello
from psserver.replication.standby_state import Promotion, StandbyState

TICK_SECONDS = 0.1
ACKNOWLEDGE_INTERVAL_SECONDS = 0.5
"""Time between acknowledgements while no record comes."""

NOTICE_INTERVAL_SECONDS = 8.0
"""Time between log lines about a primary that does not answer."""

MAX_CONCURRENT_CALLS = 64
"""Concurrent calls: most come from workers that look for the primary."""

STEP_DOWN_SECONDS = 5.0
"""Time for a primary to hand over."""

log = get_logger(__name__)


class Standby:
    """Serves only Promote until it is primary. `run` is its whole life.

    Threads: the thread of `run` follows the primary; the ticker cancels a silent connection; a
    call of Promote decides and waits.
    """

    def __init__(self, config: ServerConfig, lease: LeaseStore | None) -> None:
        self.config = config
        self.name = uuid.uuid4().hex
        self.ended = threading.Event()
        self.failure: PSError | None = None
        assert config.standby_of is not None
        # the only job that it may follow; empty: any
        self._job = config.job or JobIdFile(config.data_dir).stored_job
        self.primary = config.standby_of
        self._lease = lease
        self._team = ThreadTeam(config.threads or 1)
        self._standby_state: StandbyState | None = None
        self._progress = threading.Condition()
        self._received = self._acknowledged = 0
        self._busy = False
        self._is_answered = False  # the connection has brought a message
        self._problem = ""  # reported to the primary
        self._why = ""  # why the state is not loaded
        self._call: Any = None
        self._promoted: PrimaryRecord | None = None
        self._stopped_following = threading.Event()
        self._promoting = threading.Lock()
        self._noticed_at = time.monotonic()
        self._grpc, self.address = listen_grpc(Endpoint(config.bind), MAX_CONCURRENT_CALLS)
        self.advertised = config.advertise or self.address
        self._failover = FailoverMachine(self.name, self.advertised, lease, time.monotonic())
        handler = grpc_handler(standby_handlers(self.promote))
        self._grpc.add_generic_rpc_handlers((handler, NotPrimary(lambda: self.primary)))
        shown = standby_metrics(config.shard, lambda: self.version)
        self.monitor = (
            serve_metrics(config.metrics_bind, shown, self.ready)
            if config.metrics_bind is not None
            else None
        )

    # ---- following -------------------------------------------------------------------------------

    def run(self) -> Promotion | None:
        """Follow the primary; return the promotion, or None if the job is over or `stop` was
        called.
        """
        self._grpc.start()
        log.info("standby_listening", address=self.address, standby_of=self.primary)
        ticker = threading.Thread(target=self._tick_forever, name="standby", daemon=True)
        ticker.start()
        try:
            while self._promoted is None and not self.ended.is_set():
                self._follow()
        finally:
            # later calls of Promote are refused; an earlier one finishes first
            with self._promoting:
                self.ended.set()
            self._stopped_following.set()
            ticker.join()
            self._grpc.stop(grace=2.0).wait()
            if self.monitor is not None and self._promoted is None:
                self.monitor.close()
        if self._promoted is None or self._standby_state is None:
            return None
        if not self._failover.has_state:
            raise PSError(
                "cannot become primary: the last record of the former primary could not be applied"
            )
        log.warning(
            "standby_promoted", term=self._promoted.term, version=self._standby_state.version
        )
        return Promotion(
            self._promoted, self._standby_state, self._failover.is_complete, self.monitor
        )

    def stop(self, reason: str) -> None:
        """End without becoming primary.

        If the primary hands over at this moment, this standby becomes primary nevertheless: no
        other server is.
        """
        with self._promoting:
            self.ended.set()
        self._cancel_call()

    @property
    def version(self) -> int:
        """Number of updates in the replicated weights."""
        return self._standby_state.version if self._standby_state is not None else 0

    def ready(self) -> tuple[bool, str]:
        """Answer /readyz: whether this standby could take over."""
        if self._failover.has_state:
            return True, f"standby of {self.primary}, version {self.version}"
        absent = f"the whole state of {self.primary} is not here yet{self._why_suffix}"
        return False, self._problem or absent

    @property
    def _why_suffix(self) -> str:
        return f" ({self._why})" if self._why else ""

    def _follow(self) -> None:
        """Follow one connection until it ends; then take over if the primary has been silent long
        enough.
        """
        self._is_answered = False
        try:
            self._find_primary()
            with open_channel(Endpoint(self.primary), tensors=True) as channel:
                self._call = Stub(channel, REPLICATE)(self._requests())
                if self.ended.is_set() or self._promoted is not None:
                    self._cancel_call()  # a concurrent cancel saw only the previous call
                for number, record in received(self._observed(self._call)):
                    if record is not None:
                        self._acknowledge(number)
                        self._busy = True  # not reading: this is not the primary's silence
                        self._apply(record)
                    self._busy = False
        except grpc.RpcError as failure:
            error = error_from(failure, f"the primary at {self.primary}")
            # a connection that had an answer did not fail by TLS, and a takeover may be due
            problem = error if self._is_answered else cause_of(error, self.primary)
            # every record that has arrived is complete, however the connection ends
            is_refused = isinstance(problem, AuthenticationError) and not self._failover.has_state
            self._handle_end(
                problem
                if is_refused or isinstance(error, MismatchError)
                else UnreachableError(str(problem), error.reason)
            )
        except (
            PSError,
            LogUnfitError,
            LogInvariantError,
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ) as unfit:
            self._handle_end(unfit)
        self._acknowledge(0)
        self._busy = False
        if self._promoted is None and self._failover.is_takeover_due(time.monotonic()):
            self._try_take_over()
        self.ended.wait(TICK_SECONDS)

    def _observed(self, call: Iterator[pb.ReplicateResponse]) -> Iterator[pb.ReplicateResponse]:
        for message in call:
            if not self._is_answered:
                self._is_answered = True
                check_wire_format(message.format, f"the primary at {self.primary}", "this standby")
            self._failover.note_contact(time.monotonic())
            yield message

    def _acknowledge(self, number: int) -> None:
        with self._progress:
            self._received = number
            self._progress.notify_all()

    def _find_primary(self) -> None:
        """Read the primary's address from the lease; without one it is that of --standby-of."""
        primary_record = self._lease.read() if self._lease is not None else None
        if primary_record is not None and primary_record.holder != self.advertised:
            self.primary = primary_record.holder

    def _apply(self, record: StateRecord) -> None:
        if (record.source, record.kind) == (RecordSource.LINE, StateRecordKind.HELLO):
            self._begin(Hello.from_json(json.loads(record.header)))
        elif (record.source, record.kind) == (RecordSource.LINE, StateRecordKind.END):
            log.info("primary_ended")
            self.ended.set()
        elif self._standby_state is not None:
            self._standby_state.take(record)
            if self._standby_state.is_loaded and not self._failover.has_state:
                self._failover.has_state, self._problem, self._why = True, "", ""
                log.info("primary_state_loaded", version=self._standby_state.version)

    def _begin(self, hello: Hello) -> None:
        if not self._failover.begin_loading(hello.term):
            raise UnreachableError(
                f"{self.primary} is no longer primary: its term is only {hello.term}",
                "NOT_PRIMARY",
            )
        self._job = hello.job or self._job
        self._standby_state = StandbyState(self.config, self._team, hello)

    @property
    def _retried_reasons(self) -> tuple[str, ...]:
        """Reasons of refusals that are retried.

        If another job now uses the primary's address, a loaded state may exist nowhere else.
        """
        return ("SHARD_TAKEN", "JOB_MISMATCH") if self._failover.has_state else ("SHARD_TAKEN",)

    def _handle_end(self, error: Exception) -> None:
        """Handle the end of a connection.

        Permanent refusals end this process; so does a long silence if no state is loaded.
        Everything else is retried.
        """
        self._why = str(error)
        unfit = not isinstance(error, (UnreachableError, MismatchError, AuthenticationError))
        if unfit:
            self._failover.has_state = False
        if self.ended.is_set() or self._promoted is not None:
            return
        if isinstance(error, AuthenticationError) or (
            isinstance(error, MismatchError) and error.reason not in self._retried_reasons
        ):
            self.failure = error
            self.ended.set()
        elif unfit:
            self._problem = str(error)
            log.error("primary_state_unusable", problem=self._problem)
        elif (
            not self._failover.has_state
            and self._failover.silence_seconds(time.monotonic()) >= self.config.join_timeout
        ):
            self.failure = UnreachableError(
                f"the primary at {self.primary} did not answer within "
                f"{self.config.join_timeout:g} s: {error}"
            )
            self.ended.set()
        elif time.monotonic() - self._noticed_at >= NOTICE_INTERVAL_SECONDS:
            self._noticed_at = time.monotonic()
            log.info("waiting_for_primary", primary=self.primary, problem=str(error))

    def _requests(self) -> Iterator[pb.ReplicateRequest]:
        """Yield the request for replication, then acknowledgements: at every change and at every
        interval.
        """
        config = self.config
        yield pb.ReplicateRequest(
            shard=config.shard,
            shards=config.shards,
            instance=self.name,
            address=self.advertised,
            term=self._failover.term,
            problem=self._problem,
            job=self._job,
            format=spoken_format(),
        )
        while not self.ended.is_set() and self._promoted is None:
            with self._progress:
                self._progress.wait_for(
                    lambda: self._received != self._acknowledged, ACKNOWLEDGE_INTERVAL_SECONDS
                )
                self._acknowledged = self._received
            yield pb.ReplicateRequest(received=self._acknowledged)

    def _tick_forever(self) -> None:
        """Cancel a silent connection: the thread that reads it is blocked."""
        while not self.ended.wait(TICK_SECONDS):
            if self._busy:
                self._failover.note_contact(time.monotonic())
            elif self._failover.is_takeover_due(time.monotonic()):
                self._cancel_call()

    def _cancel_call(self) -> None:
        call = self._call
        if isinstance(call, grpc.Call):
            call.cancel()

    # ---- becoming primary ------------------------------------------------------------------------

    def _try_take_over(self) -> None:
        """Become primary after the silence, if the lease allows it."""
        with self._promoting:
            silent = self._failover.silence_seconds(time.monotonic())
            try:
                self._promoted = self._promoted or self._failover.take_over()
            except (OSError, ValueError) as error:
                log.error("failover_lock_unusable", problem=str(error))
            if self._promoted is None:
                self._failover.has_state = False  # the primary continued alone: this state is old
                log.warning(
                    "failover_refused",
                    reason="this standby was not in sync with the unreachable primary",
                    silent_seconds=silent,
                )

    def promote(self, seconds: float) -> pb.PromoteResponse:
        """Become primary on request.

        Raises MismatchError if this standby is not in sync, UnreachableError if it stops.
        """
        with self._promoting:
            if self._promoted is None:
                if self.ended.is_set():
                    raise UnreachableError("this standby is stopping", "STOPPING")
                note = self._ask_to_step_down()
                primary_record = self._failover.take_over()
                if primary_record is None:
                    raise MismatchError(
                        f"cannot promote this standby: {self.primary} may have continued without "
                        f"it. Try: restart that server, or all servers from a snapshot",
                        "NOT_IN_SYNC",
                    )
                self._promoted = primary_record
            else:
                note = ""
        self._cancel_call()
        self._stopped_following.wait(seconds)
        assert self._standby_state is not None
        return pb.PromoteResponse(
            term=self._promoted.term, version=self._standby_state.version, note=note
        )

    def _ask_to_step_down(self) -> str:
        """Ask the primary to step down; return a note for the operator if it does not answer."""
        if not self._failover.has_state or self._standby_state is None:
            raise MismatchError(
                f"this standby has not loaded the state of {self.primary}{self._why_suffix}. "
                f"Try: wait until `ps-ctl status` shows it in sync",
                "NOT_IN_SYNC",
            )
        try:
            request, who = pb.StepDownRequest(instance=self.name), f"the primary at {self.primary}"
            with open_channel(Endpoint(self.primary)) as channel:
                call(channel, STEP_DOWN, request, STEP_DOWN_SECONDS, who)
            self._failover.is_handover_complete = True
        except UnreachableError as silence:
            log.warning("step_down_unanswered", primary=self.primary, problem=str(silence))
            version = self._standby_state.version
            return (
                f"the primary at {self.primary} did not answer; "
                f"this standby continues from version {version}"
            )
        return ""
