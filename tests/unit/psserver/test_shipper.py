"""When a primary ends: its tenure is gone, or the lock with it; and what it may tell until then."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Never
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry

import psserver.replication.primary as shipper_module
from pscommon.core.errors import MismatchError, UnreachableError
from psproto.v1 import standby_pb2 as pb
from psserver.core.shard.primary_lease import PrimaryRecord
from psserver.core.shard.replication import (
    LEASE_MAX_AGE_SECONDS,
    STALLED_STANDBY_SECONDS,
    STANDBY_TIMEOUT_SECONDS,
    ReplicationMachine,
    ReplicationPhase,
)
from psserver.durability.record_sink import RecordSink, RecordSource
from psserver.durability.state_records import StateRecord, StateRecordKind
from psserver.process.metrics import ServerMetrics
from psserver.replication.primary import PrimaryReplicator
from psserver.replication.servicer import StandbyServicer
from tests.sim.failover_world import MemoryLease

FIRST = PrimaryRecord(1, "a:1")
STATE = [
    StateRecord(RecordSource.LINE, StateRecordKind.NUMBERS, b"x", [bytes(80)]),
    StateRecord(RecordSource.LINE, StateRecordKind.LOADED, b"{}"),
]
S, T = (pb.ReplicateRequest(instance=name, address=f"{name}:1") for name in "st")


class DeposedError(Exception):
    """Instead of the end of the process."""


def deposed(why: str) -> Never:
    raise DeposedError(why)


class BrokenLease(MemoryLease):
    """Its folder may be gone."""

    broken = False

    def read(self) -> PrimaryRecord | None:
        if self.broken:
            raise OSError("Stale file handle")
        return super().read()

    def swap(self, old: PrimaryRecord | None, new: PrimaryRecord) -> bool:
        self.read()
        return super().swap(old, new)


@pytest.fixture
def lease() -> BrokenLease:
    lease = BrokenLease()
    lease.swap(None, FIRST)
    return lease


def shipper(lease: BrokenLease | None, sync: bool = True) -> PrimaryReplicator:
    """With a standby that is in sync."""
    made = PrimaryReplicator(
        ReplicationMachine(FIRST, lease, sync, time.monotonic()),
        ServerMetrics(CollectorRegistry(), shard=0),
        deposed,
    )
    made.copy_state = lambda begin: begin(STATE)
    in_sync(made, made.attach(S))
    return made


def in_sync(primary: PrimaryReplicator, line: int) -> None:
    primary.handle_acknowledgement(line, len(STATE))
    assert primary._machine.phase is ReplicationPhase.IN_SYNC


def meanwhile(primary: PrimaryReplicator, action: Callable[[], object]) -> None:
    """Done while the next standby waits for the moment at which the whole state can be copied."""

    def whole(begin: Callable[[Iterable[StateRecord]], None]) -> None:
        primary.copy_state = lambda begin: begin(STATE)
        action()
        begin(STATE)

    primary.copy_state = whole


def test_who_loses_its_standby_goes_on_if_the_lock_allows_it(lease: BrokenLease) -> None:
    primary = shipper(lease)
    sent = primary.send(RecordSource.SHARD, 4, b"entry")

    primary.handle_disconnect(sent[0])

    primary.settle(sent)
    assert lease.read() == FIRST


def test_who_finds_another_one_in_its_place_ends(lease: BrokenLease) -> None:
    primary = shipper(lease)
    sent = primary.send(RecordSource.SHARD, 4, b"entry")
    lease.primary_record = PrimaryRecord(2, "s:1")

    with pytest.raises(DeposedError, match="s:1, in term 2"):
        primary.handle_disconnect(sent[0])
    with pytest.raises(DeposedError):
        primary.settle(sent)


def test_who_has_handed_over_ends_as_planned_however_it_learns_that_it_is_not_primary(
    lease: BrokenLease,
) -> None:
    """The standby's swap may be seen before the answer to its request is through."""
    primary = shipper(lease)
    line, _ = primary.last
    primary.step_down("s", 1.0)
    lease.primary_record = PrimaryRecord(2, "s:1")

    with pytest.raises(DeposedError) as ended:
        primary.handle_disconnect(line)

    assert not str(ended.value)


