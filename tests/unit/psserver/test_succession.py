"""What shard 0 does when another process becomes primary of a shard."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pscommon.core.errors import MismatchError, TakenError
from psserver.coordinator.service import CoordinatorService
from psserver.core.commands.recorder import Recorder
from psserver.core.coordinator.catch_up import CatchUp
from psserver.core.shard.state_machine import NO_LOG
from psworker.simulation import simulated


@pytest.fixture
def hub() -> CoordinatorService:
    """Of two shards."""
    return simulated(2, 1, "async", None).service


def test_a_higher_term_takes_the_place_of_one_that_is_connected(hub: CoordinatorService) -> None:
    old, before = hub.registry[1], hub.registry[1].connection

    server, line = hub.shard_connections.connect(1, 2, "new:1", "new", term=2)

    assert (server.address, server.term, hub.registry.terms) == ("new:1", 2, [1, 2])
    hub.shard_connections.disconnect(old, before)
    assert server.connected
    assert line == server.connection


def test_a_lower_term_is_told_that_it_is_deposed(hub: CoordinatorService) -> None:
    hub.shard_connections.connect(1, 2, "new:1", "new", term=2)

    with pytest.raises(TakenError, match="new:1 is primary of shard 1, in term 2") as refused:
        hub.shard_connections.connect(1, 2, "old:1", "old", term=1)
    assert refused.value.reason == "DEPOSED"


def test_the_same_term_is_taken(hub: CoordinatorService) -> None:
    with pytest.raises(MismatchError, match="already served"):
        hub.shard_connections.connect(1, 2, "other:1", "other", term=1)


def test_what_the_old_one_still_says_is_void(hub: CoordinatorService) -> None:
    old = hub.registry[1].connection
    hub.shard_connections.connect(1, 2, "new:1", "new", term=2)
    report = hub.engine.make_report()

    hub.shard_connections.report(report.__class__(1, report.epoch, 0, ()), hub.registry[1], old)
    assert not hub.registry[1].ready

    hub.shard_connections.report(
        report.__class__(1, NO_LOG, 0, ()), hub.registry[1], hub.registry[1].connection
    )
    assert hub.registry[1].catch_up is not None


def test_what_the_old_one_was_saying_when_the_new_one_came_is_void(
    hub: CoordinatorService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was heard, and found to be right, a moment before: the entries that it has no need of
    any more, say.
    """
    old, before, step = hub.registry[1], hub.registry[1].connection, hub._executor.step
    heard: list[int] = []
    monkeypatch.setattr(
        Recorder, "report", lambda recorder, report, now: heard.append(report.shard)
    )
    report = hub.engine.make_report()

    def say() -> None:
        hub.registry[1].ready = True
        hub.shard_connections.report(replace(report, shard=1), old, hub.registry[1].connection)

    say()
    assert heard == [1]

    def late(action: Callable[[Recorder, float], Any], quiet: bool = False) -> Any:
        monkeypatch.setattr(hub._executor, "step", step)
        hub.shard_connections.connect(1, 2, "new:1", "new", term=2)
        return step(action, quiet)

    monkeypatch.setattr(hub._executor, "step", late)
    say()

    assert hub.registry[1].connection == before + 1
    assert heard == [1]


def test_what_the_old_one_was_told_to_load_says_nothing_of_the_new_one(
    hub: CoordinatorService,
) -> None:
    """That one is still to read its log; asked no more whether it has, it would take all others
    back to a snapshot.
    """
    server, old = hub.shard_connections.connect(1, 2, "old:1", "old", term=2)
    server, line = hub.shard_connections.connect(1, 2, "new:1", "new", term=3)
    server.catch_up = CatchUp.RECOVER

    hub.shard_connections.finish_catch_up(server, old, 7, "")
    assert server.catch_up is CatchUp.RECOVER

    hub.shard_connections.finish_catch_up(server, line, 7, "")
    assert server.catch_up is None


def test_a_snapshot_that_waits_for_the_old_one_is_given_up(hub: CoordinatorService) -> None:
    """It would be waited for for ever, and there would never be another one."""
    with hub.paused():
        coordinator = hub._coordinator
        coordinator.cuts.begin(0, 0, 0.0, {})

    hub.shard_connections.connect(1, 2, "new:1", "new", term=2)

    assert not coordinator.cuts.busy
