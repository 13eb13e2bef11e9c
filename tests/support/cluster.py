"""Real servers in the process of the test."""

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
        """Start one server, also one that restarts."""
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
        """Stop as ps-ctl does, with a last snapshot."""
        first = self.servers[0]
        assert first.service is not None
        first.service.stop("the test is over")
        assert first.ended.wait(30)
        self.close()

    def close(self) -> None:
        """Close servers as a kill would, without open files."""
        for server in reversed(self.servers):
            server.close()
        self.servers = []


@pytest.fixture
def cluster() -> Iterator[Callable[..., Cluster]]:
    """Yield a function that starts clusters: cluster(shards=2, policy="async", ...), closed at the
    end.
    """
    with ExitStack() as stack:

        def make(shards: int = 1, **settings: Any) -> Cluster:
            made = Cluster(shards, **settings)
            stack.callback(made.close)
            return made

        yield make
