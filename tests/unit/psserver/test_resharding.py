"""The coordinator during a reshard, request by request; tests/sim has histories with faults."""

import json
from types import SimpleNamespace

import pytest

from pscommon.core.log_entries import Cut, PushKey, Reshard, ShardReport, Staged
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from psserver.core.commands.job_commands import FinishSnapshot, RecordPart
from psserver.core.commands.recorder import Recorder
from psserver.core.commands.shard_commands import FinishReshard, RestartShard, StartReshard
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules
from psserver.core.job.snapshot_schedule import PartReport, SnapshotInterval
from psserver.core.servers.catch_up import CatchUp, choose_catch_up
from psserver.core.servers.shard_directory import ShardDirectory
from psserver.core.servers.shard_protocol import process_report
from psserver.core.shard.state_machine import NO_LOG
from tests.support.shard_reports import report_to

MODEL = ModelSpec((TensorSpec("w", (1,), "float32"),), OptimizerSettings("sgd", ({"lr": 0.1},)))


class ReshardJob:
    """Two shards, and one worker (number 1) whose first push has counted."""

    def __init__(self) -> None:
        self.recorder = Recorder(
            CoordinatorMachine(2, JobRules(policy("async"), 1, 5.0, SnapshotInterval()))
        )
        self.machine.membership.join(0.0, None, "host", 1, "cpu")
        self.machine.registration.register(1, MODEL, 0.0)
        self.report(0, 1, seqs=[0])
        self.machine.registration.register(1, MODEL, 0.0)
        self.report(0, 1, seqs=[1])
        assert self.machine.job.version == 1

    @property
    def machine(self) -> CoordinatorMachine:
        return self.recorder.coordinator

    def report(
        self,
        *shards: int,
        seqs: list[int] | None = None,
        index: int | None = None,
        is_resharding: bool = False,
    ) -> None:
        """Report these shards, with all entries applied or those up to `index`."""
        staged = tuple(Staged(PushKey(1, seq), 1, 0) for seq in seqs or [])
        for shard in shards:
            at = self.machine.log.index if index is None else index
            report_to(
                self.recorder, ShardReport(shard, 0, at, staged, is_resharding=is_resharding), 0.0
            )


def test_staged_pushes_are_void_and_count_once_after_they_are_repeated() -> None:
    job = ReshardJob()
    job.report(0, seqs=[2])
    before = job.machine.log.index
    assert job.recorder.do(StartReshard(3, False), 0.0)
    assert job.machine.log.after(before) == [Reshard(before + 1, 1, 3)]

    job.report(1, seqs=[2], index=before)
    assert not job.machine.pending.ready
    job.report(0, 1, 2)
    job.report(0, 1, seqs=[2])
    assert job.machine.job.version == 1
    job.report(2, seqs=[2])
    assert job.machine.job.version == 2


def test_pushes_wait_until_all_shards_have_their_partition_and_the_snapshot() -> None:
    job = ReshardJob()
    job.recorder.do(StartReshard(1, True), 0.0)
    job.report(0, is_resharding=True)
    assert not job.machine.job.reshard.complete  # type: ignore[union-attr]
    job.report(0)
    assert isinstance(job.machine.log.after(job.machine.log.index - 1)[0], Cut)

    job.report(0, seqs=[2])
    cut = job.machine.log.index
    job.recorder.do(RecordPart(0, PartReport(1, cut - 1, "f", 1, "s")), 0.0)
    assert job.machine.cuts.finished is None, "a part of another cut"
    job.recorder.do(RecordPart(0, PartReport(1, cut, "f", 1, "s")), 0.0)
    assert job.machine.job.version == 1
    job.recorder.do(FinishSnapshot(), 0.0)
    job.recorder.do(FinishReshard(), 0.0)

    assert job.machine.job.reshard is None
    assert job.machine.job.version == 2


def test_a_reshard_is_refused_during_another_one_a_snapshot_or_before_all_follow() -> None:
    job = ReshardJob()
    job.recorder.cut(0.0)
    assert not job.recorder.do(StartReshard(3, True), 0.0)
    for shard in (0, 1):
        job.recorder.do(RecordPart(shard, PartReport(1, job.machine.log.index, "f", 1, "s")), 0.0)
    job.recorder.do(FinishSnapshot(), 0.0)
    assert not job.recorder.do(StartReshard(2, True), 0.0)
    assert job.recorder.do(StartReshard(3, True), 0.0)
    assert not job.recorder.do(StartReshard(1, True), 0.0)
    assert not Recorder(
        CoordinatorMachine(2, JobRules(policy("async"), 1, 5.0, SnapshotInterval()))
    ).do(StartReshard(3, True), 0.0)


