"""A primary ends when it loses its tenure or the lease directory; what it may report until then."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Never
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry

import psserver.replication.primary as shipper_module
from pscommon.core.errors import MismatchError, UnreachableError
from pscommon.wire.requests import STEP_DOWN
from psproto.v1 import standby_pb2 as pb
from psserver.core.shard.failover import PrimaryRecord
from psserver.core.shard.replication import (
    LEASE_CHECK_INTERVAL_SECONDS,
    STALLED_STANDBY_SECONDS,
    STANDBY_TIMEOUT_SECONDS,
    ReplicationMachine,
    ReplicationPhase,
)
from psserver.durability.record_sink import RecordSource
from psserver.durability.shard_log import ShardLog
from psserver.durability.state_records import StateRecord, StateRecordKind
from psserver.process.metrics import ServerMetrics
from psserver.replication.handlers import primary_handlers
from psserver.replication.primary import CopyState, PrimaryReplicator
from psserver.waiting import ThreadWaiter, run
from tests.sim.failover_world import MemoryLease

FIRST = PrimaryRecord(1, "a:1")
STATE = [
    StateRecord(RecordSource.LINE, StateRecordKind.NUMBERS, b"x", [bytes(80)]),
    StateRecord(RecordSource.LINE, StateRecordKind.LOADED, b"{}"),
]
S, T = (pb.ReplicateRequest(instance=name, address=f"{name}:1") for name in "st")


class DeposedError(Exception):
    """Raised in place of the end of the process."""


def deposed(why: str) -> Never:
    raise DeposedError(why)


class BrokenLease(MemoryLease):
    """Its directory may be missing."""

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


def replicator(lease: BrokenLease | None) -> PrimaryReplicator:
    """A replicator with a standby that is in sync."""
    made = PrimaryReplicator(
        ReplicationMachine(FIRST, lease, time.monotonic()),
        ServerMetrics(CollectorRegistry(), shard=0),
        deposed,
    )
    in_sync(made, made.attach(S, copy_state))
    return made


def copy_state(begin: Callable[[Iterable[StateRecord]], None]) -> None:
    begin(STATE)


def in_sync(primary: PrimaryReplicator, line: int) -> None:
    primary.handle_acknowledgement(line, len(STATE))
    assert primary._machine.phase is ReplicationPhase.IN_SYNC


def after(action: Callable[[], object]) -> CopyState:
    """Run an action while a standby waits for a copy of the whole state."""

    def run(begin: Callable[[Iterable[StateRecord]], None]) -> None:
        action()
        begin(STATE)

    return run


def test_a_primary_without_its_standby_continues_if_the_lease_allows(lease: BrokenLease) -> None:
    primary = replicator(lease)
    sent = primary.send(RecordSource.SHARD, 4, b"entry")

    primary.handle_disconnect(sent[0])

    primary.wait_for_standby(sent)
    assert lease.read() == FIRST


def test_a_standby_cannot_acknowledge_a_record_that_was_not_sent(lease: BrokenLease) -> None:
    primary = replicator(lease)
    link_id, _ = primary.last_position

    primary.handle_acknowledgement(link_id, 2**63 - 1)
    primary.send(RecordSource.SHARD, 4, b"entry")

    assert primary.unacknowledged == 1


def test_a_primary_that_finds_another_tenure_ends(lease: BrokenLease) -> None:
    primary = replicator(lease)
    sent = primary.send(RecordSource.SHARD, 4, b"entry")
    lease.primary_record = PrimaryRecord(2, "s:1")

    with pytest.raises(DeposedError, match="s:1, in term 2"):
        primary.handle_disconnect(sent[0])
    with pytest.raises(DeposedError):
        primary.wait_for_standby(sent)


def test_a_primary_ends_normally_after_a_handover_however_it_learns_of_the_swap(
    lease: BrokenLease,
) -> None:
    """The standby's swap may be visible before the answer to its request arrives."""
    primary = replicator(lease)
    line, _ = primary.last_position
    primary.step_down("s", 1.0)
    lease.primary_record = PrimaryRecord(2, "s:1")

    with pytest.raises(DeposedError) as ended:
        primary.handle_disconnect(line)

    assert not str(ended.value)


