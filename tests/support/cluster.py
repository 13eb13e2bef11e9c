"""Real servers for tests: in this process where that will do, as processes where it must be."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from psserver.process.config import ServerConfig
from psserver.server import Server


class Cluster:
    """All shards of a job in this process, on free ports, over real gRPC."""

    def __init__(self, shards: int = 1, **settings: Any) -> None:
        self.servers: list[Server] = []
        try:
            for shard in range(shards):
                self.add(shard, shards, **settings)
        except BaseException:
            self.close()
            raise

    def add(self, shard: int, shards: int, **settings: Any) -> Server:
        """One server more: used for all of them, and for one that comes again."""
        join = self.servers[0].address if shard and self.servers else None
        config = ServerConfig(
            **{"shard": shard, "shards": shards, "bind": "127.0.0.1:0", "join": join, **settings}
        )
        self.servers.append(Server(config))
        self.servers[-1].start()
        return self.servers[-1]

    @property
    def address(self) -> str:
        return self.servers[0].address

    @property
    def addresses(self) -> str:
        return ",".join(server.address for server in self.servers)

    def stop(self) -> None:
        """As ps-ctl stop: with a last snapshot."""
        first = self.servers[0]
        assert first.service is not None
        first.service.stop("the test is over")
        assert first.ended.wait(30)
        self.close()

    def close(self) -> None:
        """As a kill, but without leaving anything open."""
        for server in reversed(self.servers):
            server.close()
        self.servers = []


@pytest.fixture
def cluster() -> Iterator[Callable[..., Cluster]]:
    """Makes clusters; cluster(shards=2, policy="async", ...) takes ServerConfig's settings.
    Closed at the end.
    """
    with ExitStack() as stack:

        def make(shards: int = 1, **settings: Any) -> Cluster:
            made = Cluster(shards, **settings)
            stack.callback(made.close)
            return made

        yield make
