"""Replication on the primary: the state machine (core/shard/replication.py), a queue, and waiting
threads.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Never

from pscommon.core.errors import MismatchError, UnreachableError
from pscommon.telemetry.logs import get_logger
from psproto.v1 import standby_pb2 as pb
from psserver.core.shard.failover import PrimaryRecord
from psserver.core.shard.replication import ReplicationMachine, ReplicationPhase
from psserver.durability.record_sink import RecordSource
from psserver.durability.state_records import (
    StateRecord,
    StateRecordKind,
    about,
    checksum,
    copied,
    frames,
)
from psserver.parameters.store import ParameterStore
from psserver.process.config import ServerConfig
from psserver.process.metrics import ServerMetrics
from psserver.replication.lease_directory import begin_primary, lease_of

TICK_SECONDS = 0.1
HEARTBEAT_INTERVAL_SECONDS = 0.5
"""Time between two messages to the standby when nothing happens."""

END_TIMEOUT_SECONDS = 1.0
"""Time for the standby to receive the end of the job."""

CHECKSUM_EVERY_VERSIONS = 100
"""Versions between two comparisons of the standby's checksum with the primary's."""

MAX_QUEUED_BYTES = 256 << 20
"""Bytes in flight to a standby above which senders wait."""

log = get_logger(__name__)

CopyState = Callable[[Callable[[Iterable[StateRecord]], None]], None]
"""Calls its argument with the complete state, while nothing changes."""


class PrimaryReplicator:
    """Sends records to the standby (durability.record_sink.StandbyLink).

    Args:
        deposed: Called when this server stops being primary, with the reason (empty: planned). It
            ends the process and never returns.

    Attributes:
        has_standby: A standby is connected.

    Threads: `_changed` guards the machine and the queue. A thread that waits in `wait_for_standby`
    may hold locks of the engine or the executor; no code under `_changed` takes those.
    """

    def __init__(
        self, machine: ReplicationMachine, metrics: ServerMetrics, deposed: Callable[[str], Never]
    ) -> None:
        self.has_standby = False
        self._address = ""
        self._problem = ""  # why there is no standby; begins with a comma
        self._machine, self._metrics = machine, metrics
        self._deposed = deposed
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, StateRecord]] = deque()
        self._queued_nbytes = 0  # without the initial state: no sender waits for that
        self._state_end = 0
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick_forever, name="replication", daemon=True)

    def start(self) -> None:
        self._ticker.start()

    def close(self, job_has_ended: bool) -> None:
        """Stop replication. job_has_ended: The standby must not take over."""
        if job_has_ended:
            with self._changed:
                _, last = self._put(about(StateRecordKind.END))
                self._changed.wait_for(
                    lambda: not self.has_standby or self._machine.last_acknowledged >= last,
                    END_TIMEOUT_SECONDS,
                )
                self._drop_link(self._machine.link_id)
        self._ended.set()
        if self._ticker.is_alive():
            self._ticker.join()

    def end(self) -> Never:
        """End this process: a standby has taken over as planned."""
        self._deposed("")

    # ---- state --------------------------------------------------------------------

    @property
    def term(self) -> int:
        return self._machine.term

    @property
    def address(self) -> str:
        """Address of the standby; empty without one."""
        return self._address if self.has_standby else ""

    @property
    def state(self) -> str:
        """none, loading or in sync."""
        names = {ReplicationPhase.ALONE: "none", ReplicationPhase.IN_SYNC: "in sync"}
        return names.get(self._machine.phase, "loading")

    @property
    def unacknowledged(self) -> int:
        """Number of records that the standby does not have yet."""
        return self._machine.unacknowledged if self.has_standby else 0

    # ---- records ---------------------------------------------------------------------------------

    def send(
        self, source: RecordSource, kind: int, header: bytes, payload: Sequence[memoryview] = ()
    ) -> tuple[int, int]:
        if not self.has_standby:
            return self._machine.link_id, self._machine.append()
        record = copied(source, kind, header, payload)
        with self._changed:
            self._changed.wait_for(
                lambda: not self.has_standby or self._queued_nbytes < MAX_QUEUED_BYTES
            )
            return self._put(record)

    @property
    def last_position(self) -> tuple[int, int]:
        with self._changed:
            return self._machine.link_id, self._machine.last_sent if self.has_standby else 0

    def _put(self, record: StateRecord) -> tuple[int, int]:
        number = self._machine.append()
        if number and self.has_standby:
            self._queue.append((number, record))
            self._queued_nbytes += record.nbytes
            self._changed.notify_all()
        return self._machine.link_id, number

    def wait_for_standby(self, sent: tuple[int, int]) -> None:
        with self._changed:
            while not self._machine.can_reply(*sent):
                self._check()
                self._changed.wait(TICK_SECONDS)
        self._check()

    def _check(self) -> None:
        """End the process if it is no longer primary.

        After a planned handover a waiting thread may notice this before StepDown is answered.
        """
        if self._machine.deposed_reason:
            self._deposed(
                "" if self._machine.is_handover_complete else self._machine.deposed_reason
            )

    def _use_lease(self, action: Callable[[], None]) -> None:
        """Run an action; treat a lease that cannot be read or written as lost."""
        try:
            action()
        except (OSError, ValueError, TypeError) as error:
            self._machine.deposed_reason = (
                f"the failover lock cannot be used, so this server is no longer primary: {error}"
            )

    def reset(self, why: str) -> None:
        with self._changed:
            # later changes are in no record and must not be visible
            while self._machine.is_handing_over:
                self._check()
                self._changed.wait(TICK_SECONDS)
            if self.has_standby:
                log.info("standby_resync_required", reason=why)
                self._problem = f", for {why}"
                self._drop_link(self._machine.link_id)

    def send_checksum(self, version: int, store: ParameterStore) -> None:
        if self.has_standby and version % CHECKSUM_EVERY_VERSIONS == 0:
            record = about(StateRecordKind.CHECKSUM, version=version, checksum=checksum(store))
            with self._changed:
                self._put(record)

    def announce_snapshot(self, manifest: str) -> None:
        self.wait_for_standby(
            self.send(RecordSource.LINE, StateRecordKind.SNAPSHOT, manifest.encode())
        )

    # ---- connection ------------------------------------------------------------------------------

    def replicate(
        self, link_id: int, is_connected: Callable[[], bool]
    ) -> Iterator[pb.ReplicateResponse]:
        """Yield all records for a standby until its connection ends or is silent."""
        beat = 0.0
        while is_connected() and self._is_current(link_id):
            with self._changed:
                self._changed.wait_for(
                    lambda: self._queue or not self._is_current(link_id), HEARTBEAT_INTERVAL_SECONDS
                )
                number, record = (
                    self._queue[0] if self._queue and self._is_current(link_id) else (0, None)
                )
            if record is not None:
                yield from frames(number, record)
                self._remove_sent(link_id, number, record)
            elif time.monotonic() - beat >= HEARTBEAT_INTERVAL_SECONDS / 2:
                beat = time.monotonic()
                yield pb.ReplicateResponse()

    def _is_current(self, link_id: int) -> bool:
        return self._machine.link_id == link_id and self.has_standby

    def _remove_sent(self, link_id: int, number: int, record: StateRecord) -> None:
        with self._changed:
            if self._machine.link_id == link_id and self._queue:
                self._queue.popleft()
                self._queued_nbytes -= record.nbytes if number > self._state_end else 0
                self._changed.notify_all()

    def attach(self, hello: pb.ReplicateRequest, copy_state: CopyState) -> int:
        """Send the complete state to a standby that connects. Return the id of the connection.

        copy_state: copies the state of this server.

        Raises UnreachableError if this server is not primary any more (NOT_PRIMARY), MismatchError
        if the shard has another standby (SHARD_TAKEN).
        """
        machine = self._machine
        if hello.term > machine.term:
            raise UnreachableError(
                f"this server's term is {machine.term}, but its standby knows term {hello.term}",
                "NOT_PRIMARY",
            )
        with self._changed:
            self._end_link(hello)
        link_id = 0

        def begin(records: Iterable[StateRecord]) -> None:
            nonlocal link_id
            link_id = self._begin(hello, records)

        copy_state(begin)
        log.info("standby_loading", standby=hello.address, term=machine.term)
        if hello.problem:
            log.error("standby_diverged", standby=hello.address, problem=hello.problem)
            self._metrics.standby_divergences.inc()
        return link_id

    def _end_link(self, hello: pb.ReplicateRequest) -> None:
        """End the current connection, if this standby may replace it."""
        machine = self._machine
        if self.has_standby and machine.standby_id != hello.instance:
            raise MismatchError(
                f"this shard already has a standby at {self._address}", "SHARD_TAKEN"
            )
        if machine.is_handing_over:
            raise UnreachableError("this server is handing over to its standby", "NOT_PRIMARY")
        self._drop_link(machine.link_id)  # the standby reconnects: its previous connection ended
        self._check()

    def _begin(self, hello: pb.ReplicateRequest, records: Iterable[StateRecord]) -> int:
        machine = self._machine
        state = list(records)
        with self._changed:
            # another standby may have connected while the state was copied
            self._end_link(hello)
            link_id, self.has_standby = machine.attach(hello.instance, time.monotonic()), True
            self._address, self._problem = hello.address, ""
            for record in state:
                self._put(record)
            machine.end_state_transfer()
            self._state_end, self._queued_nbytes = machine.last_sent, 0
        return link_id

    def handle_acknowledgement(self, link_id: int, number: int) -> None:
        machine = self._machine
        with self._changed:
            before = machine.phase
            self._use_lease(lambda: machine.acknowledge(link_id, number, time.monotonic()))
            self._check()
            if machine.phase is ReplicationPhase.IN_SYNC and before is not ReplicationPhase.IN_SYNC:
                log.info("standby_in_sync", standby=self._address, term=machine.term)
            self._changed.notify_all()

    def handle_disconnect(self, link_id: int) -> None:
        """Handle the end of a connection."""
        with self._changed:
            if link_id == self._machine.link_id and not self._ended.is_set():
                self._drop_link(link_id)

    def _drop_link(self, link_id: int) -> None:
        was_connected = self.has_standby
        self._use_lease(lambda: self._machine.drop_link(link_id))
        self._handle_link_state(was_connected)

    def _handle_link_state(self, was_connected: bool) -> None:
        self.has_standby = self._machine.phase is not ReplicationPhase.ALONE
        self._check()
        if was_connected and not self.has_standby:
            log.warning("standby_lost", standby=self._address)
            self._metrics.standby_losses.inc()
            self._address = ""
            self._queue.clear()
            self._queued_nbytes = 0
        self._changed.notify_all()

    def step_down(self, instance: str, seconds: float) -> None:
        """Hand over to the standby: return once it has every acknowledged record.

        Nothing more is acknowledged afterwards. Raises MismatchError if the standby is not in sync.
        """
        machine = self._machine
        with self._changed:
            if machine.standby_id != instance or not machine.begin_handover():
                raise MismatchError(
                    f"this standby is behind ({self.state}{self._problem}). "
                    "Try: wait until `ps-ctl status` shows it in sync; then promote",
                    "NOT_IN_SYNC",
                )
            if not self._changed.wait_for(lambda: machine.is_handover_complete, seconds):
                self._deposed("the standby did not acknowledge the records in flight")

    def _tick_forever(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            with self._changed:
                was_connected = self.has_standby
                self._use_lease(lambda: self._machine.tick(time.monotonic()))
                self._handle_link_state(was_connected)
            self._metrics.set_standby(self.state == "in sync", self.unacknowledged)


def open_replicator(
    config: ServerConfig,
    address: str,
    primary_record: PrimaryRecord | None,
    metrics: ServerMetrics,
    deposed: Callable[[str], Never],
) -> PrimaryReplicator:
    """Return the replicator of a server that is primary now.

    Args:
        address: Its address for others.
        primary_record: The record of a promoted standby; None: the server was started as primary.

    Raises:
        TakenError: The server must not be primary, or the lease cannot be used.
    """
    lease = lease_of(config)
    record = primary_record or begin_primary(config, lease, address)
    return PrimaryReplicator(ReplicationMachine(record, lease, time.monotonic()), metrics, deposed)
