"""Functions of this repository on the call stacks of requests, and those in ARCHITECTURE.md."""

import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import pytest

from pscommon.wire.frames import ExchangeStub
from pscommon.wire.requests import AnyRequest, Stub
from psworker.transport import executor, grpc_exchanges
from psworker.transport.socket_connection import SocketConnection
from tests.support.sources import ROOT

PACKAGES = ("psworker", "pscommon")


class Call(NamedTuple):
    """A function on the call stack. function: Its qualified name."""

    module: str
    function: str


Path = tuple[Call, ...]
"""From the script's call to the stub or the stream."""


class RequestPaths:
    """The paths of all requests, by name of the RPC."""

    def __init__(self) -> None:
        self.found: dict[str, list[Path]] = {}

    def add(self, rpc: str) -> None:
        self.found.setdefault(rpc, []).append(current_path())


class SubmittedFuture(Future[Any]):
    """A future that knows the path of the call that submitted its work."""

    def __init__(self) -> None:
        super().__init__()
        self.path = current_path()


def current_path() -> Path:
    """Return the path to the caller; across threads, from the call that handed over the work."""
    calls: list[Call] = []
    before = getattr(threading.current_thread(), "path", ())
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in PACKAGES:
            calls.append(Call(module, frame.f_code.co_qualname))
        if frame.f_code is executor._work.__code__:
            before = frame.f_locals["future"].path
        frame = frame.f_back
    return (*before, *reversed(calls))


@contextmanager
def recorded_paths(monkeypatch: pytest.MonkeyPatch) -> Iterator[RequestPaths]:
    """Record the paths of all requests of clients that are created in this context."""
    paths, start = RequestPaths(), threading.Thread.start

    def start_with_path(thread: threading.Thread) -> None:
        thread.path = current_path()  # type: ignore[attr-defined]
        start(thread)

    def exchange_stub(channel: Any) -> Any:
        exchanges: Any = ExchangeStub(channel)
        for name in ("once", "ask", "stream"):
            setattr(exchanges, name, Recorded(getattr(exchanges, name), paths, "Exchange"))
        return exchanges

    def request_stub(channel: Any, row: AnyRequest) -> Any:
        return Recorded(Stub(channel, row), paths, row.name)

    def recorded(method: Any) -> Any:
        def call(*args: Any) -> Any:
            paths.add("Exchange")
            return method(*args)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_with_path)
        patch.setattr(executor, "Future", SubmittedFuture)
        patch.setattr(grpc_exchanges, "ExchangeStub", exchange_stub)
        patch.setattr(grpc_exchanges, "Stub", request_stub)
        patch.setattr(SocketConnection, "_push", recorded(SocketConnection._push))
        patch.setattr(SocketConnection, "_push_open", recorded(SocketConnection._push_open))
        yield paths


@contextmanager
def recorded_calls(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, packages: tuple[str, ...]
) -> Iterator[list[Path]]:
    """Record the path of each call of a method, without lambdas; packages: whose functions."""
    paths: list[Path] = []
    method = getattr(owner, name)

    def recorded(*args: Any, **options: Any) -> Any:
        calls = [call for call in _stack(packages) if not call.function.endswith("<lambda>")]
        last = Call(method.__module__, method.__qualname__)
        paths.append((*(call for call in calls if "<locals>" not in call.function), last))
        return method(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, recorded)
        yield paths


def _stack(packages: tuple[str, ...]) -> Path:
    """Return the functions of these packages on this thread's stack, outermost first."""
    calls: list[Call] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in packages:
            calls.append(Call(module, frame.f_code.co_qualname))
        frame = frame.f_back
    return tuple(reversed(calls))


class Recorded:
    """A stub that records the path of each of its calls."""

    def __init__(self, stub: Any, paths: RequestPaths, rpc: str) -> None:
        self._stub, self._paths, self._rpc = stub, paths, rpc

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._paths.add(self._rpc)
        return self._stub(*args, **options)

    def future(self, *args: Any, **options: Any) -> Any:
        self._paths.add(self._rpc)
        return self._stub.future(*args, **options)


def documented_path(title: str, where: str) -> Path:
    """Return a path from the table of a section of ARCHITECTURE.md.

    A name that begins with a dot is a method of the class before it.
    """
    text = (ROOT / "ARCHITECTURE.md").read_text().partition(f"\n## {title}\n")[2]
    section = text.partition("\n## ")[0]
    calls = []
    row = rf"^\| {where} \| `([^`]+)\.py` \| (.*) \|$"
    for file, functions in re.findall(row, section, re.MULTILINE):
        module, owner = file.removeprefix("common/").replace("/", "."), ""
        for name in re.findall(r"`([^`]+)`", functions):
            function = owner + name if name.startswith(".") else name
            owner = function.rpartition(".")[0]
            calls.append(Call(module, function))
    return tuple(calls)
