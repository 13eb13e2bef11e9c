"""A server's life as a standby: it follows its shard's primary, until it is one itself."""

import json
import logging
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import grpc

from pscommon.core.errors import MismatchError, PSError, UnreachableError
from pscommon.core.formats import check_wire_format, spoken_format
from pscommon.system.thread_team import ThreadTeam
from pscommon.telemetry.http import MetricsServer
from pscommon.wire.channel import open_channel
from pscommon.wire.status import error_from, translated
from psproto.v1 import standby_pb2 as pb
from psproto.v1.standby_pb2_grpc import StandbyServiceStub, add_StandbyServiceServicer_to_server
from psserver.core.shard.failover import FailoverMachine
from psserver.core.shard.primary_lease import LeaseStore, PrimaryRecord
from psserver.core.shard.state_machine import LogInvariantError
from psserver.durability.record_sink import RecordSource
from psserver.durability.shard_state import LogUnfitError
from psserver.durability.state_records import StateRecord, StateRecordKind, received
from psserver.process.config import ServerConfig
from psserver.process.grpc_server import listen
from psserver.process.job_id_file import JobIdFile
from psserver.process.metrics import standby_metrics
from psserver.replication.servicer import NotPrimary, StandbyServicer
from psserver.replication.standby_state import Promotion, StandbyState

TICK = 0.1
BEAT = 0.5
"""Seconds between acknowledgements when nothing comes."""

NOTICE = 8.0
"""Seconds between lines for people about a primary that does not answer."""

CALLS = 64
"""Calls at a time: most are of workers that look for the primary."""

STEP_DOWN = 5.0
"""Seconds that a primary gets to hand over."""

log = logging.getLogger("psserver")


