"""Plays a conversation to one real process of the current code."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from psserver.process.config import ServerConfig
from psserver.replication.standby import Standby
from tests.contract.wire.conversation import (
    PLACEHOLDERS,
    SHARD_0,
    SHARD_1,
    STANDBY,
    WORKER,
    Conversation,
)
from tests.contract.wire.parties import SETTINGS, numbers_of, read_only, work
from tests.contract.wire.player import WAIT_SECONDS, Player
from tests.support.cluster import Cluster
from tests.support.workers import until

Make = Callable[..., Cluster]


def play_to_shard_0(conversation: Conversation, cluster: Make) -> None:
    """Play to shard 0; its answers contain all pulled weights and the standby's records."""
    with Player(conversation, SHARD_0) as player:
        server = cluster(0).add(0, 2, **SETTINGS)
        player.set_address(SHARD_0, server.address)
        player.play()

        assert numbers_of(server.engine.live.store) == conversation.numbers


def play_to_shard_1(conversation: Conversation, cluster: Make) -> None:
    """Play to shard 1; its answers contain all weights that workers pulled from it."""
    with Player(conversation, SHARD_1) as player:
        address = {"advertise": PLACEHOLDERS[SHARD_1], "join": player.serve(SHARD_0)}
        server = cluster(0).add(1, 2, **SETTINGS, **address)
        player.set_address(SHARD_1, server.address)
        player.play()


def play_to_standby(conversation: Conversation) -> None:
    with Player(conversation, STANDBY) as player, real_standby(player) as standby:
        player.play()
        assert standby._standby_state is not None
        until(lambda: standby.version == 3, "the last update")

        assert numbers_of(standby._standby_state.shard_state.loaded_store) == conversation.numbers


@contextmanager
def real_standby(player: Player) -> Iterator[Standby]:
    """Start a standby of the played shard 0."""
    settings: dict[str, Any] = {
        **SETTINGS,
        "bind": "127.0.0.1:0",
        "standby_of": player.serve(SHARD_0),
    }
    standby = Standby(ServerConfig(shards=2, **settings), None)
    player.set_address(STANDBY, standby.advertised)
    thread = threading.Thread(target=standby.run)
    thread.start()
    try:
        yield standby
    finally:
        standby.stop("the test is over")
        thread.join()


def play_to_worker(conversation: Conversation) -> None:
    with Player(conversation, WORKER) as player, ThreadPoolExecutor(1) as pool:
        player.serve(SHARD_1)
        working = pool.submit(work, player.serve(SHARD_0), player.wait_for)
        player.play()

        assert read_only(working.result(WAIT_SECONDS)) == conversation.weights
