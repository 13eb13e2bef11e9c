"""The job's seed: that of the first worker that registers, also after a restart."""

import json
from typing import Any

import pytest

from pscommon.core.log_entries import PushKey, ShardReport, Staged
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from psserver.core.commands.recorder import Recorder, replay
from psserver.core.commands.worker_commands import Join, Leave, Register
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules
from tests.support.memory_journal import MemoryJournal
from tests.support.shard_reports import report_to

MODEL = ModelSpec((TensorSpec("w", (1,), "float32"),), OptimizerSettings("sgd", ({"lr": 0.1},)))
LARGEST = 2**64 - 1


def machine() -> CoordinatorMachine:
    return CoordinatorMachine(1, JobRules(policy("sync"), 1), 0, log_id=5)


class Registered:
    """A job of one shard whose first worker has the seed LARGEST, and a second worker another."""

    def __init__(self, *seeds: int) -> None:
        self.journal = MemoryJournal()
        self.recorder = Recorder(machine(), self.journal)
        for seed in seeds:
            worker = self.recorder.do(Join(None, "h", 1, "cpu"), 0.0).worker
            if self.recorder.do(Register(worker, MODEL, seed), 0.0) == "upload":
                report = ShardReport(0, 5, 0, (Staged(PushKey(worker, 0), 1, 0),))
                report_to(self.recorder, report, 0.0)
                self.recorder.do(Register(worker, MODEL, seed), 0.0)

    @property
    def coordinator(self) -> CoordinatorMachine:
        return self.recorder.coordinator


def stored(state: Any) -> Any:
    return json.loads(json.dumps(state))


def test_the_first_worker_that_registers_decides() -> None:
    job = Registered(LARGEST, 3)

    assert job.coordinator.job.seed == LARGEST


def test_the_next_worker_decides_if_the_first_one_leaves_without_weights() -> None:
    job = Registered()
    one, other = (job.recorder.do(Join(None, "h", 1, "cpu"), 0.0).worker for _ in range(2))
    job.recorder.do(Register(one, MODEL, 3), 0.0)
    assert job.recorder.do(Register(other, MODEL, 4), 0.0) == "pending"
    job.recorder.do(Leave(one, "lost"), 0.0)
    job.recorder.do(Register(other, MODEL, 4), 0.0)

    assert job.coordinator.job.seed == 4


def test_a_restart_a_snapshot_and_a_standby_keep_it() -> None:
    job = Registered(LARGEST, 3)
    replayed, promoted, restored = machine(), machine(), machine()

    replay(replayed, job.journal.commands, lambda *_: pytest.fail("not replayed"))
    promoted.load_state(stored(job.coordinator.complete_state()), MODEL, 0.0)
    restored.restore(stored(job.coordinator.job.as_json()), MODEL, 0.0)

    for again in (replayed, promoted, restored):
        assert again.job.seed == LARGEST
        worker = again.membership.join(0.0, None, "h", 1, "cpu").worker
        again.registration.register(worker, MODEL, 0.0, 8)
        assert again.job.seed == LARGEST


def test_a_state_of_an_earlier_release_has_the_seed_0() -> None:
    """There it was the default of job.batches."""
    state = stored(Registered(0).coordinator.job.as_json())
    assert "seed" not in state
    again = machine()
    again.restore(state, MODEL, 0.0)
    again.registration.register(
        again.membership.join(0.0, None, "h", 1, "cpu").worker, MODEL, 0.0, 8
    )

    assert again.job.seed == 0
