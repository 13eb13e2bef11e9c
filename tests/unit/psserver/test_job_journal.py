"""The coordinator's journal: what is read is what was done, and what is missing is noticed."""

import errno
import json
from pathlib import Path

import pytest

from pscommon.core.data_loop import LoopSpec
from pscommon.core.log_entries import BatchKey, PushKey, ShardReport, Staged
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from psserver.core.commands.recorder import RecordedCommand, Recorder, replay
from psserver.core.job.coordinator import BatchesReply, CoordinatorMachine
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules
from psserver.durability.best_effort_log import BestEffortLog
from psserver.durability.coordinator_log import CoordinatorLog, check_begins, check_goes_on
from psserver.durability.record_sink import RecordSink, RecordSource
from psserver.durability.shard_state import LogUnfitError
from tests.support.disk_operations import Operations, failing

MODEL = ModelSpec((TensorSpec("w", (1,), "float32"),), OptimizerSettings("sgd", ({"lr": 0.1},)))
BASE = {"epoch": 5, "version": 0}


def coordinator() -> CoordinatorMachine:
    return CoordinatorMachine(1, JobRules(policy("sync"), 2), generation=0, epoch=5)


def join(recorder: Recorder, now: float) -> None:
    recorder.do("join", now, rank=None, host="host", pid=1, device="cpu", attempt=0)


@pytest.fixture
def journal(tmp_path: Path) -> CoordinatorLog:
    journal = CoordinatorLog(
        RecordSink(RecordSource.JOB, BestEffortLog(tmp_path / "log", "no", lambda reason: None))
    )
    journal.begin(0, BASE)
    return journal


def test_commands_are_read_as_they_were_given(journal: CoordinatorLog) -> None:
    recorder = Recorder(coordinator(), journal)
    join(recorder, 1.5)
    recorder.do("register", 2.0, worker=1, spec=MODEL)

    base, *commands = journal.since(None)

    assert base == BASE
    arguments = {"rank": None, "host": "host", "pid": 1, "device": "cpu", "attempt": 0}
    assert commands == [
        RecordedCommand("join", 1.5, arguments),
        RecordedCommand("register", 2.0, {"worker": 1, "spec": MODEL}),
    ]


def test_they_lead_to_the_same_state(journal: CoordinatorLog) -> None:
    recorder = Recorder(coordinator(), journal)
    join(recorder, 1.0)
    join(recorder, 2.0)
    journal.begin(0, recorder.coordinator.state())

    again = coordinator()
    _, *commands, state = journal.since(None)
    replay(again, [command for command in commands if isinstance(command, RecordedCommand)])

    assert isinstance(state, dict)
    check_goes_on(state, again)


def test_a_gap_is_found(journal: CoordinatorLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that could not be written, and a next segment that begins with what came of it."""
    recorder = Recorder(coordinator(), journal)
    join(recorder, 1.0)
    with monkeypatch.context() as patch:
        Operations(1, 1, failing(errno.ENOSPC)).install(patch.setattr)
        join(recorder, 2.0)
    journal.begin(0, recorder.coordinator.state())

    again = coordinator()
    notes = list(journal.since(None))
    replay(again, [note for note in notes if isinstance(note, RecordedCommand)])

    assert len(notes) == 3  # two states and one command
    with pytest.raises(LogUnfitError, match=r"commands before version 0 are missing: .*roster"):
        check_goes_on(json.loads(json.dumps(notes[-1])), again)


def test_a_journal_begins_with_nothing_or_goes_on_from_a_snapshot() -> None:
    """That of a standby which took over before the first snapshot does neither."""
    recorder = Recorder(coordinator())
    join(recorder, 1.0)
    check_begins(BASE, None)

    with pytest.raises(
        LogUnfitError, match="it goes on from a state of which there is no snapshot"
    ):
        check_begins(recorder.coordinator.whole(), None)
    with pytest.raises(LogUnfitError, match="it begins at version 3, the snapshot is of 0"):
        check_begins({**BASE, "version": 3}, None)
    with pytest.raises(LogUnfitError, match="it does not begin with a state"):
        check_begins(RecordedCommand("join", 1.0, {}), None)


def test_who_joins_after_a_recovery_gets_no_number_of_before() -> None:
    """The journal may have lacked the newest ones."""
    recorder = Recorder(coordinator())
    join(recorder, 1.0)
    recorder.recovered(2.0, generation=3)
    join(recorder, 3.0)

    assert sorted(recorder.coordinator.membership.members) == [1, 30_001]


def test_who_waits_for_data_writes_one_line_however_often_it_asks(journal: CoordinatorLog) -> None:
    """They ask several times a second, perhaps for days; what the lines lead to is the same."""
    rules = JobRules(policy("async"), 2)
    recorder = Recorder(CoordinatorMachine(1, rules, generation=0, epoch=5), journal)

    def ask(worker: int, count: int = 1) -> BatchesReply | None:
        asked = {
            "worker": worker,
            "spec": LoopSpec(0, 2, 1),
            "received": 0,
            "count": count,
            "idle": True,
        }
        answer: BatchesReply | None = recorder.do("next_batches", 3.0, **asked)
        return answer

    def commands() -> list[RecordedCommand]:
        return [note for note in journal.since(None) if isinstance(note, RecordedCommand)]

    def asks_in_vain(worker: int, lines: int) -> None:
        before = len(commands())
        assert [ask(worker) for _ in range(9)] == [None] * 9
        assert len(commands()) - before == lines

    join(recorder, 1.0)
    recorder.do("register", 1.0, worker=1, spec=MODEL)
    recorder.do("report", 1.0, report=ShardReport(0, 5, 0, (Staged(PushKey(1, 0), 0, 0),)))
    recorder.do("register", 1.0, worker=1, spec=MODEL)
    asks_in_vain(1, lines=0)  # there are to be two workers
    join(recorder, 2.0)
    recorder.do("register", 2.0, worker=2, spec=MODEL)
    assert ask(1, count=2) == BatchesReply((0, 1))
    asks_in_vain(2, lines=1)
    recorder.do("return_batches", 4.0, worker=1, batches=[BatchKey(0, 1)])
    assert ask(2) == BatchesReply((1,))

    again = CoordinatorMachine(1, rules, generation=0, epoch=5)
    replay(again, commands())
    assert again.state() == recorder.coordinator.state()