@pytest.mark.parametrize("sync", [True, False])
def test_who_has_handed_over_tells_nothing_more_however_its_line_ends(sync: bool) -> None:
    """Its standby hangs up a moment before this process ends: what comes then is not in the
    state of the new primary, and shard 0 must not hear of it."""
    primary = shipper(None, sync)
    log, (line, _) = RecordSink(RecordSource.SHARD, line=primary), primary.last
    primary.step_down("s", 1.0)

    primary.handle_disconnect(line)

    assert not log.idle
    sent = primary.send(RecordSource.SHARD, 4, b"entry")
    assert not primary._can_reply(*sent)
    assert not primary._can_reply(*primary.last)


def test_who_hands_over_begins_with_no_standby_anew() -> None:
    """The records of another line would count from one again."""
    primary = shipper(None)
    line, _ = primary.last
    primary.step_down("s", 1.0)
    primary.handle_disconnect(line)

    with pytest.raises(UnreachableError, match="hands over") as refused:
        primary.attach(pb.ReplicateRequest(instance="s", address="s:1"))
    assert refused.value.reason == "NOT_PRIMARY"


def test_what_no_record_says_is_not_done_once_there_is_a_hand_over(lease: BrokenLease) -> None:
    """A new part of the model, or a snapshot that was loaded: the new primary has neither, and
    shard 0 must not hear of them, be there other records or not."""
    primary = shipper(lease)
    line, _ = primary.last
    primary.step_down("s", 1.0)

    with ThreadPoolExecutor(1) as pool:
        dropping = pool.submit(primary.drop, "the model has moved")
        with pytest.raises(TimeoutError):
            dropping.result(0.3)
        lease.primary_record = PrimaryRecord(2, "s:1")
        with pytest.raises(DeposedError):
            primary.handle_disconnect(line)

        with pytest.raises(DeposedError) as ended:
            dropping.result(10)
    assert not str(ended.value)


def test_of_two_standbys_that_come_at_a_time_the_first_stays() -> None:
    """The other one came before the first had its state, and could copy its own only then."""
    primary = shipper(None)
    primary.drop("begin anew")
    meanwhile(primary, lambda: primary.attach(S))

    with pytest.raises(MismatchError, match="this shard has a standby at s:1"):
        primary.attach(T)
    in_sync(primary, primary.last[0])
    assert primary.address == "s:1"


def test_one_standby_that_comes_twice_at_a_time_has_one_line(lease: BrokenLease) -> None:
    """It hung up, came again, and was quicker so: what waits is for the newest line, and from
    the beginning.
    """
    primary = shipper(lease)
    primary.drop("begin anew")
    lines: list[int] = []
    meanwhile(primary, lambda: lines.append(primary.attach(S)))
    lines.append(primary.attach(S))

    assert lines[1] == lines[0] + 1
    assert [*primary.replicate(lines[0], lambda: True)] == []
    sent = primary.replicate(lines[1], lambda: True)
    assert [next(sent).number for _ in range(3)] == [1, 2, 0]
    in_sync(primary, lines[1])


def test_who_has_handed_over_while_a_standby_waits_gives_it_nothing() -> None:
    """Its numbers would begin anew, and what was never to be told be told."""
    primary = shipper(None)
    primary.drop("begin anew")

    def switch() -> None:
        in_sync(primary, primary.attach(S))
        primary.step_down("s", 1.0)

    meanwhile(primary, switch)
    with pytest.raises(UnreachableError, match="hands over"):
        primary.attach(S)
    assert not primary._can_reply(*primary.send(RecordSource.SHARD, 4, b"entry"))


@pytest.mark.parametrize("listens", [True, False])
def test_who_has_handed_over_ends_whether_or_not_anybody_hears_that(
    lease: BrokenLease, listens: bool
) -> None:
    context = Mock(add_callback=Mock(side_effect=lambda action: listens and (action() or True)))

    with pytest.raises(DeposedError) as ended:
        StandbyServicer(shipper(lease)).StepDown(pb.StepDownRequest(instance="s"), context)
    assert not str(ended.value)


def test_one_that_is_behind_hears_why() -> None:
    """It was in sync; wait is all that helps while the model moves."""
    primary = shipper(None)
    primary.drop("the model has moved")

    with pytest.raises(MismatchError, match="the model has moved") as refused:
        primary.step_down("s", 1.0)
    assert refused.value.reason == "NOT_IN_SYNC"


