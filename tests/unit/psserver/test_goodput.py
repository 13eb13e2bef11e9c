"""Goodput on written histories: which samples count, and which time is lost."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pscommon.core.log_entries import Apply, Contribution, PushKey, Reject, Staged
from psserver.durability.shard_state import ShardState
from psserver.shard.goodput import Goodput


class Scene:
    """A goodput with a clock that the test sets, and pushes that are staged."""

    def __init__(self, shard: int = 0) -> None:
        self.shard = shard
        self.now, self.version = 0.0, 0
        self.staged: dict[PushKey, Staged] = {}
        self.goodput = Goodput(lambda: self.now)
        self.install(0)

    def install(self, version: int) -> None:
        machine = SimpleNamespace(staged=self.staged, version=version)
        state = SimpleNamespace(machine=machine, shard=self.shard)
        self.goodput.on_install(cast(ShardState, state))
        self.version = version

    def stage(self, worker: int, seq: int, samples: int = 8) -> PushKey:
        key = PushKey(worker, seq)
        self.staged[key] = Staged(key, samples, self.version, ())
        return key

    def update(self, *samples: int, at: float) -> None:
        self.now, self.version = at, self.version + 1
        parts = tuple(
            Contribution(PushKey(worker, self.version), count, self.version - 1)
            for worker, count in enumerate(samples)
        )
        self.goodput.on_update(Apply(self.version, self.version, parts), [], at, 0.0)

    def reject(self, key: PushKey) -> None:
        self.goodput.on_reject(Reject(1, key, "STALE", ""))
        del self.staged[key]


def test_nothing_is_known_before_the_first_updates() -> None:
    scene = Scene()
    assert scene.goodput.shares() == {"samples": None, "seconds": None}

    scene.update(8, at=1.0)

    assert scene.goodput.shares() == {"samples": 1.0, "seconds": None}


def test_only_shard_0_counts() -> None:
    scene = Scene(shard=1)
    for second in range(3):
        scene.update(8, at=float(second))
    scene.reject(scene.stage(1, 9))

    assert scene.goodput.shares() == {"samples": None, "seconds": None}


def test_refused_pushes_and_those_of_departed_workers_are_wasted() -> None:
    scene = Scene()
    scene.update(8, 8, at=1.0)
    scene.reject(scene.stage(1, 2))
    scene.reject(scene.stage(2, 0))  # initial weights
    scene.stage(1, 3, samples=24)
    scene.stage(2, 3)

    scene.goodput.on_evict(1)

    assert scene.goodput.samples == 16 / (16 + 8 + 24)


def test_a_rollback_wastes_the_updates_after_the_snapshot() -> None:
    scene = Scene()
    for number in range(1, 11):
        scene.update(number, at=float(number))

    scene.install(7)
    scene.update(8, at=20.0)

    assert scene.goodput.samples == pytest.approx((28 + 8) / (55 + 8))


def test_time_beyond_the_usual_interval_is_lost() -> None:
    scene = Scene()
    for second in range(10):
        scene.update(1, at=100.0 + second)
    scene.update(1, at=119.0)  # nine seconds late
    assert [scene.goodput.seconds for _ in range(3)] == [pytest.approx(1 - 9 / 19)] * 3

    scene.update(1, at=125.0)

    assert scene.goodput.seconds == pytest.approx(1 - 14 / 25)


def test_many_updates_without_a_look_keep_the_memory_small() -> None:
    scene = Scene()
    for number in range(250_000):
        scene.update(1, at=float(number))

    values: Any = vars(scene.goodput)
    assert max(len(each) for each in values.values() if hasattr(each, "maxlen")) <= 100_000
    assert scene.goodput.shares() == {"samples": 1.0, "seconds": 1.0}
