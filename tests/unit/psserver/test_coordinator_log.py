"""The coordinator's log: recovery reads the recorded commands and detects missing ones."""

import errno
from pathlib import Path
from typing import Any

import pytest

from pscommon.core.data_loop import LoopSpec
from pscommon.core.log_entries import BatchKey, PushKey, ShardReport, Staged
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from psserver.core.commands.data_commands import LeaseBatches, ReturnBatches
from psserver.core.commands.recorded import RecordedCommand
from psserver.core.commands.recorder import Recorder, replay
from psserver.core.commands.shard_commands import ProcessReport
from psserver.core.commands.worker_commands import Join, Register
from psserver.core.coordinator.data_requests import BatchesReply
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules
from psserver.durability.best_effort_log import BestEffortLog
from psserver.durability.coordinator_log import CoordinatorLog
from psserver.durability.job_recovery import recover_coordinator
from psserver.durability.shard_state import LogUnfitError
from tests.support.disk_operations import Operations, failing

MODEL = ModelSpec((TensorSpec("w", (1,), "float32"),), OptimizerSettings("sgd", ({"lr": 0.1},)))
RULES = JobRules(policy("sync"), 2)
BASE = {
    "epoch": 5,
    "version": 0,
    "generation": 0,
    "shards": 1,
    "policy": ["sync", None, None, 0],
    "rules": RULES.as_json(),
    "job": "job",
}


def coordinator() -> CoordinatorMachine:
    return CoordinatorMachine(1, RULES, generation=0, log_id=5)


def join(recorder: Recorder, now: float) -> None:
    recorder.do(Join(rank=None, host="host", pid=1, device="cpu", attempt=0), now)


@pytest.fixture
def journal(tmp_path: Path) -> CoordinatorLog:
    journal = CoordinatorLog(BestEffortLog(tmp_path / "log", "no", lambda reason: None))
    journal.begin_segment(0, BASE)
    return journal


def test_commands_are_read_as_they_were_recorded(journal: CoordinatorLog) -> None:
    recorder = Recorder(coordinator(), journal)
    join(recorder, 1.5)
    recorder.do(Register(1, MODEL), 2.0)

    base, *commands = journal.records_since(None)

    assert base == BASE
    assert commands == [
        RecordedCommand(Join(None, "host", 1, "cpu"), 1.5),
        RecordedCommand(Register(1, MODEL), 2.0),
    ]


def test_recovery_leads_to_the_same_state(journal: CoordinatorLog) -> None:
    recorder = Recorder(coordinator(), journal)
    join(recorder, 1.0)
    join(recorder, 2.0)
    journal.begin_segment(0, recorder.coordinator.job.as_json())
    join(recorder, 3.0)

    found = recover_coordinator(journal, None, 0)

    assert found is not None
    assert found[0].job.as_json() == recorder.coordinator.job.as_json()
    assert found[1] == "job"


def test_a_missing_command_is_detected(
    journal: CoordinatorLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command could not be written; the next segment begins with its result."""
    recorder = Recorder(coordinator(), journal)
    join(recorder, 1.0)
    with monkeypatch.context() as patch:
        Operations(1, 1, failing(errno.ENOSPC)).install(patch.setattr)
        join(recorder, 2.0)
    journal.begin_segment(0, recorder.coordinator.job.as_json())

    assert len(list(journal.records_since(None))) == 3  # two states, one command
    with pytest.raises(LogUnfitError, match=r"commands before version 0 are missing: .*roster"):
        recover_coordinator(journal, None, 0)


@pytest.mark.parametrize(
    ("base", "problem"),
    [
        ({**BASE, "log": []}, "a snapshot that does not exist"),
        ({**BASE, "version": 3}, "it begins at version 3, the snapshot is of 0"),
    ],
)
def test_a_log_without_its_beginning_is_refused(
    journal: CoordinatorLog, base: dict[str, Any], problem: str
) -> None:
    """The first case is the log of a standby that took over before the first snapshot."""
    journal.clear()
    journal.begin_segment(0, base)

    with pytest.raises(LogUnfitError, match=problem):
        recover_coordinator(journal, None, 0)


def test_a_log_that_begins_with_a_command_is_refused(journal: CoordinatorLog) -> None:
    recorder = Recorder(coordinator(), journal)
    join(recorder, 1.0)
    journal.records_since = lambda version: iter(
        [RecordedCommand(Join(None, "host", 1, "cpu"), 1.0)]
    )  # type: ignore[method-assign]

    with pytest.raises(LogUnfitError, match="it does not begin with a state"):
        recover_coordinator(journal, None, 0)


def test_a_worker_that_joins_after_recovery_gets_a_new_number() -> None:
    """The log may lack the newest numbers."""
    recorder = Recorder(coordinator())
    join(recorder, 1.0)
    recorder.recovered(2.0, generation=3)
    join(recorder, 3.0)

    assert sorted(recorder.coordinator.membership.members) == [1, 30_001]


def test_repeated_waits_for_data_are_recorded_once(journal: CoordinatorLog) -> None:
    """A worker asks several times a second, perhaps for days; the recovered state is the same."""
    rules = JobRules(policy("async"), 2)
    recorder = Recorder(CoordinatorMachine(1, rules, generation=0, log_id=5), journal)

    def ask(worker: int, count: int = 1) -> BatchesReply | None:
        asked = {
            "worker": worker,
            "spec": LoopSpec(0, 2, 1),
            "received": 0,
            "count": count,
            "idle": True,
        }
        answer: BatchesReply | None = recorder.do(LeaseBatches(**asked), 3.0)
        return answer

    def commands() -> list[RecordedCommand]:
        return [note for note in journal.records_since(None) if isinstance(note, RecordedCommand)]

    def ask_without_result(worker: int, lines: int) -> None:
        before = len(commands())
        assert [ask(worker) for _ in range(9)] == [None] * 9
        assert len(commands()) - before == lines

    join(recorder, 1.0)
    recorder.do(Register(1, MODEL), 1.0)
    recorder.do(ProcessReport(ShardReport(0, 5, 0, (Staged(PushKey(1, 0), 0, 0),))), 1.0)
    recorder.do(Register(1, MODEL), 1.0)
    ask_without_result(1, lines=0)  # the round waits for the second worker
    join(recorder, 2.0)
    recorder.do(Register(2, MODEL), 2.0)
    assert ask(1, count=2) == BatchesReply((0, 1))
    ask_without_result(2, lines=1)
    recorder.do(ReturnBatches(1, [BatchKey(0, 1)]), 4.0)
    assert ask(2) == BatchesReply((1,))

    again = CoordinatorMachine(1, rules, generation=0, log_id=5)
    replay(again, commands())
    assert again.job.as_json() == recorder.coordinator.job.as_json()