def test_a_primary_reports_nothing_after_a_handover_however_the_connection_ends() -> None:
    """The standby disconnects shortly before the process ends: later records are not in the state
    of the new primary, and shard 0 must not receive them.
    """
    primary = replicator(None)
    log, (line, _) = ShardLog(line=primary), primary.last_position
    primary.step_down("s", 1.0)

    primary.handle_disconnect(line)

    assert not log.is_idle
    sent = primary.send(RecordSource.SHARD, 4, b"entry")
    assert not primary._machine.can_reply(*sent)
    assert not primary._machine.can_reply(*primary.last_position)


def test_a_handover_begins_without_a_standby() -> None:
    """The records of another connection would start again at one."""
    primary = replicator(None)
    line, _ = primary.last_position
    primary.step_down("s", 1.0)
    primary.handle_disconnect(line)

    with pytest.raises(UnreachableError) as refused:
        primary.attach(S, copy_state)
    assert refused.value.reason == "NOT_PRIMARY"


def test_unrecorded_changes_are_refused_after_a_handover(lease: BrokenLease) -> None:
    """A new partition or a loaded snapshot: the new primary has neither, and shard 0 must not
    receive them, whether or not there are other records.
    """
    primary = replicator(lease)
    line, _ = primary.last_position
    primary.step_down("s", 1.0)

    with ThreadPoolExecutor(1) as pool:
        dropping = pool.submit(primary.reset, "the model has moved")
        with pytest.raises(TimeoutError):
            dropping.result(0.3)
        lease.primary_record = PrimaryRecord(2, "s:1")
        with pytest.raises(DeposedError):
            primary.handle_disconnect(line)

        with pytest.raises(DeposedError) as ended:
            dropping.result(10)
    assert not str(ended.value)


def test_the_first_of_two_concurrent_standbys_stays() -> None:
    """The second one connected before the first had its state, and could copy its own only then."""
    primary = replicator(None)
    primary.reset("begin again")
    with pytest.raises(MismatchError, match="s:1") as refused:
        primary.attach(T, after(lambda: primary.attach(S, copy_state)))
    assert refused.value.reason == "SHARD_TAKEN"
    in_sync(primary, primary.last_position[0])
    assert primary.address == "s:1"


def test_a_standby_that_connects_twice_has_one_connection(lease: BrokenLease) -> None:
    """It disconnected, and its second attempt was faster: queued records belong to the newest
    connection, from the beginning.
    """
    primary = replicator(lease)
    primary.reset("begin again")
    lines: list[int] = []
    lines.append(primary.attach(S, after(lambda: lines.append(primary.attach(S, copy_state)))))

    assert lines[1] == lines[0] + 1
    assert [*primary.replicate(lines[0], lambda: True)] == []
    sent = primary.replicate(lines[1], lambda: True)
    assert [next(sent).number for _ in range(3)] == [1, 2, 0]
    in_sync(primary, lines[1])


def test_a_waiting_standby_gets_nothing_after_a_handover() -> None:
    """Its records would start again at one, with changes that must not be reported."""
    primary = replicator(None)
    primary.reset("begin again")

    def switch() -> None:
        in_sync(primary, primary.attach(S, copy_state))
        primary.step_down("s", 1.0)

    with pytest.raises(UnreachableError) as refused:
        primary.attach(S, after(switch))
    assert refused.value.reason == "NOT_PRIMARY"
    assert not primary._machine.can_reply(*primary.send(RecordSource.SHARD, 4, b"entry"))


@pytest.mark.parametrize("listens", [True, False])
def test_a_primary_ends_after_a_handover_even_if_the_answer_is_lost(
    lease: BrokenLease, listens: bool
) -> None:
    context = Mock(add_callback=Mock(side_effect=lambda action: listens and (action() or True)))

    step_down = primary_handlers(replicator(lease), Mock(), copy_state)[STEP_DOWN]
    with pytest.raises(DeposedError) as ended:
        run(step_down(pb.StepDownRequest(instance="s"), ThreadWaiter(context)))
    assert not str(ended.value)


def test_a_standby_that_is_behind_gets_the_reason() -> None:
    """It was in sync; waiting is the only remedy while the model is resharded."""
    primary = replicator(None)
    primary.reset("the model has moved")

    with pytest.raises(MismatchError, match="the model has moved") as refused:
        primary.step_down("s", 1.0)
    assert refused.value.reason == "NOT_IN_SYNC"


