"""Shard 0 when another process becomes primary of a shard."""

from dataclasses import replace
from threading import Thread
from typing import Any

import pytest

from pscommon.core.errors import MismatchError, TakenError
from psserver.coordinator.service import CoordinatorService
from psserver.core.job.entry_log import EntryLog
from psserver.core.job.trainings import Trainings
from psserver.core.servers.catch_up import CatchUp
from psserver.core.shard.state_machine import NO_LOG
from psworker.simulation import simulated


@pytest.fixture
def service() -> CoordinatorService:
    """The coordinator service of two shards."""
    return simulated(2, 1, "async", None).service


def test_a_higher_term_replaces_a_connected_primary(service: CoordinatorService) -> None:
    old, before = service.directory[1], service.directory[1].connection

    server, line = service.shard_connections.connect(1, 2, "new:1", "new", term=2)

    assert (server.address, server.term, service.directory.terms) == ("new:1", 2, [1, 2])
    service.shard_connections.disconnect(old, before)
    assert server.connected
    assert line == server.connection


def test_a_primary_with_a_lower_term_learns_that_it_is_deposed(service: CoordinatorService) -> None:
    service.shard_connections.connect(1, 2, "new:1", "new", term=2)

    with pytest.raises(TakenError, match=r"shard 1: new:1 .* term 2") as refused:
        service.shard_connections.connect(1, 2, "old:1", "old", term=1)
    assert refused.value.reason == "DEPOSED"


def test_the_same_term_is_accepted(service: CoordinatorService) -> None:
    with pytest.raises(MismatchError, match="already served"):
        service.shard_connections.connect(1, 2, "other:1", "other", term=1)


def test_later_reports_of_the_former_primary_are_void(service: CoordinatorService) -> None:
    old = service.directory[1].connection
    service.shard_connections.connect(1, 2, "new:1", "new", term=2)
    report = service.engine.make_report()

    service.shard_connections.report(
        report.__class__(1, report.log_id, 0, ()), service.directory[1], old
    )
    assert not service.directory[1].ready

    service.shard_connections.report(
        report.__class__(1, NO_LOG, 0, ()), service.directory[1], service.directory[1].connection
    )
    assert service.directory[1].catch_up is not None


def test_a_report_of_the_former_primary_during_the_change_is_void(
    service: CoordinatorService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was received and valid a moment before, for example about entries that it has applied."""
    old, before, step = service.directory[1], service.directory[1].connection, service.executor.step
    received: list[int] = []
    monkeypatch.setattr(EntryLog, "reached", lambda log, shard, index: received.append(shard))
    report = service.engine.make_report()

    def say() -> None:
        service.directory[1].ready = True
        service.shard_connections.report(
            replace(report, shard=1), old, service.directory[1].connection
        )

    say()
    assert received == [1]

    def late(quiet: bool = False) -> Any:
        monkeypatch.setattr(service.executor, "step", step)
        service.shard_connections.connect(1, 2, "new:1", "new", term=2)
        return step(quiet)

    monkeypatch.setattr(service.executor, "step", late)
    say()

    assert service.directory[1].connection == before + 1
    assert received == [1]


def test_loading_by_the_former_primary_does_not_apply_to_the_new_one(
    service: CoordinatorService,
) -> None:
    """The new one still reads its log; without asking it again, all others would roll back."""
    server, old = service.shard_connections.connect(1, 2, "old:1", "old", term=2)
    server, line = service.shard_connections.connect(1, 2, "new:1", "new", term=3)
    server.catch_up = CatchUp.RECOVER

    service.shard_connections.finish_catch_up(server, old, 7, "")
    assert server.catch_up is CatchUp.RECOVER

    service.shard_connections.finish_catch_up(server, line, 7, "")
    assert server.catch_up is None


def test_shards_hear_of_a_new_standby_of_shard_0_at_once(service: CoordinatorService) -> None:
    """A shard that was told only once a second would not find it after an early failover."""
    updates = list[None]()
    with service.executor.watch_all(lambda: updates.append(None)):
        with service.history.paused():
            assert not updates  # the standby is attached here, with a copy of the state
        assert updates


def test_a_snapshot_that_waits_for_the_former_primary_is_abandoned(
    service: CoordinatorService,
) -> None:
    """Otherwise it would never end, and no later snapshot would begin."""
    with service.history.paused():
        coordinator = service._coordinator
        coordinator.cuts.begin(0, 0, 0.0, {})

    service.shard_connections.connect(1, 2, "new:1", "new", term=2)

    assert not coordinator.cuts.busy


def test_a_report_on_the_old_log_does_not_count_for_a_log_that_begins_meanwhile(
    service: CoordinatorService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the shard would miss entries: they would be sent before it follows the new log."""
    history, server = service.history, service.directory[1]
    server.ready, server.catch_up = True, CatchUp.FOLLOW
    report = replace(service.engine.make_report(), shard=1)
    begin_segment = history.journal.begin_segment
    reporting = Thread(
        target=service.shard_connections.report, args=(report, server, server.connection)
    )

    def begin_and_report(*record: Any) -> None:
        reporting.start()
        reporting.join(0.3)
        begin_segment(*record)

    monkeypatch.setattr(history.journal, "begin_segment", begin_and_report)
    history.begin(Trainings())
    reporting.join()

    assert report.log_id != service._coordinator.job.log_id
    assert (server.ready, server.catch_up) == (False, CatchUp.BEGIN)
