"""The primary's end of the link to its standby: the machine (core/shard/replication.py), a queue
of records, and the threads that wait.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Never, TypeVar

from pscommon.core.errors import MismatchError, UnreachableError
from psproto.v1 import standby_pb2 as pb
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
from psserver.process.metrics import ServerMetrics

TICK = 0.1
BEAT = 0.5
"""Seconds between two words to the standby when nothing happens."""

GOODBYE = 1.0
"""Seconds that a standby gets to hear that the job is over."""

EVERY = 100
"""Versions between two comparisons of the standby's numbers with the primary's."""

ROOM = 256 << 20
"""Bytes on their way to a standby from which on whoever has more for it waits."""

T = TypeVar("T")

log = logging.getLogger("psserver")

Whole = Callable[[Callable[[Iterable[StateRecord]], None]], None]
"""Calls what it is given with the whole state, while nothing changes."""


class PrimaryReplicator:
    """records.Line. whole: where the state of this server comes from. deposed: called at the end
    of being primary, with the reason (empty: as planned); it ends the process, and never
    returns.

    Threads: `_changed` guards the machine and the queue. Whoever waits in `settle` may hold
    locks of the engine or the desk; nothing that is done here under `_changed` needs those.
    """

    def __init__(
        self, machine: ReplicationMachine, metrics: ServerMetrics, deposed: Callable[[str], Never]
    ) -> None:
        self.whole: Whole = lambda begin: None
        self._address = ""
        self._why = ""  # there is no standby
        self._machine, self._metrics = machine, metrics
        self._deposed = deposed
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, StateRecord]] = deque()
        self._queued = 0  # bytes in there, but for those of the whole state: nobody waits for these
        self._state_end = 0
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick_forever, name="shipping", daemon=True)

    def start(self) -> None:
        self._ticker.start()

    def close(self, over: bool) -> None:
        """This process ends. over: and the job with it, so that nobody is to take over."""
        if over:
            with self._changed:
                _, last = self._put(about(StateRecordKind.END))
                self._changed.wait_for(
                    lambda: not self.open or self._machine.last_acknowledged >= last, GOODBYE
                )
                self._lose(self._machine.link_id)
        self._ended.set()
        if self._ticker.is_alive():
            self._ticker.join()

    def end(self) -> Never:
        """A standby has taken this one's place, as planned."""
        self._deposed("")

    # ---- what everybody sees ---------------------------------------------------------------------

    @property
    def term(self) -> int:
        return self._machine.term

    @property
    def open(self) -> bool:
        return self._machine.phase is not ReplicationPhase.ALONE

    @property
    def address(self) -> str:
        """Of the standby; empty where there is none."""
        return self._address if self.open else ""

    @property
    def state(self) -> str:
        """none, loading or in sync."""
        names = {ReplicationPhase.ALONE: "none", ReplicationPhase.IN_SYNC: "in sync"}
        return names.get(self._machine.phase, "loading")

    @property
    def behind(self) -> int:
        """Records that the standby does not have yet."""
        return self._machine.unacknowledged if self.open else 0

    # ---- records ---------------------------------------------------------------------------------

    def send(
        self, source: RecordSource, kind: int, header: bytes, payload: Sequence[memoryview] = ()
    ) -> tuple[int, int]:
        if not self.open:
            return self._machine.link_id, self._machine.append()
        record = copied(source, kind, header, payload)
        with self._changed:
            self._changed.wait_for(lambda: not self.open or self._queued < ROOM)
            return self._put(record)

    @property
    def last(self) -> tuple[int, int]:
        with self._changed:
            return self._machine.link_id, self._machine.last_sent if self.open else 0

    def _put(self, record: StateRecord) -> tuple[int, int]:
        number = self._machine.append()
        if number and self.open:
            self._queue.append((number, record))
            self._queued += record.nbytes
            self._changed.notify_all()
        return self._machine.link_id, number

    def settle(self, sent: tuple[int, int]) -> None:
        with self._changed:
            while not self._may_tell(*sent):
                self._check()
                self._changed.wait(TICK)
        self._check()

    def _may_tell(self, line: int, number: int) -> bool:
        return self._guarded(lambda: self._machine.can_reply(line, number, time.monotonic()), False)

    def _check(self) -> None:
        """Whoever has handed over may find out that it is not primary any more before it is
        told: that was planned.
        """
        if self._machine.deposed_reason:
            self._deposed(
                "" if self._machine.is_handover_complete else self._machine.deposed_reason
            )

    def _guarded(self, action: Callable[[], T], otherwise: T) -> T:
        """A lock that cannot be read or written is as good as lost."""
        try:
            return action()
        except (OSError, ValueError, TypeError) as error:
            self._machine.deposed_reason = (
                f"the failover lock cannot be used any more; this server resigns: {error}"
            )
            return otherwise

    def drop(self, why: str) -> None:
        with self._changed:
            while (
                self._machine.is_handing_over
            ):  # what comes after this is in no record: nobody is to learn of it
                self._check()
                self._changed.wait(TICK)
            if self.open:
                log.info("the standby is to load everything anew", extra={"why": why})
                self._why = f", for {why}"
                self._lose(self._machine.link_id)

    def checksum(self, version: int, store: ParameterStore) -> None:
        if self.open and version % EVERY == 0:
            record = about(StateRecordKind.CHECKSUM, version=version, checksum=checksum(store))
            with self._changed:
                self._put(record)

    def snapshot(self, manifest: str) -> None:
        self.settle(self.send(RecordSource.LINE, StateRecordKind.SNAPSHOT, manifest.encode()))

    # ---- the line --------------------------------------------------------------------------------

    def replicate(self, line: int, alive: Callable[[], bool]) -> Iterator[pb.ReplicateResponse]:
        """All that a standby is to know, from now on, until its line is cut or silent."""
        beat = 0.0
        while alive() and self._lives(line):
            with self._changed:
                self._changed.wait_for(lambda: self._queue or not self._lives(line), BEAT)
                number, record = self._queue[0] if self._queue and self._lives(line) else (0, None)
            if record is not None:
                yield from frames(number, record)
                self._sent(line, number, record)
            elif time.monotonic() - beat >= BEAT / 2:
                beat = time.monotonic()
                yield pb.ReplicateResponse()

    def _lives(self, line: int) -> bool:
        return self._machine.link_id == line and self.open

    def _sent(self, line: int, number: int, record: StateRecord) -> None:
        with self._changed:
            if self._machine.link_id == line and self._queue:
                self._queue.popleft()
                self._queued -= record.nbytes if number > self._state_end else 0
                self._changed.notify_all()

    def attach(self, hello: pb.ReplicateRequest) -> int:
        """A standby is there, and gets the whole state; the number of its line. NOT_PRIMARY,
        SHARD_TAKEN.
        """
        machine = self._machine
        if hello.term > machine.term:
            raise UnreachableError(
                f"this server is of term {machine.term}, not {hello.term}", "NOT_PRIMARY"
            )
        with self._changed:
            self._make_way(hello)
        line = 0

        def begin(records: Iterable[StateRecord]) -> None:
            nonlocal line
            line = self._begin(hello, records)

        self.whole(begin)
        log.info("a standby loads", extra={"standby": hello.address, "term": machine.term})
        if hello.problem:
            log.error(
                "the standby had to load anew",
                extra={"standby": hello.address, "problem": hello.problem},
            )
            self._metrics.standby_diverged()
        return line

    def _make_way(self, hello: pb.ReplicateRequest) -> None:
        """There is no line any more, if this standby may have one."""
        machine = self._machine
        if self.open and machine.standby_id != hello.instance:
            raise MismatchError(f"this shard has a standby at {self._address}", "SHARD_TAKEN")
        if machine.is_handing_over:
            raise UnreachableError("this server hands over to its standby", "NOT_PRIMARY")
        self._lose(machine.link_id)  # it is here again: its line was cut
        self._check()

    def _begin(self, hello: pb.ReplicateRequest, records: Iterable[StateRecord]) -> int:
        machine = self._machine
        state = list(records)
        with self._changed:
            self._make_way(
                hello
            )  # another one may have been quicker while this one waited for its state
            line = machine.attach(hello.instance, time.monotonic())
            self._address, self._why = hello.address, ""
            for record in state:
                self._put(record)
            machine.end_state_transfer()
            self._state_end, self._queued = machine.last_sent, 0
        return line

    def acknowledged(self, line: int, number: int) -> None:
        machine = self._machine
        with self._changed:
            before = machine.phase
            self._guarded(lambda: machine.acknowledge(line, number, time.monotonic()), None)
            self._check()
            if machine.phase is ReplicationPhase.IN_SYNC and before is not ReplicationPhase.IN_SYNC:
                log.info(
                    "the standby is in sync", extra={"standby": self._address, "term": machine.term}
                )
            self._changed.notify_all()

    def lost(self, line: int) -> None:
        """A line is cut."""
        with self._changed:
            if line == self._machine.link_id and not self._ended.is_set():
                self._lose(line)

    def _lose(self, line: int) -> None:
        had = self.open
        self._guarded(lambda: self._machine.drop_link(line), None)
        self._cleared(had)

    def _cleared(self, had: bool) -> None:
        self._check()
        if had and not self.open:
            log.warning(
                "the standby is lost; going on without it", extra={"standby": self._address}
            )
            self._metrics.standby_lost()
            self._address = ""
            self._queue.clear()
            self._queued = 0
        self._changed.notify_all()

    def step_down(self, instance: str, seconds: float) -> None:
        """Returns once the standby has all that was told, and nothing more ever will be.
        MismatchError: not in sync.
        """
        machine = self._machine
        with self._changed:
            if machine.standby_id != instance or not machine.begin_handover():
                raise MismatchError(
                    f"this standby is behind ({self.state}{self._why}): wait until ps-ctl status "
                    f"shows it in sync; "
                    "then promote",
                    "NOT_IN_SYNC",
                )
            if not self._changed.wait_for(lambda: machine.is_handover_complete, seconds):
                self._deposed("the standby did not acknowledge what was on its way to it")

    def _tick_forever(self) -> None:
        while not self._ended.wait(TICK):
            with self._changed:
                had = self.open
                self._guarded(lambda: self._machine.tick(time.monotonic()), None)
                self._cleared(had)
            self._metrics.standby(self.state == "in sync", self.behind)
