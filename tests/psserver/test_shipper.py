"""When a primary ends: its tenure is gone, or the lock with it; and what it may tell until then."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Never

import pytest
from prometheus_client import CollectorRegistry

import psserver.shipper as shipper_module
from pscommon.core.errors import UnreachableError
from psproto.v1 import standby_pb2 as pb
from psserver.core.shipping import OLDEST_LOOK, SILENCE, STALLED, Phase, Shipping
from psserver.core.tenure import Tenure
from psserver.metrics import ServerMetrics
from psserver.records import Records, Source
from psserver.shipped import LineKind, Shipped
from psserver.shipper import Shipper
from tests.sim.succession import MemoryLease

FIRST = Tenure(1, "a:1")


class DeposedError(Exception):
    """Instead of the end of the process."""


def deposed(why: str) -> Never:
    raise DeposedError(why)


class BrokenLease(MemoryLease):
    """Its folder may be gone."""

    broken = False

    def read(self) -> Tenure | None:
        if self.broken:
            raise OSError("Stale file handle")
        return super().read()

    def swap(self, old: Tenure | None, new: Tenure) -> bool:
        self.read()
        return super().swap(old, new)


@pytest.fixture
def lease() -> BrokenLease:
    lease = BrokenLease()
    lease.swap(None, FIRST)
    return lease


def shipper(lease: BrokenLease | None, sync: bool = True) -> Shipper:
    """With a standby that is in sync."""
    machine = Shipping(FIRST, lease, sync, time.monotonic())
    made = Shipper(machine, ServerMetrics(CollectorRegistry(), shard=0), deposed)
    made.whole = lambda begin: begin([])
    line = made.attach(pb.ReplicateRequest(instance="s", address="s:1"))
    number = machine.append()
    machine.loaded()
    made.acknowledged(line, number)
    assert machine.phase is Phase.IN_SYNC
    return made


def test_who_loses_its_standby_goes_on_if_the_lock_allows_it(lease: BrokenLease) -> None:
    primary = shipper(lease)
    sent = primary.send(Source.SHARD, 4, b"entry")

    primary.lost(sent[0])

    primary.settle(sent)
    assert lease.read() == FIRST


def test_who_finds_another_one_in_its_place_ends(lease: BrokenLease) -> None:
    primary = shipper(lease)
    sent = primary.send(Source.SHARD, 4, b"entry")
    lease.tenure = Tenure(2, "s:1")

    with pytest.raises(DeposedError, match="s:1 is, in term 2"):
        primary.lost(sent[0])
    with pytest.raises(DeposedError):
        primary.settle(sent)


def test_who_has_handed_over_ends_as_planned_however_it_learns_that_it_is_not_primary(lease: BrokenLease) -> None:
    """The standby's swap may be seen before the answer to its request is through."""
    primary = shipper(lease)
    line, _ = primary.last
    primary.step_down("s", 1.0)
    lease.tenure = Tenure(2, "s:1")

    with pytest.raises(DeposedError) as ended:
        primary.lost(line)

    assert not str(ended.value)


@pytest.mark.parametrize("sync", [True, False])
def test_who_has_handed_over_tells_nothing_more_however_its_line_ends(sync: bool) -> None:
    """Its standby hangs up a moment before this process ends: what comes then is not in the state of the new primary,
    and shard 0 must not hear of it."""
    primary = shipper(None, sync)
    log, (line, _) = Records(Source.SHARD, line=primary), primary.last
    primary.step_down("s", 1.0)

    primary.lost(line)

    assert not log.idle
    sent = primary.send(Source.SHARD, 4, b"entry")
    assert not primary._may_tell(*sent)
    assert not primary._may_tell(*primary.last)


def test_who_hands_over_begins_with_no_standby_anew() -> None:
    """The records of another line would count from one again."""
    primary = shipper(None)
    line, _ = primary.last
    primary.step_down("s", 1.0)
    primary.lost(line)

    with pytest.raises(UnreachableError, match="hands over") as refused:
        primary.attach(pb.ReplicateRequest(instance="s", address="s:1"))
    assert refused.value.reason == "NOT_PRIMARY"