def test_a_shard_that_dies_in_a_reshard_repeats_its_part() -> None:
    job = ReshardJob()
    job.recorder.do(StartReshard(3, False), 0.0)
    job.report(0, 1)
    job.recorder.do(RestartShard(1), 0.0)
    job.report(2)
    assert job.machine.job.reshard is not None
    job.report(1)
    assert job.machine.job.reshard is None


def test_a_new_shard_adopts_and_an_unsuccessful_one_is_rolled_back() -> None:
    job = ReshardJob()
    job.recorder.do(StartReshard(3, False), 0.0)
    blank, is_resharding = (
        ShardReport(2, NO_LOG, 0, ()),
        ShardReport(0, 0, job.machine.log.index, (), 0, job.machine.log.digest, is_resharding=True),
    )

    assert (
        choose_catch_up(job.machine, blank, True, can_recover=True, restores=False) is CatchUp.ADOPT
    )
    assert (
        choose_catch_up(job.machine, is_resharding, False, can_recover=True, restores=False)
        is CatchUp.FOLLOW
    )
    job.report(0, 1, 2)
    assert (
        choose_catch_up(job.machine, is_resharding, False, can_recover=True, restores=False)
        is CatchUp.GO_BACK
    )


@pytest.mark.parametrize("is_over", [False, True])
def test_a_recovered_coordinator_knows_whether_its_snapshot_ended_the_reshard(
    is_over: bool,
) -> None:
    """All shards have their new partitions and the snapshot has been cut; it may not be written."""
    job = ReshardJob()
    before = job.machine.log.index
    job.recorder.do(StartReshard(1, True), 0.0)
    job.report(0)
    assert job.machine.cuts.cutting is not None

    again = CoordinatorMachine(1, JobRules(policy("async"), 1, 5.0, SnapshotInterval()))
    state = json.loads(json.dumps(job.machine.complete_state()))
    again.load_state(state, MODEL, 0.0, job.machine.log.index if is_over else before)
    assert again.job.reshard is not None
    again.recovered(0.0, 0)
    assert (again.job.reshard is None, again.job.shards, again.job.version) == (is_over, 1, 1)
    assert again.job.reshard is None or again.job.reshard.loaded_shards == set()


def test_a_new_process_of_a_shard_may_be_behind_the_former_one() -> None:
    """A standby that lags took over: entries that it lacks are retained, though all shards have
    reported them.
    """
    job = ReshardJob()
    before = job.machine.log.index
    job.report(0, 1, seqs=[2])
    decided = job.machine.log.after(before)
    job.report(1)

    job.recorder.do(RestartShard(1), 0.0)
    job.report(1, index=before)
    job.report(0)

    assert [*decided] == job.machine.log.after(before) != []
    job.report(1)
    assert job.machine.log.after(before) == []


def test_a_new_shard_that_was_restarted_with_the_coordinator_builds_its_partition_again() -> None:
    """The restarted coordinator has no connection whose end would show the loss."""
    job = ReshardJob()
    job.report(0, 1, seqs=[])
    assert job.recorder.do(StartReshard(3, True), 0.0)
    job.report(0, 1, 2)
    assert job.machine.job.reshard is not None
    assert job.machine.job.reshard.loaded_shards == {0, 1, 2}

    counts = SimpleNamespace(shards=3, past=set())
    directory = ShardDirectory[PartReport](counts, "shard 0")
    directory.form(job.machine.job.following_shards)
    directory.new_log(None)
    server, replaces = directory.connect(2, 3, "shard 2", "its second process")
    blank = ShardReport(2, NO_LOG, 0, ())
    decision = process_report(
        job.recorder, directory, server, server.connection, blank, 0.0, has_logs=True
    )

    assert (replaces, decision.catch_up) == (False, CatchUp.ADOPT)
    assert job.machine.job.reshard.loaded_shards == {0, 1}
