"""What came of a request is carried out, however the request ended."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pscommon.core.errors import FencedError, PSError
from psserver.coordinator.executor import CommandExecutor
from psserver.core.commands.recorder import Recorder


class Following:
    """In place of the engine: notes what it is given. fails: it cannot carry anything out."""

    def __init__(self) -> None:
        self.entries: list[object] = []
        self.fails = False

    def deliver(self, epoch: int, entries: list[object]) -> None:
        if self.fails:
            raise MemoryError("no room")
        self.entries += entries


class Log(SimpleNamespace):
    """In place of the coordinator: a log and nothing else."""

    def __init__(self) -> None:
        super().__init__(log=SimpleNamespace(index=0), entries=[], epoch=7, failure=None)

    def append(self, entry: object) -> None:
        self.entries.append(entry)
        self.log.index += 1

    def entries_after(self, index: int) -> list[object]:
        return self.entries[index:]


@pytest.fixture
def following() -> Following:
    return Following()


@pytest.fixture
def broken() -> list[Exception]:
    return []


@pytest.fixture
def failed() -> list[PSError]:
    return []


@pytest.fixture
def desk(following: Following, failed: list[PSError], broken: list[Exception]) -> CommandExecutor:
    recorder = cast(Recorder, SimpleNamespace(coordinator=Log()))
    return CommandExecutor(
        recorder, cast(Any, following), lambda: "", lambda: False, failed.append, broken.append
    )


def appending(entry: object, error: Exception | None = None) -> Callable[[Recorder, float], str]:
    def action(recorder: Recorder, now: float) -> str:
        cast(Any, recorder.coordinator).append(entry)
        if error is not None:
            raise error
        return "done"

    return action


def test_a_refused_request_may_have_moved_the_log(
    desk: CommandExecutor, following: Following
) -> None:
    """A snapshot was due, say, or the one who asks has left in the course of it."""
    with pytest.raises(FencedError):
        desk.step(appending("first", FencedError("out")))
    desk.step(appending("second"))

    assert following.entries == ["first", "second"]


def test_why_the_job_has_to_end_is_told_also_where_the_request_is_refused(
    desk: CommandExecutor, failed: list[PSError]
) -> None:
    cast(Any, desk.coordinator).failure = why = PSError("abort")

    with pytest.raises(FencedError):
        desk.step(appending("entry", FencedError("out")))

    assert failed == [why]


def test_a_shard_that_cannot_follow_ends_its_process(
    desk: CommandExecutor, following: Following, broken: list[Exception]
) -> None:
    following.fails = True

    with pytest.raises(MemoryError):
        desk.step(appending("entry"))

    assert [str(bug) for bug in broken] == ["no room"]


def test_a_request_that_ran_out_of_memory_ends_the_server_and_tells_nobody(
    desk: CommandExecutor, following: Following, broken: list[Exception]
) -> None:
    """It is not written down, so a restart does not know of it."""
    with pytest.raises(MemoryError):
        desk.step(appending("half done", MemoryError("no room")))

    assert [type(error) for error in broken] == [MemoryError]
    assert following.entries == []


def test_an_unexpected_error_is_told_and_what_was_decided_is_carried_out(
    desk: CommandExecutor, following: Following, broken: list[Exception]
) -> None:
    """A restart and a standby do the same."""
    with pytest.raises(ZeroDivisionError):
        desk.step(appending("decided", ZeroDivisionError("planted")))

    assert following.entries == ["decided"]
    assert broken == []
