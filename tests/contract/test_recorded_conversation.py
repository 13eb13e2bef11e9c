"""A recorded conversation of an earlier release: each process of today fits among the recorded
others.

tests/fixtures/wire/README.md describes the recording.
"""

from tests.contract.wire.conversation import FIXTURE, Conversation
from tests.contract.wire.play import (
    Make,
    play_to_shard_0,
    play_to_shard_1,
    play_to_standby,
    play_to_worker,
)

RECORDED = Conversation.load(FIXTURE)


def test_a_new_coordinator_answers_recorded_workers_shards_and_standbys_with_the_same_bytes(
    cluster: Make,
) -> None:
    play_to_shard_0(RECORDED, cluster)


def test_a_new_shard_follows_a_recorded_coordinator_to_the_same_weights(cluster: Make) -> None:
    play_to_shard_1(RECORDED, cluster)


def test_a_new_standby_follows_a_recorded_primary_to_the_same_weights() -> None:
    play_to_standby(RECORDED)


def test_a_new_worker_sends_recorded_servers_the_same_bytes() -> None:
    play_to_worker(RECORDED)
