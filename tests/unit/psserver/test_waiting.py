"""Waiting is the same for a thread and for a task of an event loop."""

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import coroutine
from typing import Any, TypeVar

import pytest

from psserver.waiting import TaskWaiter, ThreadWaiter, Waiter, run, until

LONG = 30.0
T = TypeVar("T")


class PlainTaskWaiter(TaskWaiter):
    async def do(
        self, action: Callable[[], T], abandoned: Callable[[T], object] | None = None
    ) -> T:
        return action()


class Variable:
    """A value that another thread sets; `waiting` is set while something is registered."""

    def __init__(self) -> None:
        self.value: str | None = None
        self.reads = 0
        self.waiting = threading.Event()
        self._wakes: list[Callable[[], None]] = []

    def get(self) -> str | None:
        self.reads += 1
        return self.value

    def set(self, value: str | None) -> None:
        self.value = value
        for wake in [*self._wakes]:
            wake()

    @contextmanager
    def watch(self, wake: Callable[[], None]) -> Iterator[None]:
        self._wakes.append(wake)
        self.waiting.set()
        try:
            yield
        finally:
            self._wakes.remove(wake)

    @property
    def has_registrations(self) -> bool:
        return bool(self._wakes)


def in_thread(wait: Callable[[Waiter], Any]) -> Any:
    return run(wait(ThreadWaiter()))


def in_task(wait: Callable[[Waiter], Any]) -> Any:
    async def task() -> Any:
        return await wait(PlainTaskWaiter(asyncio.get_running_loop()))

    return asyncio.run(task())


each_waiter = pytest.mark.parametrize("carry_out", [in_thread, in_task])


@each_waiter
def test_a_result_that_is_there_registers_nothing(carry_out: Any) -> None:
    variable = Variable()
    variable.set("here")

    assert carry_out(lambda waiter: until(variable.get, variable.watch, LONG, waiter)) == "here"
    assert not variable.waiting.is_set()


@each_waiter
def test_changes_of_another_thread_end_the_wait(carry_out: Any) -> None:
    variable = Variable()

    def change() -> None:
        variable.waiting.wait(LONG)
        for value in (None, None, "here"):
            variable.set(value)

    thread = threading.Thread(target=change)
    thread.start()

    assert carry_out(lambda waiter: until(variable.get, variable.watch, LONG, waiter)) == "here"
    thread.join()
    assert not variable.has_registrations


@each_waiter
def test_a_change_between_the_check_and_the_wait_is_not_lost(carry_out: Any) -> None:
    variable = Variable()

    def get() -> str | None:
        found = variable.get()
        if variable.reads == 2:
            variable.set("here")
        return found

    assert carry_out(lambda waiter: until(get, variable.watch, LONG, waiter)) == "here"


@each_waiter
def test_the_wait_ends_with_its_time(carry_out: Any) -> None:
    variable, began = Variable(), time.monotonic()

    assert carry_out(lambda waiter: until(variable.get, variable.watch, 0.05, waiter)) is None
    assert 0.05 <= time.monotonic() - began < LONG
    assert not variable.has_registrations


@each_waiter
def test_it_checks_again_after_each_interval(carry_out: Any) -> None:
    variable = Variable()

    def get() -> str | None:
        return "here" if variable.get() or variable.reads == 5 else None

    found = carry_out(lambda waiter: until(get, variable.watch, LONG, waiter, interval=0.01))

    assert found == "here"


@each_waiter
def test_an_error_ends_the_wait_and_its_registration(carry_out: Any) -> None:
    variable = Variable()

    def fail() -> str | None:
        if variable.waiting.is_set():
            raise KeyError("a problem")
        return None

    with pytest.raises(KeyError, match="a problem"):
        carry_out(lambda waiter: until(fail, variable.watch, LONG, waiter))
    assert not variable.has_registrations


class Call:
    """A gRPC call that may end."""

    def __init__(self) -> None:
        self._end: Callable[[], None] = lambda: None
        self._has_ended = False

    def add_callback(self, action: Callable[[], None]) -> None:
        self._end = action

    def is_active(self) -> bool:
        return not self._has_ended

    def end(self) -> None:
        self._has_ended = True
        self._end()


def test_the_end_of_a_call_ends_its_wait() -> None:
    variable, call = Variable(), Call()
    waiter = ThreadWaiter(call)  # type: ignore[arg-type]
    found = list[Any]()
    thread = threading.Thread(
        target=lambda: found.append(run(until(variable.get, variable.watch, LONG, waiter)))
    )
    thread.start()
    variable.waiting.wait(LONG)
    call.end()
    thread.join(LONG)

    assert found == [None]
    assert not variable.has_registrations


def test_a_coroutine_that_suspends_is_not_for_a_thread() -> None:
    @coroutine
    def suspends() -> Generator[None, None, None]:
        yield

    async def wait() -> None:
        await suspends()

    with pytest.raises(RuntimeError, match="not that of a thread"):
        run(wait())
