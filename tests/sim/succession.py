"""One shard's primaries and standbys, over lines that break and processes that are stopped: the
protocol alone.

The real machines of both ends (core/shipping.py, core/succession.py), a lease in memory; a shard
is the list of its records. Clients ask for rounds: a round is a record, and its answer is told
when the machine says that it may be; and shard 0 is told how far the shard is. Checked: no round
is closed by two primaries, nothing that was told is ever missing, who has handed over tells
nothing more while it still lives, and terms only grow for a client.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from psserver.core.shard.failover import FailoverMachine
from psserver.core.shard.primary_lease import PrimaryRecord
from psserver.core.shard.replication import ReplicationMachine, ReplicationPhase
from tests.sim.servers import check

BEAT = 0.5
TICK = 0.1
HORIZON = 60.0
STEP_DOWN = 3.0
"""Seconds that a standby gets for what is on its way to it when it is handed over to."""


class MemoryLease:
    """A tenure that all processes of a simulation share."""

    def __init__(self) -> None:
        self.tenure: PrimaryRecord | None = None

    def read(self) -> PrimaryRecord | None:
        return self.tenure

    def swap(self, old: PrimaryRecord | None, new: PrimaryRecord) -> bool:
        if self.tenure != old:
            return False
        self.tenure = new
        return True


@dataclass
class Round:
    """A record that a client asked for: told once its primary may."""

    number: int
    line: int
    ticket: int


@dataclass
class Process:
    """A server: a primary (shipping) or a standby (succession). awake_at: until then it is
    stopped. over: how many records its successor began with, to which it has handed over."""

    name: str
    alive: bool = True
    awake_at: float = 0.0
    shipping: ReplicationMachine | None = None
    succession: FailoverMachine | None = None
    records: list[str] = field(default_factory=list)
    waiting: list[Round] = field(default_factory=list)
    over: int | None = None
    listens_to: tuple[str, int] = ("", 0)


class Succeeding:
    """A history of one shard, from a seed. sync: how the primaries ship. locked: there is a
    failover lock; without it none of them dies, and only an operator makes a standby primary."""

    shipping_class: type[ReplicationMachine] = ReplicationMachine
    succession_class: type[FailoverMachine] = FailoverMachine
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
        self.told: dict[
            int, tuple[str, str, int]
        ] = {}  # by round: which record, by whom, in which term
        self.believed: dict[int, tuple[str, int]] = {}
        self.highest = self.takeovers = self.deposed = self.alone = self.switches = 0
        self.processes: dict[str, Process] = {}
        first = PrimaryRecord(1, "p0")
        if self.lease is not None:
            self.lease.swap(None, first)
        self.add(Process("p0", shipping=self.shipping_class(first, self.lease, self.sync, 0.0)))
        self.newcomer()
        self.ask()
        for _ in range(self.rng.randint(1, 5)):
            death = self.kill if self.locked else self.switch
            fault = self.rng.choice([death, self.stop, self.stop, self.cut_line, self.switch])
            self.after(self.rng.random() * 40, fault)

    # ---- time and lines

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """What is due at the same moment is done in the order in which it was asked for."""
        self.count += 1
        heapq.heappush(self.queue, (moment, self.count, action))

    def on(self, process: Process, action: Callable[[], None]) -> Callable[[], None]:
        """Done by this process: not when it is dead, and not while it is stopped."""

        def act() -> None:
            if process.alive and process.awake_at > self.now:
                self.at(process.awake_at, act)
            elif process.alive:
                action()

        return act

    def run(self) -> "Succeeding":
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
        """A standby is started, as an operator keeps one there."""
        process = Process(f"p{len(self.processes)}")
        process.succession = self.succession_class(process.name, process.name, self.lease, self.now)
        self.add(process)

    def tick(self, process: Process) -> None:
        if process.shipping is not None:
            process.shipping.tick(self.now)
            self.alone += process.shipping.phase is ReplicationPhase.ALONE
            self.report(process, process.shipping)
            self.answer(process)
        elif process.succession is not None:
            self.follow(process, process.succession)
        if process.alive:
            self.after(TICK, self.on(process, lambda: self.tick(process)))

    def beat(self, process: Process) -> None:
        """The primary's line is never silent."""
        shipping = process.shipping
        if shipping is not None and shipping.phase is not ReplicationPhase.ALONE:
            self.ship(process, None)
        if process.alive:
            self.after(BEAT, self.on(process, lambda: self.beat(process)))

    # ---- the primary

    def ship(self, process: Process, record: str | None) -> int:
        shipping = process.shipping
        assert shipping is not None
        ticket = shipping.append() if record is not None else shipping.sent
        if ticket or record is None:
            self.send(
                process,
                lambda standby, line: self.hear(standby, process.name, line, ticket, record),
            )
        return ticket

    def send(self, process: Process, deliver: Callable[[Process, int], None]) -> None:
        """To the standby of the line of now; nothing overtakes anything, and a line that is cut
        loses the rest.
        """
        shipping = process.shipping
        assert shipping is not None
        if not shipping.standby:
            return  # it was lost while it was handed over to
        standby, line = self.processes[shipping.standby], shipping.line
        sent = self.now

        def arrive() -> None:
            if self.cut_until > sent and standby.listens_to == (process.name, line):
                standby.listens_to = ("", 0)  # what was under way is lost, and with it the line
            if standby.listens_to == (process.name, line):
                deliver(standby, line)

        self.after(0.01, self.on(standby, arrive))

    def request(self, process: Process, number: int) -> None:
        """A client wants a round closed."""
        shipping = process.shipping
        if shipping is None or shipping.deposed or number <= len(process.records):
            return  # it is under way, or was told before
        record = f"{process.name}.{number}.{self.rng.random():.6f}"
        ticket = self.ship(process, record)
        process.records.append(record)
        process.waiting.append(Round(len(process.records), shipping.line, ticket))
        self.answer(process)

    def report(self, process: Process, shipping: ReplicationMachine) -> None:
        """Shard 0 is to hear how far this shard is, once its standby is as far: of all records,
        be there none since.
        """
        newest = shipping.sent if shipping.phase is not ReplicationPhase.ALONE else 0
        process.waiting.append(Round(len(process.records), shipping.line, newest))

    def answer(self, process: Process) -> None:
        shipping = process.shipping
        assert shipping is not None
        for each in list(process.waiting):
            if shipping.may_tell(each.line, each.ticket, self.now):
                process.waiting.remove(each)
                for number in (
                    *range(len(self.told) + 1, each.number),
                    *([each.number] if each.number else []),
                ):
                    self.tell(process, number, shipping.term)
        if shipping.deposed:
            self.deposed += 1
            process.alive = False

    def tell(self, process: Process, number: int, term: int) -> None:
        record, known = process.records[number - 1], self.told.get(number)
        check(
            process.over is None or number <= process.over,
            "{} told {} after it handed over",
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
        self.told[number] = (record, process.name, term)
        delay = 0.01 if self.rng.random() < 0.9 else self.rng.random() * 5.0
        self.after(delay, lambda: self.believe(number, record, term))

    def believe(self, number: int, record: str, term: int) -> None:
        """A client (or another shard) hears how a round ended, perhaps late, and refuses what is
        of a lower term.
        """
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

    def follow(self, process: Process, succession: FailoverMachine) -> None:
        primaries = [p for p in self.processes.values() if p.shipping is not None and p.alive]
        primary = self.rng.choice(primaries) if primaries else None
        if process.listens_to == ("", 0) and primary is not None and self.now >= self.cut_until:
            self.after(0.01, self.on(primary, lambda: self.attached(primary, process)))
        if succession.due(self.now):
            tenure = succession.take_over()
            if tenure is not None:
                self.promote(process, tenure)

    def attached(self, primary: Process, standby: Process) -> None:
        shipping = primary.shipping
        assert shipping is not None
        if not standby.alive or standby.succession is None or self.now < self.cut_until:
            return
        if standby.listens_to != ("", 0):
            return
        if shipping.phase is not ReplicationPhase.ALONE:
            if shipping.standby == standby.name:
                shipping.lose(shipping.line)  # its line is cut, for it is here again
            return
        line = shipping.attach(standby.name, self.now)
        standby.listens_to = (primary.name, line)
        state, term = list(primary.records), shipping.term
        ticket = shipping.append()
        shipping.loaded()
        self.send(
            primary,
            lambda process, line: self.load(process, primary.name, line, ticket, state, term),
        )

    def load(
        self, process: Process, primary: str, line: int, ticket: int, state: list[str], term: int
    ) -> None:
        succession = process.succession
        if succession is None:
            return
        if not succession.begins(term, self.sync):
            process.listens_to = ("", 0)
            return
        process.records = state
        succession.loaded = True
        self.hear(process, primary, line, ticket, None)

    def hear(
        self, process: Process, primary: str, line: int, ticket: int, record: str | None
    ) -> None:
        succession = process.succession
        if succession is None:
            return
        succession.hear(self.now)
        if record is not None:
            process.records.append(record)
        source = self.processes[primary]

        def acked() -> None:
            if source.shipping is not None and self.now >= self.cut_until:
                source.shipping.ack(line, ticket, self.now)
                self.answer(source)

        self.after(0.01, self.on(source, acked))

    def promote(self, process: Process, tenure: PrimaryRecord) -> None:
        self.takeovers += 1
        succession, process.succession = process.succession, None
        assert succession is not None

        def lead() -> None:
            process.shipping = self.shipping_class(tenure, self.lease, self.sync, self.now)
            if succession.whole:
                for number, (record, name, _) in self.told.items():
                    held = (
                        process.records[number - 1] if number <= len(process.records) else "nothing"
                    )
                    check(
                        held == record,
                        "{} has {} where {} told {}",
                        process.name,
                        held,
                        name,
                        record,
                    )
            else:  # what it lacks is done again: rounds that were told may be closed anew, in a higher term
                self.told = {n: each for n, each in self.told.items() if n <= len(process.records)}
                highest_alive = [
                    p
                    for p in self.processes.values()
                    if p.shipping and p is not process and p.alive
                ]
                for other in highest_alive:
                    assert other.shipping is not None
                    now_tells = other.awake_at <= self.now and other.shipping.may_tell(
                        0, 0, self.now
                    )
                    check(not now_tells, "{} and {} both answer", process.name, other.name)
            self.newcomer()

        self.after(succession.pause, self.on(process, lead))

    # ---- clients and faults

    def ask(self) -> None:
        """Every primary that anybody may still believe in is asked for the next round."""
        for process in list(self.processes.values()):
            if process.shipping is not None:
                number = len(self.told) + 1
                self.after(0.005, self.on(process, lambda p=process, n=number: self.request(p, n)))  # type: ignore[misc]
        self.after(self.rng.random() * 0.2, self.ask)

    def kill(self) -> None:
        """Of the two, any; a standby's place is filled again."""
        alive = [process for process in self.processes.values() if process.alive]
        victim = self.rng.choice(alive)
        standbys = [
            process for process in alive if process.succession is not None and process is not victim
        ]
        if victim.succession is not None:
            victim.alive = False
            self.newcomer()
        elif any(each.succession and each.succession.loaded for each in standbys):
            victim.alive = False

    def stop(self) -> None:
        """SIGSTOP, and later SIGCONT: for less or for longer than it takes to be given up."""
        process = self.rng.choice([process for process in self.processes.values() if process.alive])
        process.awake_at = max(
            process.awake_at, self.now + self.rng.choice([0.3, 1.5, 2.1, 4.0, 8.0])
        )

    def switch(self) -> None:
        """Somebody wants the standby to be primary: the primary hands over to it, if it is in
        sync.
        """
        for process in [] if self.now < self.cut_until else list(self.processes.values()):
            standby = (
                self.processes.get(process.shipping.standby)
                if process.shipping is not None
                else None
            )
            if (
                process.alive
                and process.awake_at <= self.now
                and process.over is None
                and standby is not None
            ):
                assert process.shipping is not None
                if process.shipping.freeze():
                    self.hand_over(process, standby)

    def hand_over(self, primary: Process, standby: Process, since: float | None = None) -> None:
        """The old primary lives for a moment after that, or is stopped, and its line is cut
        first.
        """
        shipping, succession, since = (
            primary.shipping,
            standby.succession,
            self.now if since is None else since,
        )
        if shipping is None or succession is None or not standby.alive:
            return None
        if not shipping.handed_over and self.now - since < STEP_DOWN:
            return self.after(
                TICK, self.on(primary, lambda: self.hand_over(primary, standby, since))
            )
        succession.handed_over = shipping.handed_over
        primary.alive = shipping.handed_over
        if (tenure := succession.take_over()) is not None:
            self.switches += 1
            primary.over = len(standby.records)
            self.promote(standby, tenure)
        moment = self.rng.random() * 0.5
        self.after(moment / 4, self.on(primary, lambda: shipping.lose(shipping.line)))
        self.after(moment, self.on(primary, lambda: self.end(primary)))
        return None

    def end(self, process: Process) -> None:
        process.alive = False

    def cut_line(self) -> None:
        """Nothing gets through between the servers."""
        self.cut_until = self.now + self.rng.choice([0.3, 1.9, 2.1, 5.0])

    def verify(self) -> None:
        primaries = [
            p
            for p in self.processes.values()
            if p.shipping is not None and p.alive and p.over is None
        ]
        held = self.lease.read() if self.lease is not None else None
        leading = [
            p for p in primaries if p.shipping is not None and held in (None, p.shipping.tenure)
        ]
        check(len(leading) <= 1, "{} primaries at the end", len(leading))
        if leading and self.sync:
            records = leading[0].records
            for number, (record, name, _) in self.told.items():
                check(
                    number <= len(records) and records[number - 1] == record,
                    "{} told {}, lost",
                    name,
                    record,
                )