def test_a_lock_that_cannot_be_used_is_lost(lease: BrokenLease) -> None:
    """Nobody knows then who is primary."""
    primary = shipper(lease)
    lease.broken = True

    with pytest.raises(DeposedError, match=r"the failover lock cannot be used.*Stale file handle"):
        primary.handle_disconnect(1)


def test_async_tells_nothing_on_an_old_look(lease: BrokenLease) -> None:
    machine = shipper(lease, sync=False)._machine
    now = time.monotonic()
    lease.primary_record = PrimaryRecord(2, "s:1")

    assert machine.can_reply(1, 99, now)
    assert not machine.can_reply(1, 99, now + 2 * LEASE_MAX_AGE_SECONDS)


def test_a_silent_standby_is_given_up(lease: BrokenLease) -> None:
    machine = shipper(lease)._machine
    number = machine.append()
    now = time.monotonic()

    machine.tick(now)
    assert not machine.can_reply(1, number, now)
    machine.tick(now + STANDBY_TIMEOUT_SECONDS + 0.1)
    assert machine.can_reply(1, number, now + STANDBY_TIMEOUT_SECONDS + 0.1)
    assert machine.phase is ReplicationPhase.ALONE


def test_one_that_speaks_and_does_not_get_on_is_given_up(lease: BrokenLease) -> None:
    machine = shipper(lease)._machine
    now = time.monotonic()
    number = machine.append()

    for second in range(int(STALLED_STANDBY_SECONDS) + 2):
        machine.acknowledge(1, number - 1, now + second)
        machine.tick(now + second + 0.5)

    assert machine.phase is ReplicationPhase.ALONE
    assert machine.can_reply(1, number, now + STALLED_STANDBY_SECONDS)


def test_one_that_is_idle_for_long_is_not(lease: BrokenLease) -> None:
    machine = shipper(lease)._machine
    now = time.monotonic()

    for second in range(2 * int(STALLED_STANDBY_SECONDS)):
        machine.acknowledge(1, machine.last_sent, now + second)
        machine.tick(now + second + 0.5)
    machine.append()
    machine.tick(now + 2 * STALLED_STANDBY_SECONDS + 0.5)

    assert machine.phase is ReplicationPhase.IN_SYNC


def test_who_has_stepped_down_tells_nothing_more(lease: BrokenLease) -> None:
    machine = shipper(lease)._machine
    before = machine.append()
    assert machine.begin_handover()
    after = machine.append()

    assert not machine.is_handover_complete
    machine.acknowledge(1, after, time.monotonic())

    assert machine.is_handover_complete
    assert machine.can_reply(1, before, time.monotonic())
    assert not machine.can_reply(1, after, time.monotonic())


def test_another_standby_finds_the_place_taken(lease: BrokenLease) -> None:
    with pytest.raises(Exception, match="this shard has a standby at s:1"):
        shipper(lease).attach(pb.ReplicateRequest(instance="t", address="t:1"))


def test_a_standby_of_a_higher_term_is_not_served(lease: BrokenLease) -> None:
    """This one was stopped, and does not know yet what has happened."""
    with pytest.raises(Exception, match="this server is of term 1, not 2"):
        shipper(lease).attach(pb.ReplicateRequest(instance="t", address="t:1", term=2))


def test_a_standby_that_loads_much_holds_nobody_up(
    lease: BrokenLease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes after the whole state waits for room, the state itself takes none."""
    monkeypatch.setattr(shipper_module, "MAX_QUEUED_BYTES", 100)
    machine = ReplicationMachine(FIRST, lease, True, time.monotonic())
    primary = PrimaryReplicator(machine, ServerMetrics(CollectorRegistry(), shard=0), deposed)
    state = [StateRecord(RecordSource.LINE, StateRecordKind.NUMBERS, b"x", [bytes(80)])] * 3
    primary.copy_state = lambda begin: begin(state)
    line = primary.attach(pb.ReplicateRequest(instance="s", address="s:1"))

    primary.send(RecordSource.SHARD, 4, bytes(120))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(primary.send, RecordSource.SHARD, 4, b"entry")
        sent = primary.replicate(line, lambda: True)
        shipped = [next(sent) for _ in range(4)]
        assert not waiting.done()
        shipped.append(next(sent))

        assert waiting.result(10) == (line, 5)
    assert [message.number for message in shipped] == [1, 2, 3, 4, 5]