class Standby:
    """Serves nothing but Promote until it is primary. `run` is its whole life.

    Threads: the one of `run` follows; the ticker ends a line that is silent; a call of Promote
    decides and waits.
    """

    def __init__(self, config: ServerConfig, lease: LeaseStore | None) -> None:
        self.config = config
        self.name = uuid.uuid4().hex
        self.ended = threading.Event()
        self.failure: PSError | None = None
        assert config.standby_of is not None
        self._job = (
            config.job or JobIdFile(config.data_dir).noted
        )  # the only one that it may follow; empty: any
        self.primary = config.standby_of
        self._lease = lease
        self._team = ThreadTeam(config.threads or 1)
        self._standby_state: StandbyState | None = None
        self._news = threading.Condition()
        self._received = self._said = 0
        self._busy = False
        self._problem = ""  # that the primary is to hear of
        self._why = ""  # there is no line, or the whole state has not come over it
        self._call: Any = None
        self._promoted: PrimaryRecord | None = None
        self._at_rest = threading.Event()  # nobody follows any more
        self._promoting = threading.Lock()
        self._told = time.monotonic()
        self._grpc, self.address = listen(config.bind, CALLS)
        self.advertised = config.advertise or self.address
        self._failover = FailoverMachine(self.name, self.advertised, lease, time.monotonic())
        add_StandbyServiceServicer_to_server(StandbyServicer(None, self.promote), self._grpc)
        self._grpc.add_generic_rpc_handlers((NotPrimary(lambda: self.primary),))
        shown = standby_metrics(config.shard, lambda: self.version)
        self.monitor = (
            MetricsServer(config.metrics_bind, shown, self.ready)
            if config.metrics_bind is not None
            else None
        )

    # ---- its life --------------------------------------------------------------------------------

    def run(self) -> Promotion | None:
        """Returns when it is primary; None: when the job is over, or this process was told to
        end (`stop`).
        """
        self._grpc.start()
        log.info("listening", extra={"address": self.address, "standby_of": self.primary})
        ticker = threading.Thread(target=self._tick_forever, name="standby", daemon=True)
        ticker.start()
        try:
            while self._promoted is None and not self.ended.is_set():
                self._follow()
        finally:
            with (
                self._promoting
            ):  # who asks now is told that this one ends; who asked before is waited for
                self.ended.set()
            self._at_rest.set()
            ticker.join()
            self._grpc.stop(grace=2.0).wait()
            if self.monitor is not None and self._promoted is None:
                self.monitor.close()
        if self._promoted is None or self._standby_state is None:
            return None
        if not self._failover.has_state:
            raise PSError(
                "the last record before this standby became primary could not be carried out"
            )
        self._wait_for_silence()
        log.warning(
            "this standby is primary now",
            extra={"term": self._promoted.term, "version": self._standby_state.version},
        )
        return Promotion(
            self._promoted, self._standby_state, self._failover.is_complete, self.monitor
        )

    def stop(self, reason: str) -> None:
        """End, without being primary; but where its primary hands over just now, as one, for
        nobody else is.
        """
        with self._promoting:
            self.ended.set()
        self._hang_up()

    @property
    def version(self) -> int:
        """Number of updates in the weights that it has."""
        return self._standby_state.version if self._standby_state is not None else 0

    def ready(self) -> tuple[bool, str]:
        """For /readyz: could it take over?"""
        if self._failover.has_state:
            return True, f"standby of {self.primary}, version {self.version}"
        return (
            False,
            self._problem or f"the whole state of {self.primary} is not here yet{self._because}",
        )

    @property
    def _because(self) -> str:
        return f" ({self._why})" if self._why else ""

    def _wait_for_silence(self) -> None:
        """async: until the other one cannot believe any more that it is primary."""
        time.sleep(self._failover.reply_delay_seconds)

    def _follow(self) -> None:
        """One line, from connecting to its end; then, where that is due, an attempt to be
        primary.
        """
        try:
            self._find()
            with open_channel(self.primary, tensors=True) as channel:
                self._call = StandbyServiceStub(channel).Replicate(self._words())
                if self.ended.is_set() or self._promoted is not None:
                    self._hang_up()  # who did so just now had only the line of before
                for number, record in received(self._heard(self._call)):
                    if record is not None:
                        self._acknowledge(number)
                        self._busy = True  # nobody listens now: that is no silence of the primary
                        self._take(record)
                    self._busy = False
        except grpc.RpcError as failure:
            error = error_from(failure, f"the primary at {self.primary}")
            # however a line ends, what came over it is whole
            self._bear(
                error
                if isinstance(error, MismatchError)
                else UnreachableError(str(error), error.reason)
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
            self._bear(unfit)
        self._acknowledge(0)
        self._busy = False
        if self._promoted is None and self._failover.is_takeover_due(time.monotonic()):
            self._try()
        self.ended.wait(TICK)

    def _heard(self, call: Iterator[pb.ReplicateResponse]) -> Iterator[pb.ReplicateResponse]:
        for message in call:
            check_wire_format(message.format, f"the primary at {self.primary}", "this standby")
            self._failover.note_contact(time.monotonic())
            yield message

    def _acknowledge(self, number: int) -> None:
        with self._news:
            self._received = number
            self._news.notify_all()

    def _find(self) -> None:
        """Who is primary now, where the lock says that; else it is whom this standby was started
        for.
        """
        primary_record = self._lease.read() if self._lease is not None else None
        if primary_record is not None and primary_record.holder != self.advertised:
            self.primary = primary_record.holder

    def _take(self, record: StateRecord) -> None:
        if (record.source, record.kind) == (RecordSource.LINE, StateRecordKind.HELLO):
            self._begin(json.loads(record.header))
        elif (record.source, record.kind) == (RecordSource.LINE, StateRecordKind.END):
            log.info("its primary has ended for good")
            self.ended.set()
        elif self._standby_state is not None:
            self._standby_state.take(record)
            if self._standby_state.loaded and not self._failover.has_state:
                self._failover.has_state, self._problem, self._why = True, "", ""
                log.info(
                    "has the whole state of its primary",
                    extra={"version": self._standby_state.version},
                )

    def _begin(self, hello: dict[str, Any]) -> None:
        if not self._failover.begin_loading(hello["term"], hello["sync"]):
            raise UnreachableError(
                f"{self.primary} is not primary any more: its term is {hello['term']}",
                "NOT_PRIMARY",
            )
        self._job = hello["job"] or self._job
        self._standby_state = StandbyState(self.config, self._team, hello)

    @property
    def _borne(self) -> tuple[str, ...]:
        """What may become better. Where another job has its primary's address, nobody else may
        have what is here.
        """
        return ("SHARD_TAKEN", "JOB_MISMATCH") if self._failover.has_state else ("SHARD_TAKEN",)

    def _bear(self, error: Exception) -> None:
        """The line has ended. What cannot become better ends this process, and so does silence
        where nothing is here that the job could go on with; the rest is tried again."""
        self._why = str(error)
        unfit = not isinstance(error, (UnreachableError, MismatchError))
        if unfit:
            self._failover.has_state = False
        if self.ended.is_set() or self._promoted is not None:
            return
        if isinstance(error, MismatchError) and error.reason not in self._borne:
            self.failure = error
            self.ended.set()
        elif unfit:
            self._problem = str(error)
            log.error("loading everything anew", extra={"problem": self._problem})
        elif (
            not self._failover.has_state
            and self._failover.silence_seconds(time.monotonic()) >= self.config.join_timeout
        ):
            self.failure = UnreachableError(
                f"the primary at {self.primary}: nothing for too long: {error}"
            )
            self.ended.set()
        elif time.monotonic() - self._told >= NOTICE:
            self._told = time.monotonic()
            log.info(
                "waiting",
                extra={"waiting_for": f"the primary at {self.primary}", "problem": str(error)},
            )

    def _words(self) -> Iterator[pb.ReplicateRequest]:
        """Who asks; then how far it is, whenever that has changed, and at every beat."""
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
            with self._news:
                self._news.wait_for(lambda: self._received != self._said, BEAT)
                self._said = self._received
            yield pb.ReplicateRequest(received=self._said)

    def _tick_forever(self) -> None:
        """A line that is silent is ended from here, because who reads it waits."""
        while not self.ended.wait(TICK):
            if self._busy:
                self._failover.note_contact(time.monotonic())
            elif self._failover.is_takeover_due(time.monotonic()):
                self._hang_up()

    def _hang_up(self) -> None:
        call = self._call
        if isinstance(call, grpc.Call):
            call.cancel()

    # ---- being primary ---------------------------------------------------------------------------

    def _try(self) -> None:
        """Silence has lasted: be primary, if the lock allows it."""
        with self._promoting:
            silent = self._failover.silence_seconds(time.monotonic())
            try:
                self._promoted = self._promoted or self._failover.take_over()
            except (OSError, ValueError) as error:
                log.error("the failover lock cannot be used", extra={"problem": str(error)})
            if self._promoted is None:
                self._failover.has_state = False  # the primary went on alone: what is here is old
                log.warning(
                    "the primary is silent, and had gone on without this standby",
                    extra={"seconds": silent},
                )

    def promote(self, seconds: float) -> pb.PromoteResponse:
        """Somebody wants this one to be primary. MismatchError or UnreachableError: why not, and
        what to do.
        """
        with self._promoting:
            if self._promoted is None:
                if self.ended.is_set():
                    raise UnreachableError("this standby ends", "STOPPING")
                note = self._agreed()
                primary_record = self._failover.take_over()
                if primary_record is None:
                    raise MismatchError(
                        f"the failover lock says that {self.primary} may have gone on without "
                        f"this standby, and have "
                        "told others what is not here: start that server again, or all from a "
                        "snapshot",
                        "NOT_IN_SYNC",
                    )
                self._promoted = primary_record
            else:
                note = ""
        self._hang_up()
        self._at_rest.wait(seconds)
        assert self._standby_state is not None
        return pb.PromoteResponse(
            term=self._promoted.term, version=self._standby_state.version, note=note
        )

    def _agreed(self) -> str:
        """The primary has stepped down, or does not answer; then what people should know."""
        if not self._failover.has_state or self._standby_state is None:
            raise MismatchError(
                f"this standby has not loaded the state of {self.primary}{self._because}: wait "
                f"until ps-ctl status "
                "shows it in sync",
                "NOT_IN_SYNC",
            )
        try:
            with (
                open_channel(self.primary) as channel,
                translated(f"the primary at {self.primary}"),
            ):
                StandbyServiceStub(channel).StepDown(
                    pb.StepDownRequest(instance=self.name), timeout=STEP_DOWN
                )
            self._failover.is_handover_complete = True
        except UnreachableError as silence:
            log.warning(
                "the primary does not step down: it does not answer",
                extra={"problem": str(silence)},
            )
            version = self._standby_state.version
            return f"the primary at {self.primary} did not answer; this standby continues from version {version}"
        return ""
