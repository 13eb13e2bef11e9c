"""Servers with the flags of ps-server."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from pscommon.settings import options
from psserver.process.config import ServerConfig
from psserver.server import Server

Serve = Callable[..., Server]


def configured(*flags: object) -> ServerConfig:
    """Return the configuration of ps-server with these flags."""
    line = ["--bind", "127.0.0.1:0", *map(str, flags)]
    with options.command("server", "ps-server").make_context("ps-server", line) as ctx:
        return ServerConfig.from_settings(ctx.params)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Return a function that starts a server with flags; servers close in reverse order."""
    for option in options.SERVER:
        monkeypatch.delenv(option.variables[0], raising=False)
    with ExitStack() as stack:

        def start(*flags: object) -> Server:
            server = Server(configured(*flags))
            stack.callback(server.close)
            server.start()
            return server

        yield start
