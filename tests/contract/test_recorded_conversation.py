"""A recorded conversation of an earlier release: each current process works with the recorded
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


def test_coordinator_sends_the_recorded_bytes(
    cluster: Make,
) -> None:
    play_to_shard_0(RECORDED, cluster)


def test_shard_reaches_the_recorded_weights(cluster: Make) -> None:
    play_to_shard_1(RECORDED, cluster)


def test_standby_reaches_the_recorded_weights() -> None:
    play_to_standby(RECORDED)


def test_worker_sends_the_recorded_bytes() -> None:
    play_to_worker(RECORDED)
