"""A shard measures the pushes of a clipped update and keeps its answer."""

import json

import pytest

from pscommon.core.log_entries import (
    Apply,
    Contribution,
    Measure,
    Measured,
    PushKey,
    Reshard,
    Staged,
)
from psserver.core.shard.state_machine import LogInvariantError, ShardMachine


def part(worker: int, seq: int = 1, scale: float = 1.0) -> Contribution:
    return Contribution(PushKey(worker, seq), 8, 0, scale)


def shard_with(*keys: PushKey) -> ShardMachine:
    shard = ShardMachine(0)
    shard.restore(1, 0, 0)
    for key in keys:
        shard.offer(Staged(key, 8, 0))
    return shard


def test_a_shard_keeps_its_answer_until_the_pushes_count() -> None:
    shard = shard_with(PushKey(1, 1))
    shard.done(Measure(1, (part(1),)), 2.5)
    assert shard.report().measured == Measured(1, 2.5)
    assert list(shard.staged) == [PushKey(1, 1)]

    again = ShardMachine(0)
    again.recover(json.loads(json.dumps(shard.state())))
    assert again.measured == Measured(1, 2.5)
    shard.done(Apply(2, 1, (part(1),)))
    assert shard.report().measured is None
    assert "measured" not in shard.state()


def test_a_reshard_voids_a_shards_answer() -> None:
    shard = shard_with(PushKey(1, 1))
    shard.done(Measure(1, (part(1),)), 2.5)
    shard.done(Reshard(2, 0, 3))

    assert shard.report().measured is None


def test_a_shard_measures_only_pushes_that_it_holds() -> None:
    with pytest.raises(LogInvariantError, match="cannot apply Measure"):
        shard_with().done(Measure(1, (part(1),)), 2.5)