def test_a_lock_that_cannot_be_used_is_lost(lease: BrokenLease) -> None:
    """Nobody knows then who is primary."""
    primary = shipper(lease)
    lease.broken = True

    with pytest.raises(DeposedError, match=r"the failover lock cannot be used.*Stale file handle"):
        primary.lost(1)


def test_async_tells_nothing_on_an_old_look(lease: BrokenLease) -> None:
    machine = shipper(lease, sync=False)._machine
    now = time.monotonic()
    lease.tenure = Tenure(2, "s:1")

    assert machine.may_tell(1, 99, now)
    assert not machine.may_tell(1, 99, now + 2 * OLDEST_LOOK)


def test_a_silent_standby_is_given_up(lease: BrokenLease) -> None:
    machine = shipper(lease)._machine
    number = machine.append()
    now = time.monotonic()

    machine.tick(now)
    assert not machine.may_tell(1, number, now)
    machine.tick(now + SILENCE + 0.1)
    assert machine.may_tell(1, number, now + SILENCE + 0.1)
    assert machine.phase is Phase.ALONE


def test_one_that_speaks_and_does_not_get_on_is_given_up(lease: BrokenLease) -> None:
    machine = shipper(lease)._machine
    now = time.monotonic()
    number = machine.append()

    for second in range(int(STALLED) + 2):
        machine.ack(1, number - 1, now + second)
        machine.tick(now + second + 0.5)

    assert machine.phase is Phase.ALONE
    assert machine.may_tell(1, number, now + STALLED)


def test_one_that_is_idle_for_long_is_not(lease: BrokenLease) -> None:
    machine = shipper(lease)._machine
    now = time.monotonic()

    for second in range(2 * int(STALLED)):
        machine.ack(1, machine.sent, now + second)
        machine.tick(now + second + 0.5)
    machine.append()
    machine.tick(now + 2 * STALLED + 0.5)

    assert machine.phase is Phase.IN_SYNC


def test_who_has_stepped_down_tells_nothing_more(lease: BrokenLease) -> None:
    machine = shipper(lease)._machine
    before = machine.append()
    assert machine.freeze()
    after = machine.append()

    assert not machine.handed_over
    machine.ack(1, after, time.monotonic())

    assert machine.handed_over
    assert machine.may_tell(1, before, time.monotonic())
    assert not machine.may_tell(1, after, time.monotonic())


def test_another_standby_finds_the_place_taken(lease: BrokenLease) -> None:
    with pytest.raises(Exception, match="this shard has a standby at s:1"):
        shipper(lease).attach(pb.ReplicateRequest(instance="t", address="t:1"))


def test_a_standby_of_a_higher_term_is_not_served(lease: BrokenLease) -> None:
    """This one was stopped, and does not know yet what has happened."""
    with pytest.raises(Exception, match="this server is of term 1, not 2"):
        shipper(lease).attach(pb.ReplicateRequest(instance="t", address="t:1", term=2))


def test_a_standby_that_loads_much_holds_nobody_up(lease: BrokenLease, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after the whole state waits for room, the state itself takes none."""
    monkeypatch.setattr(shipper_module, "ROOM", 100)
    machine = Shipping(FIRST, lease, True, time.monotonic())
    primary = Shipper(machine, ServerMetrics(CollectorRegistry(), shard=0), deposed)
    state = [Shipped(Source.LINE, LineKind.NUMBERS, b"x", [bytes(80)])] * 3
    primary.whole = lambda begin: begin(state)
    line = primary.attach(pb.ReplicateRequest(instance="s", address="s:1"))

    primary.send(Source.SHARD, 4, bytes(120))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(primary.send, Source.SHARD, 4, b"entry")
        sent = primary.replicate(line, lambda: True)
        shipped = [next(sent) for _ in range(4)]
        assert not waiting.done()
        shipped.append(next(sent))

        assert waiting.result(10) == (line, 5)
    assert [message.number for message in shipped] == [1, 2, 3, 4, 5]