def test_a_lease_directory_that_cannot_be_used_counts_as_lost(lease: BrokenLease) -> None:
    """It is unknown then which server is primary."""
    primary = replicator(lease)
    lease.broken = True

    with pytest.raises(DeposedError, match=r"the failover lock cannot be used.*Stale file handle"):
        primary.handle_disconnect(1)


def test_a_primary_that_an_operator_replaced_ends_at_its_next_check(lease: BrokenLease) -> None:
    machine = replicator(lease)._machine
    lease.primary_record = PrimaryRecord(2, "s:1")

    machine.tick(time.monotonic() + LEASE_CHECK_INTERVAL_SECONDS)
    assert "s:1, in term 2" in machine.deposed_reason
    assert not machine.can_reply(1, 0)


def test_a_silent_standby_is_dropped(lease: BrokenLease) -> None:
    machine = replicator(lease)._machine
    number = machine.append()
    now = time.monotonic()

    machine.tick(now)
    assert not machine.can_reply(1, number)
    machine.tick(now + STANDBY_TIMEOUT_SECONDS + 0.1)
    assert machine.can_reply(1, number)
    assert machine.phase is ReplicationPhase.ALONE


def test_a_standby_that_answers_without_progress_is_dropped(lease: BrokenLease) -> None:
    machine = replicator(lease)._machine
    now = time.monotonic()
    number = machine.append()

    for second in range(int(STALLED_STANDBY_SECONDS) + 2):
        machine.acknowledge(1, number - 1, now + second)
        machine.tick(now + second + 0.5)

    assert machine.phase is ReplicationPhase.ALONE
    assert machine.can_reply(1, number)


def test_an_idle_standby_is_not_dropped(lease: BrokenLease) -> None:
    machine = replicator(lease)._machine
    now = time.monotonic()

    for second in range(2 * int(STALLED_STANDBY_SECONDS)):
        machine.acknowledge(1, machine.last_sent, now + second)
        machine.tick(now + second + 0.5)
    machine.append()
    machine.tick(now + 2 * STALLED_STANDBY_SECONDS + 0.5)

    assert machine.phase is ReplicationPhase.IN_SYNC


def test_a_primary_that_stepped_down_reports_nothing(lease: BrokenLease) -> None:
    machine = replicator(lease)._machine
    before = machine.append()
    assert machine.begin_handover()
    after = machine.append()

    assert not machine.is_handover_complete
    machine.acknowledge(1, after, time.monotonic())

    assert machine.is_handover_complete
    assert machine.can_reply(1, before)
    assert not machine.can_reply(1, after)


def test_another_standby_is_refused(lease: BrokenLease) -> None:
    with pytest.raises(MismatchError, match="s:1") as refused:
        replicator(lease).attach(pb.ReplicateRequest(instance="t", address="t:1"), copy_state)
    assert refused.value.reason == "SHARD_TAKEN"


def test_a_standby_with_a_higher_term_is_refused(lease: BrokenLease) -> None:
    """This primary was suspended and does not know the failover yet."""
    with pytest.raises(UnreachableError, match=r"term is 1.* term 2") as refused:
        replicator(lease).attach(
            pb.ReplicateRequest(instance="t", address="t:1", term=2), copy_state
        )
    assert refused.value.reason == "NOT_PRIMARY"


def test_a_standby_that_loads_a_large_state_delays_no_push(
    lease: BrokenLease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later records wait for memory; the state itself takes none."""
    monkeypatch.setattr(shipper_module, "MAX_QUEUED_BYTES", 100)
    machine = ReplicationMachine(FIRST, lease, time.monotonic())
    primary = PrimaryReplicator(machine, ServerMetrics(CollectorRegistry(), shard=0), deposed)
    state = [StateRecord(RecordSource.LINE, StateRecordKind.NUMBERS, b"x", [bytes(80)])] * 3
    hello = pb.ReplicateRequest(instance="s", address="s:1")
    line = primary.attach(hello, lambda begin: begin(state))

    primary.send(RecordSource.SHARD, 4, bytes(120))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(primary.send, RecordSource.SHARD, 4, b"entry")
        sent = primary.replicate(line, lambda: True)
        shipped = [next(sent) for _ in range(4)]
        assert not waiting.done()
        shipped.append(next(sent))

        assert waiting.result(10) == (line, 5)
    assert [message.number for message in shipped] == [1, 2, 3, 4, 5]
