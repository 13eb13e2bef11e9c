"""Simulation of one shard's primaries and standbys; links break, processes are stopped or killed.

The simulation runs the shipped machines of both ends (psserver/core/shard/replication.py and
failover.py) with a failover lock in memory. The state of a shard is a list of records. A client
requests rounds: each round is one record, and its reply leaves when the machine allows it. Reports
to shard 0 leave on the same condition.

Checks: two primaries never close the same round; a record is not lost after its reply has left; a
primary sends no reply after a handover; a client never accepts a lower term.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from psserver.core.shard.failover import FailoverMachine, PrimaryRecord
from psserver.core.shard.replication import ReplicationMachine, ReplicationPhase
from tests.sim.invariants import check

HEARTBEAT_SECONDS = 0.5
TICK_SECONDS = 0.1
END_SECONDS = 60.0
HANDOVER_SECONDS = 3.0
"""Seconds in which a handover waits until the standby has received all records."""


class MemoryLease:
    """A primary record in memory that all processes share."""

    def __init__(self) -> None:
        self.primary_record: PrimaryRecord | None = None

    def read(self) -> PrimaryRecord | None:
        return self.primary_record

    def swap(self, old: PrimaryRecord | None, new: PrimaryRecord) -> bool:
        if self.primary_record != old:
            return False
        self.primary_record = new
        return True


@dataclass
class PendingReply:
    """A reply that waits for the standby's acknowledgement.

    Attributes:
        number: Number of the newest record that the reply contains.
        link_id: Link on which the record was sent.
        link_position: Number of the record on that link.
    """

    number: int
    link_id: int
    link_position: int


@dataclass
class Process:
    """A server.

    Attributes:
        stopped_until: Time until which the process is stopped.
        replication: Set for a primary.
        failover: Set for a standby.
        handed_over_count: After a handover, the number of records of the new primary.
        source_link: Primary and link from which a standby receives records.
    """

    name: str
    is_alive: bool = True
    stopped_until: float = 0.0
    replication: ReplicationMachine | None = None
    failover: FailoverMachine | None = None
    records: list[str] = field(default_factory=list)
    pending_replies: list[PendingReply] = field(default_factory=list)
    handed_over_count: int | None = None
    source_link: tuple[str, int] = ("", 0)


class FailoverWorld:
    """The history of one shard, drawn from a seed.

    Attributes:
        follows_lower_terms: Whether clients accept lower terms (a planted bug).
        has_lock: Whether there is a failover lock. Without it only an operator promotes a standby,
            also one that lacks rounds of a primary that went on alone.
        published: Record, primary and term of each round whose reply has left.
        received_replies: Record and term of each round that a client has received.
        highest_term: Highest term that a client has received.
        takeovers, depositions, handovers: Counts of events.
        ticks_alone: Number of ticks of primaries without a standby.
    """

    replication_class: type[ReplicationMachine] = ReplicationMachine
    failover_class: type[FailoverMachine] = FailoverMachine
    follows_lower_terms = False
    has_lock = True

    def __init__(self, seed: int, **classes: object) -> None:
        for name, value in classes.items():
            setattr(self, name, value)
        self.rng = random.Random(seed)
        self.lease, self.now, self.event_count = MemoryLease() if self.has_lock else None, 0.0, 0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.links_cut_until = 0.0
        self.published: dict[int, tuple[str, str, int]] = {}
        self.received_replies: dict[int, tuple[str, int]] = {}
        self.highest_term = self.takeovers = self.depositions = self.ticks_alone = (
            self.handovers
        ) = 0
        self.processes: dict[str, Process] = {}
        first = PrimaryRecord(1, "p0")
        if self.lease is not None:
            self.lease.swap(None, first)
        self.add(Process("p0", replication=self.replication_class(first, self.lease, 0.0)))
        self.add_standby()
        self.send_requests()
        for _ in range(self.rng.randint(1, 5)):
            kill = self.kill if self.has_lock else self.replace_primary
            fault = self.rng.choice(
                [kill, self.stop, self.stop, self.cut_links, self.hand_over_all]
            )
            self.after(self.rng.random() * 40, fault)

    # ---- time

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Run an action at a time. Actions with the same time run in the order of the calls."""
        self.event_count += 1
        heapq.heappush(self.queue, (time, self.event_count, action))

    def on(self, process: Process, action: Callable[[], None]) -> Callable[[], None]:
        """Return an action that waits while the process is stopped, and ends with the process."""

        def act() -> None:
            if process.is_alive and process.stopped_until > self.now:
                self.at(process.stopped_until, act)
            elif process.is_alive:
                action()

        return act

    def run(self) -> "FailoverWorld":
        while self.now < END_SECONDS:
            self.now, _, action = heapq.heappop(self.queue)
            action()
        self.verify()
        return self

    # ---- processes

    def add(self, process: Process) -> None:
        self.processes[process.name] = process
        self.after(0.0, self.on(process, lambda: self.tick(process)))
        self.after(0.0, self.on(process, lambda: self.send_heartbeat(process)))

    def add_standby(self) -> None:
        """Start another standby, as an operator does."""
        process = Process(f"p{len(self.processes)}")
        process.failover = self.failover_class(process.name, process.name, self.lease, self.now)
        self.add(process)

    def tick(self, process: Process) -> None:
        if process.replication is not None:
            process.replication.tick(self.now)
            self.ticks_alone += process.replication.phase is ReplicationPhase.ALONE
            self.report(process, process.replication)
            self.send_replies(process)
        elif process.failover is not None:
            self.follow(process, process.failover)
        if process.is_alive:
            self.after(TICK_SECONDS, self.on(process, lambda: self.tick(process)))

    def send_heartbeat(self, process: Process) -> None:
        """Send a periodic message to the standby."""
        replication = process.replication
        if replication is not None and replication.phase is not ReplicationPhase.ALONE:
            self.ship(process, None)
        if process.is_alive:
            self.after(HEARTBEAT_SECONDS, self.on(process, lambda: self.send_heartbeat(process)))

    # ---- the primary

    def ship(self, process: Process, record: str | None) -> int:
        replication = process.replication
        assert replication is not None
        position = replication.append() if record is not None else replication.last_sent
        if position or record is None:
            self.send(
                process,
                lambda standby, link: self.receive(standby, process.name, link, position, record),
            )
        return position

    def send(self, process: Process, deliver: Callable[[Process, int], None]) -> None:
        """Send to the standby of the current link, in order. A cut link loses later messages."""
        replication = process.replication
        assert replication is not None
        if not replication.standby_id:
            return  # the link was lost during the handover
        standby, link = self.processes[replication.standby_id], replication.link_id
        sent = self.now

        def arrive() -> None:
            if self.links_cut_until > sent and standby.source_link == (process.name, link):
                standby.source_link = ("", 0)  # the link is cut with the messages in flight
            if standby.source_link == (process.name, link):
                deliver(standby, link)

        self.after(0.01, self.on(standby, arrive))

    def request(self, process: Process, number: int) -> None:
        """Handle the request of a client to close a round."""
        replication = process.replication
        if replication is None or replication.deposed_reason or number <= len(process.records):
            return  # the round is in progress, or its reply has left
        record = f"{process.name}.{number}.{self.rng.random():.6f}"
        position = self.ship(process, record)
        process.records.append(record)
        process.pending_replies.append(
            PendingReply(len(process.records), replication.link_id, position)
        )
        self.send_replies(process)

    def report(self, process: Process, replication: ReplicationMachine) -> None:
        """Queue a report to shard 0 on all records. It waits for the standby as a reply does."""
        newest = replication.last_sent if replication.phase is not ReplicationPhase.ALONE else 0
        process.pending_replies.append(
            PendingReply(len(process.records), replication.link_id, newest)
        )

    def send_replies(self, process: Process) -> None:
        replication = process.replication
        assert replication is not None
        for reply in list(process.pending_replies):
            if replication.can_reply(reply.link_id, reply.link_position):
                process.pending_replies.remove(reply)
                for number in (
                    *range(len(self.published) + 1, reply.number),
                    *([reply.number] if reply.number else []),
                ):
                    self.publish(process, number, replication.term)
        if replication.deposed_reason:
            self.depositions += 1
            process.is_alive = False

    def publish(self, process: Process, number: int, term: int) -> None:
        record, known = process.records[number - 1], self.published.get(number)
        check(
            process.handed_over_count is None or number <= process.handed_over_count,
            "{} published round {} after its handover",
            process.name,
            number,
        )
        check(
            known is None or known[0] == record,
            "round {} was closed with {} and with {}",
            number,
            known,
            record,
        )
        self.published[number] = (record, process.name, term)
        delay = 0.01 if self.rng.random() < 0.9 else self.rng.random() * 5.0
        self.after(delay, lambda: self.receive_reply(number, record, term))

    def receive_reply(self, number: int, record: str, term: int) -> None:
        """Deliver a reply to a client or another shard, which refuses lower terms."""
        if term < self.highest_term and not self.follows_lower_terms:
            return
        self.highest_term = max(term, self.highest_term)
        known, known_term = self.received_replies.get(number, (record, term))
        check(
            known == record or term > known_term,
            "a client received round {} as {} and as {} of term {}",
            number,
            known,
            record,
            term,
        )
        self.received_replies[number] = (record, term)

    # ---- the standby

    def follow(self, process: Process, failover: FailoverMachine) -> None:
        primaries = [p for p in self.processes.values() if p.replication is not None and p.is_alive]
        primary = self.rng.choice(primaries) if primaries else None
        if (
            process.source_link == ("", 0)
            and primary is not None
            and self.now >= self.links_cut_until
        ):
            self.after(0.01, self.on(primary, lambda: self.attach_standby(primary, process)))
        if failover.is_takeover_due(self.now):
            primary_record = failover.take_over()
            if primary_record is not None:
                self.promote(process, primary_record)

    def attach_standby(self, primary: Process, standby: Process) -> None:
        replication = primary.replication
        assert replication is not None
        if not standby.is_alive or standby.failover is None or self.now < self.links_cut_until:
            return
        if standby.source_link != ("", 0):
            return
        if replication.phase is not ReplicationPhase.ALONE:
            if replication.standby_id == standby.name:
                # the standby connects again, so its previous link is cut
                replication.drop_link(replication.link_id)
            return
        link = replication.attach(standby.name, self.now)
        standby.source_link = (primary.name, link)
        state, term = list(primary.records), replication.term
        position = replication.append()
        replication.end_state_transfer()
        self.send(
            primary,
            lambda process, link: self.load(process, primary.name, link, position, state, term),
        )

    def load(
        self, process: Process, primary: str, link: int, position: int, state: list[str], term: int
    ) -> None:
        failover = process.failover
        if failover is None:
            return
        if not failover.begin_loading(term):
            process.source_link = ("", 0)
            return
        process.records = state
        failover.has_state = True
        self.receive(process, primary, link, position, None)

    def receive(
        self, process: Process, primary: str, link: int, position: int, record: str | None
    ) -> None:
        failover = process.failover
        if failover is None:
            return
        failover.note_contact(self.now)
        if record is not None:
            process.records.append(record)
        source = self.processes[primary]

        def acknowledge_record() -> None:
            if source.replication is not None and self.now >= self.links_cut_until:
                source.replication.acknowledge(link, position, self.now)
                self.send_replies(source)

        self.after(0.01, self.on(source, acknowledge_record))

    def promote(self, process: Process, primary_record: PrimaryRecord) -> None:
        self.takeovers += 1
        failover, process.failover = process.failover, None
        assert failover is not None

        def start_as_primary() -> None:
            process.replication = self.replication_class(primary_record, self.lease, self.now)
            if failover.is_complete:
                for number, (record, name, _) in self.published.items():
                    current = (
                        process.records[number - 1] if number <= len(process.records) else "nothing"
                    )
                    check(
                        current == record,
                        "new primary {} holds {} for a round that {} published as {}",
                        process.name,
                        current,
                        name,
                        record,
                    )
            else:  # missing rounds may be closed again in a higher term
                self.published = {
                    n: each for n, each in self.published.items() if n <= len(process.records)
                }
                others = [
                    p
                    for p in self.processes.values()
                    if p.replication and p is not process and p.is_alive
                ]
                for other in others:
                    assert other.replication is not None
                    can_answer = other.stopped_until <= self.now and other.replication.can_reply(
                        0, 0
                    )
                    check(not can_answer, "{} and {} can both answer", process.name, other.name)
            self.add_standby()

        self.after(0.0, self.on(process, start_as_primary))

    # ---- clients and faults

    def send_requests(self) -> None:
        """Ask every process that may still act as primary for the next round."""
        for process in list(self.processes.values()):
            if process.replication is not None:
                number = len(self.published) + 1
                self.after(0.005, self.on(process, lambda p=process, n=number: self.request(p, n)))  # type: ignore[misc]
        self.after(self.rng.random() * 0.2, self.send_requests)

    def kill(self) -> None:
        """Kill a process. A killed standby is replaced; a primary is killed only if it has one."""
        is_alive = [process for process in self.processes.values() if process.is_alive]
        victim = self.rng.choice(is_alive)
        standbys = [
            process
            for process in is_alive
            if process.failover is not None and process is not victim
        ]
        if victim.failover is not None:
            victim.is_alive = False
            self.add_standby()
        elif any(each.failover and each.failover.has_state for each in standbys):
            victim.is_alive = False

    def replace_primary(self) -> None:
        """Let the primary go on alone. Then kill it and promote its standby, as an operator may."""
        self.links_cut_until = self.now + 5.0
        self.after(4.0, self.promote_outdated)

    def promote_outdated(self) -> None:
        is_alive = [each for each in self.processes.values() if each.is_alive]
        standby = next((p for p in is_alive if p.failover and p.failover.has_state), None)
        if standby is None or standby.failover is None or standby.stopped_until > self.now:
            return
        for process in is_alive:
            process.is_alive = process.replication is None
        if (primary_record := standby.failover.take_over()) is not None:
            self.promote(standby, primary_record)

    def stop(self) -> None:
        """Stop a process (SIGSTOP), for shorter or longer than the timeouts."""
        process = self.rng.choice(
            [process for process in self.processes.values() if process.is_alive]
        )
        process.stopped_until = max(
            process.stopped_until, self.now + self.rng.choice([0.3, 1.5, 2.1, 4.0, 8.0])
        )

    def hand_over_all(self) -> None:
        """Hand over from each primary to its standby in sync, as `ps-ctl promote` does."""
        for process in [] if self.now < self.links_cut_until else list(self.processes.values()):
            standby = (
                self.processes.get(process.replication.standby_id)
                if process.replication is not None
                else None
            )
            if (
                process.is_alive
                and process.stopped_until <= self.now
                and process.handed_over_count is None
                and standby is not None
            ):
                assert process.replication is not None
                if process.replication.begin_handover():
                    self.hand_over(process, standby)

    def hand_over(self, primary: Process, standby: Process, since: float | None = None) -> None:
        """Complete a handover. The link of the previous primary is cut, then its process ends."""
        replication, failover, since = (
            primary.replication,
            standby.failover,
            self.now if since is None else since,
        )
        if replication is None or failover is None or not standby.is_alive:
            return None
        if not replication.is_handover_complete and self.now - since < HANDOVER_SECONDS:
            return self.after(
                TICK_SECONDS, self.on(primary, lambda: self.hand_over(primary, standby, since))
            )
        failover.is_handover_complete = replication.is_handover_complete
        primary.is_alive = replication.is_handover_complete
        if (primary_record := failover.take_over()) is not None:
            self.handovers += 1
            primary.handed_over_count = len(standby.records)
            self.promote(standby, primary_record)
        delay = self.rng.random() * 0.5
        self.after(delay / 4, self.on(primary, lambda: replication.drop_link(replication.link_id)))
        self.after(delay, self.on(primary, lambda: self.end(primary)))
        return None

    def end(self, process: Process) -> None:
        process.is_alive = False

    def cut_links(self) -> None:
        """Cut all links between the servers for a while."""
        self.links_cut_until = self.now + self.rng.choice([0.3, 1.9, 2.1, 5.0])

    def verify(self) -> None:
        primaries = [
            p
            for p in self.processes.values()
            if p.replication is not None and p.is_alive and p.handed_over_count is None
        ]
        current = self.lease.read() if self.lease is not None else None
        leading = [
            p
            for p in primaries
            if p.replication is not None and current in (None, p.replication.primary_record)
        ]
        check(len(leading) <= 1, "the history ends with {} primaries", len(leading))
        if leading:
            records = leading[0].records
            for number, (record, name, _) in self.published.items():
                check(
                    number <= len(records) and records[number - 1] == record,
                    "record published by {} is lost: {}",
                    name,
                    record,
                )
