"""A recorded conversation of an earlier release: each process of today fits among the recorded
others.

tests/fixtures/wire/README.md describes the recording.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from psserver.process.config import ServerConfig
from psserver.replication.standby import Standby
from tests.e2e.conftest import Cluster
from tests.e2e.workers import until
from tests.wire.conversation import (
    FIXTURE,
    PLACEHOLDERS,
    SHARD_0,
    SHARD_1,
    STANDBY,
    WORKER,
    Conversation,
)
from tests.wire.parties import SETTINGS, numbers_of, read_only, work
from tests.wire.player import WAIT_SECONDS, Player

Make = Callable[..., Cluster]

RECORDED = Conversation.load(FIXTURE)


def test_a_new_coordinator_answers_recorded_workers_shards_and_standbys_with_the_same_bytes(
    cluster: Make,
) -> None:
    """Shard 0 is real. The answers hold all weights that workers pulled, and the records for the
    standby.
    """
    with Player(RECORDED, SHARD_0) as player:
        server = cluster(0).add(0, 2, **SETTINGS)
        player.know(SHARD_0, server.address)
        player.play()

        assert numbers_of(server.engine.store) == RECORDED.numbers


def test_a_new_shard_follows_a_recorded_coordinator_to_the_same_weights(cluster: Make) -> None:
    with Player(RECORDED, SHARD_1) as player:
        address = {"advertise": PLACEHOLDERS[SHARD_1], "join": player.serve(SHARD_0)}
        server = cluster(0).add(1, 2, **SETTINGS, **address)
        player.know(SHARD_1, server.address)
        player.play()


def test_a_new_standby_follows_a_recorded_primary_to_the_same_weights() -> None:
    with Player(RECORDED, STANDBY) as player:
        settings: dict[str, Any] = {
            **SETTINGS,
            "bind": "127.0.0.1:0",
            "standby_of": player.serve(SHARD_0),
        }
        standby = Standby(ServerConfig(shards=2, **settings), None)
        player.know(STANDBY, standby.advertised)
        thread = threading.Thread(target=standby.run)
        thread.start()
        try:
            player.play()
            assert standby._mirror is not None
            until(lambda: standby.version == 3, "the last update")
            assert numbers_of(standby._mirror.replica.numbers) == RECORDED.numbers
        finally:
            standby.stop("the test is over")
            thread.join()


def test_a_new_worker_sends_recorded_servers_the_same_bytes() -> None:
    with Player(RECORDED, WORKER) as player, ThreadPoolExecutor(1) as pool:
        player.serve(SHARD_1)
        working = pool.submit(work, player.serve(SHARD_0), player.wait_for)
        player.play()

        assert read_only(working.result(WAIT_SECONDS)) == RECORDED.weights
