"""Simulation of one shard's primaries and standbys; links break, processes are stopped or killed.

The real machines of both ends (core/replication.py, core/failover.py), a lease in memory.
A shard is the list of its records. Clients ask for rounds: a round is a record, and its reply
leaves when the machine allows it. Shard 0 receives reports on the same condition.

Checked: no two primaries close one round, no record is lost whose reply has left, a primary sends
no reply after a handover, and terms only grow for a client.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from psserver.core.shard.failover import FailoverMachine
from psserver.core.shard.primary_lease import PrimaryRecord
from psserver.core.shard.replication import ReplicationMachine, ReplicationPhase
from tests.sim.invariants import check

BEAT = 0.5
TICK = 0.1
HORIZON = 60.0
STEP_DOWN = 3.0
"""Seconds that a standby gets for what is on its way to it when it is handed over to."""


class MemoryLease:
    """A primary record that all processes of a simulation share."""

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
class Round:
    """A record that a client asked for, and whose reply waits."""

    number: int
    link_id: int
    ticket: int


@dataclass
class Process:
    """A server.

    Attributes:
        awake_at: Until then the process is stopped.
        replication: Set for a primary.
        failover: Set for a standby.
        lost_after: After a handover, the number of records that the new primary began with.
    """

    name: str
    alive: bool = True
    awake_at: float = 0.0
    replication: ReplicationMachine | None = None
    failover: FailoverMachine | None = None
    records: list[str] = field(default_factory=list)
    waiting: list[Round] = field(default_factory=list)
    lost_after: int | None = None
    listens_to: tuple[str, int] = ("", 0)


class FailoverWorld:
    """A history of one shard, from a seed.

    Attributes:
        sync: Whether the primaries use sync replication.
        locked: Whether there is a failover lock. Without it no process dies, and only an operator
            makes a standby primary.
    """

    replication_class: type[ReplicationMachine] = ReplicationMachine
    failover_class: type[FailoverMachine] = FailoverMachine
    follows_lower_terms = False
    locked = True

    def __init__(self, seed: int, **classes: object) -> None:
        for name, value in classes.items():
            setattr(self, name, value)
        self.rng = random.Random(seed)
        self.sync = seed % 2 == 0
        self.lease, self.now, self.count = MemoryLease() if self.locked else None, 0.0, 0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.cut_until = 0.0
        self.published: dict[int, tuple[str, str, int]] = {}  # by round: record, publisher and term
        self.believed: dict[int, tuple[str, int]] = {}
        self.highest = self.takeovers = self.deposed = self.alone = self.switches = 0
        self.processes: dict[str, Process] = {}
        first = PrimaryRecord(1, "p0")
        if self.lease is not None:
            self.lease.swap(None, first)
        self.add(
            Process("p0", replication=self.replication_class(first, self.lease, self.sync, 0.0))
        )
        self.newcomer()
        self.ask()
        for _ in range(self.rng.randint(1, 5)):
            death = self.kill if self.locked else self.switch
            fault = self.rng.choice([death, self.stop, self.stop, self.cut_links, self.switch])
            self.after(self.rng.random() * 40, fault)

    # ---- time and lines

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """Run an action at a moment; ties keep the order of the calls."""
        self.count += 1
        heapq.heappush(self.queue, (moment, self.count, action))

    def on(self, process: Process, action: Callable[[], None]) -> Callable[[], None]:
        """Return the action as this process runs it: not when dead, and later when stopped."""

        def act() -> None:
            if process.alive and process.awake_at > self.now:
                self.at(process.awake_at, act)
            elif process.alive:
                action()

        return act

    def run(self) -> "FailoverWorld":
        while self.now < HORIZON:
            self.now, _, action = heapq.heappop(self.queue)
            action()
        self.verify()
        return self

    # ---- processes

    def add(self, process: Process) -> None:
        self.processes[process.name] = process
        self.after(0.0, self.on(process, lambda: self.tick(process)))
        self.after(0.0, self.on(process, lambda: self.beat(process)))

    def newcomer(self) -> None:
        """Start another standby, as an operator does."""
        process = Process(f"p{len(self.processes)}")
        process.failover = self.failover_class(process.name, process.name, self.lease, self.now)
        self.add(process)

    def tick(self, process: Process) -> None:
        if process.replication is not None:
            process.replication.tick(self.now)
            self.alone += process.replication.phase is ReplicationPhase.ALONE
            self.report(process, process.replication)
            self.answer(process)
        elif process.failover is not None:
            self.follow(process, process.failover)
        if process.alive:
            self.after(TICK, self.on(process, lambda: self.tick(process)))

    def beat(self, process: Process) -> None:
        """Send a message over the primary's link regularly."""
        replication = process.replication
        if replication is not None and replication.phase is not ReplicationPhase.ALONE:
            self.ship(process, None)
        if process.alive:
            self.after(BEAT, self.on(process, lambda: self.beat(process)))

    # ---- the primary

    def ship(self, process: Process, record: str | None) -> int:
        replication = process.replication
        assert replication is not None
        ticket = replication.append() if record is not None else replication.last_sent
        if ticket or record is None:
            self.send(
                process,
                lambda standby, link: self.receive(standby, process.name, link, ticket, record),
            )
        return ticket

    def send(self, process: Process, deliver: Callable[[Process, int], None]) -> None:
        """Send to the standby of the current link, in order; a cut link loses the rest."""
        replication = process.replication
        assert replication is not None
        if not replication.standby_id:
            return  # the link was lost during the handover
        standby, link = self.processes[replication.standby_id], replication.link_id
        sent = self.now

        def arrive() -> None:
            if self.cut_until > sent and standby.listens_to == (process.name, link):
                standby.listens_to = ("", 0)  # messages in flight are lost, and the link with them
            if standby.listens_to == (process.name, link):
                deliver(standby, link)

        self.after(0.01, self.on(standby, arrive))

    def request(self, process: Process, number: int) -> None:
        """A client wants a round closed."""
        replication = process.replication
        if replication is None or replication.deposed_reason or number <= len(process.records):
            return  # the round is in progress, or its reply has left
        record = f"{process.name}.{number}.{self.rng.random():.6f}"
        ticket = self.ship(process, record)
        process.records.append(record)
        process.waiting.append(Round(len(process.records), replication.link_id, ticket))
        self.answer(process)

    def report(self, process: Process, replication: ReplicationMachine) -> None:
        """Queue a report to shard 0 on all records; it waits for the standby as a reply does."""
        newest = replication.last_sent if replication.phase is not ReplicationPhase.ALONE else 0
        process.waiting.append(Round(len(process.records), replication.link_id, newest))

    def answer(self, process: Process) -> None:
        replication = process.replication
        assert replication is not None
        for each in list(process.waiting):
            if replication.can_reply(each.link_id, each.ticket, self.now):
                process.waiting.remove(each)
                for number in (
                    *range(len(self.published) + 1, each.number),
                    *([each.number] if each.number else []),
                ):
                    self.publish(process, number, replication.term)
        if replication.deposed_reason:
            self.deposed += 1
            process.alive = False

    def publish(self, process: Process, number: int, term: int) -> None:
        record, known = process.records[number - 1], self.published.get(number)
        check(
            process.lost_after is None or number <= process.lost_after,
            "{} published {} after it handed over",
            process.name,
            number,
        )
        if self.sync or (known is not None and known[2] == term):
            check(
                known is None or known[0] == record,
                "round {} was closed as {} and as {}",
                number,
                known,
                record,
            )
        self.published[number] = (record, process.name, term)
        delay = 0.01 if self.rng.random() < 0.9 else self.rng.random() * 5.0
        self.after(delay, lambda: self.believe(number, record, term))

    def believe(self, number: int, record: str, term: int) -> None:
        """Deliver a reply to a client (or another shard), which refuses lower terms."""
        if term < self.highest and not self.follows_lower_terms:
            return
        self.highest = max(term, self.highest)
        known, known_term = self.believed.get(number, (record, term))
        check(
            known == record or term > known_term,
            "round {} was {}, now {} of term {}",
            number,
            known,
            record,
            term,
        )
        self.believed[number] = (record, term)

    # ---- the standby

    def follow(self, process: Process, failover: FailoverMachine) -> None:
        primaries = [p for p in self.processes.values() if p.replication is not None and p.alive]
        primary = self.rng.choice(primaries) if primaries else None
        if process.listens_to == ("", 0) and primary is not None and self.now >= self.cut_until:
            self.after(0.01, self.on(primary, lambda: self.attached(primary, process)))
        if failover.is_takeover_due(self.now):
            primary_record = failover.take_over()
            if primary_record is not None:
                self.promote(process, primary_record)

    def attached(self, primary: Process, standby: Process) -> None:
        replication = primary.replication
        assert replication is not None
        if not standby.alive or standby.failover is None or self.now < self.cut_until:
            return
        if standby.listens_to != ("", 0):
            return
        if replication.phase is not ReplicationPhase.ALONE:
            if replication.standby_id == standby.name:
                # the standby connects again, so its old link is cut
                replication.drop_link(replication.link_id)
            return
        link = replication.attach(standby.name, self.now)
        standby.listens_to = (primary.name, link)
        state, term = list(primary.records), replication.term
        ticket = replication.append()
        replication.end_state_transfer()
        self.send(
            primary,
            lambda process, link: self.load(process, primary.name, link, ticket, state, term),
        )

    def load(
        self, process: Process, primary: str, link: int, ticket: int, state: list[str], term: int
    ) -> None:
        failover = process.failover
        if failover is None:
            return
        if not failover.begin_loading(term, self.sync):
            process.listens_to = ("", 0)
            return
        process.records = state
        failover.has_state = True
        self.receive(process, primary, link, ticket, None)

    def receive(
        self, process: Process, primary: str, link: int, ticket: int, record: str | None
    ) -> None:
        failover = process.failover
        if failover is None:
            return
        failover.note_contact(self.now)
        if record is not None:
            process.records.append(record)
        source = self.processes[primary]

        def acked() -> None:
            if source.replication is not None and self.now >= self.cut_until:
                source.replication.acknowledge(link, ticket, self.now)
                self.answer(source)

        self.after(0.01, self.on(source, acked))

    def promote(self, process: Process, primary_record: PrimaryRecord) -> None:
        self.takeovers += 1
        failover, process.failover = process.failover, None
        assert failover is not None

        def lead() -> None:
            process.replication = self.replication_class(
                primary_record, self.lease, self.sync, self.now
            )
            if failover.is_complete:
                for number, (record, name, _) in self.published.items():
                    current = (
                        process.records[number - 1] if number <= len(process.records) else "nothing"
                    )
                    check(
                        current == record,
                        "{} has {} where {} published {}",
                        process.name,
                        current,
                        name,
                        record,
                    )
            else:  # rounds that it lacks may be closed again, in a higher term
                self.published = {
                    n: each for n, each in self.published.items() if n <= len(process.records)
                }
                highest_alive = [
                    p
                    for p in self.processes.values()
                    if p.replication and p is not process and p.alive
                ]
                for other in highest_alive:
                    assert other.replication is not None
                    now_tells = other.awake_at <= self.now and other.replication.can_reply(
                        0, 0, self.now
                    )
                    check(not now_tells, "{} and {} both answer", process.name, other.name)
            self.newcomer()

        self.after(failover.reply_delay_seconds, self.on(process, lead))

    # ---- clients and faults

    def ask(self) -> None:
        """Ask every process that may still act as primary for the next round."""
        for process in list(self.processes.values()):
            if process.replication is not None:
                number = len(self.published) + 1
                self.after(0.005, self.on(process, lambda p=process, n=number: self.request(p, n)))  # type: ignore[misc]
        self.after(self.rng.random() * 0.2, self.ask)

    def kill(self) -> None:
        """Kill a process; a killed standby is replaced."""
        alive = [process for process in self.processes.values() if process.alive]
        victim = self.rng.choice(alive)
        standbys = [
            process for process in alive if process.failover is not None and process is not victim
        ]
        if victim.failover is not None:
            victim.alive = False
            self.newcomer()
        elif any(each.failover and each.failover.has_state for each in standbys):
            victim.alive = False

    def stop(self) -> None:
        """Stop a process (SIGSTOP), for shorter or longer than the timeouts."""
        process = self.rng.choice([process for process in self.processes.values() if process.alive])
        process.awake_at = max(
            process.awake_at, self.now + self.rng.choice([0.3, 1.5, 2.1, 4.0, 8.0])
        )

    def switch(self) -> None:
        """Hand over to a standby that is in sync, as `ps-ctl promote` does."""
        for process in [] if self.now < self.cut_until else list(self.processes.values()):
            standby = (
                self.processes.get(process.replication.standby_id)
                if process.replication is not None
                else None
            )
            if (
                process.alive
                and process.awake_at <= self.now
                and process.lost_after is None
                and standby is not None
            ):
                assert process.replication is not None
                if process.replication.begin_handover():
                    self.hand_over(process, standby)

    def hand_over(self, primary: Process, standby: Process, since: float | None = None) -> None:
        """Complete a handover. The old primary ends a moment later; its link is cut first."""
        replication, failover, since = (
            primary.replication,
            standby.failover,
            self.now if since is None else since,
        )
        if replication is None or failover is None or not standby.alive:
            return None
        if not replication.is_handover_complete and self.now - since < STEP_DOWN:
            return self.after(
                TICK, self.on(primary, lambda: self.hand_over(primary, standby, since))
            )
        failover.is_handover_complete = replication.is_handover_complete
        primary.alive = replication.is_handover_complete
        if (primary_record := failover.take_over()) is not None:
            self.switches += 1
            primary.lost_after = len(standby.records)
            self.promote(standby, primary_record)
        moment = self.rng.random() * 0.5
        self.after(moment / 4, self.on(primary, lambda: replication.drop_link(replication.link_id)))
        self.after(moment, self.on(primary, lambda: self.end(primary)))
        return None

    def end(self, process: Process) -> None:
        process.alive = False

    def cut_links(self) -> None:
        """Cut all links between the servers for a while."""
        self.cut_until = self.now + self.rng.choice([0.3, 1.9, 2.1, 5.0])

    def verify(self) -> None:
        primaries = [
            p
            for p in self.processes.values()
            if p.replication is not None and p.alive and p.lost_after is None
        ]
        current = self.lease.read() if self.lease is not None else None
        leading = [
            p
            for p in primaries
            if p.replication is not None and current in (None, p.replication.primary_record)
        ]
        check(len(leading) <= 1, "{} primaries at the end", len(leading))
        if leading and self.sync:
            records = leading[0].records
            for number, (record, name, _) in self.published.items():
                check(
                    number <= len(records) and records[number - 1] == record,
                    "{} published {}, lost",
                    name,
                    record,
                )
