"""What the first worker of a resumed job may change, and how errors name the rest."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pscommon.core.data_loop import LoopSpec
from pscommon.core.data_stream import Spec, StreamSpec
from pscommon.core.errors import MismatchError
from pscommon.core.log_entries import BatchKey, PushKey, ShardReport, Staged
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from psserver.core.commands.data_commands import LeaseBatches, ReturnBatches
from psserver.core.commands.recorder import Recorder, replay
from psserver.core.commands.worker_commands import Join, Leave, Lose, Register
from psserver.core.coordinator.data_requests import BatchesReply
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.data.resume_rules import hyper_parameter_changes
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules
from tests.support.memory_journal import MemoryJournal
from tests.support.shard_reports import report_to

MODEL = ModelSpec((TensorSpec("w", (1,), "float32"),), OptimizerSettings("sgd", ({"lr": 0.1},)))
SLOWER = replace(MODEL, optimizer=OptimizerSettings("sgd", ({"lr": 0.05},)))
LOOP = LoopSpec(0, size=2, batch_size=1)
STREAM = StreamSpec(0, sources=1, batch_size=1)
ORIGIN = "the snapshot of version 2 in /data"
RULES = JobRules(policy("async"), 1)


class JobRun:
    """Workers of one run of a job; every request is a recorded command."""

    def __init__(self, coordinator: CoordinatorMachine) -> None:
        self.coordinator, self.journal = coordinator, MemoryJournal()
        self.recorder = Recorder(coordinator, self.journal)
        self._staged: list[Staged] = []

    def worker(self, spec: ModelSpec = MODEL) -> int:
        worker: int = self.recorder.do(
            Join(rank=None, host="host", pid=1, device="cpu"), 0.0
        ).worker
        if self.recorder.do(Register(worker, spec), 0.0) == "upload":
            self.push(worker, 0)
            self.recorder.do(Register(worker, spec), 0.0)
        return worker

    def push(self, worker: int, seq: int, *batches: BatchKey) -> None:
        self._staged.append(Staged(PushKey(worker, seq), 1, 0, batches))
        report_to(
            self.recorder, ShardReport(0, self.coordinator.job.log_id, 0, tuple(self._staged)), 0.0
        )

    def ask(
        self, worker: int, spec: Spec, received: int = 0, idle: bool = False
    ) -> BatchesReply | None:
        answer: BatchesReply | None = self.recorder.do(
            LeaseBatches(worker=worker, spec=spec, received=received, count=1, idle=idle), 0.0
        )
        return answer

    def train(self, worker: int, spec: Spec) -> list[int]:
        """Train a loop; return the batch numbers."""
        numbers: list[int] = []
        while (
            answer := self.ask(worker, spec, len(numbers), idle=True)
        ) is not None and answer.numbers:
            numbers += answer.numbers
            self.push(worker, len(numbers), BatchKey(spec.loop, answer.numbers[0], 1))
            if isinstance(spec, StreamSpec):  # its only source has one batch
                end = BatchKey(spec.loop, spec.number(spec.lap(answer.numbers[0]), 1), 0, True)
                self.recorder.do(ReturnBatches(worker, [end]), 0.0)
        return numbers


def from_snapshot(run: JobRun) -> JobRun:
    """Return the next run, resumed from a snapshot of everything that has counted."""
    coordinator = CoordinatorMachine(1, RULES, run.coordinator.job.log_id + 1)
    assert run.coordinator.job.model is not None
    state = json.loads(json.dumps(run.coordinator.job.as_json()))
    coordinator.restore(state, run.coordinator.job.model, 0.0)
    coordinator.ledger.origin = ORIGIN
    return JobRun(coordinator)


def from_log(run: JobRun) -> JobRun:
    """Return the next run, recovered from the log with the coordinator's history."""
    run.recorder.recovered(0.0, run.coordinator.job.log_id + 1, resumes=True)
    run.coordinator.ledger.origin = ORIGIN
    return run


WAYS = (from_snapshot, from_log)


@pytest.fixture(params=WAYS)
def resumed(request: pytest.FixtureRequest) -> Callable[..., JobRun]:
    """Return the second run of a job whose first run completed these loops."""

    def make(*loops: Spec) -> JobRun:
        run = JobRun(CoordinatorMachine(1, RULES))
        worker = run.worker()
        for spec in loops or (LOOP,):
            run.train(worker, spec)
        run.recorder.do(Leave(worker, ""), 0.0)
        way: Callable[[JobRun], JobRun] = request.param
        return way(run)

    return make


def refusal(reason: str, call: Callable[[], Any]) -> str:
    with pytest.raises(MismatchError) as caught:
        call()
    assert caught.value.reason == reason
    assert "--shard" not in str(caught.value)
    return str(caught.value)


# ---- hyper-parameters ----------------------------------------------------------------------------


def test_the_hyper_parameters_of_the_first_worker_are_adopted(
    resumed: Callable[..., JobRun],
) -> None:
    run = resumed()
    run.worker(SLOWER)

    assert run.coordinator.job.model == SLOWER
    text = refusal("MODEL_MISMATCH", lambda: run.worker(MODEL))
    assert "not the job's" in text
    assert ORIGIN not in text  # this run has set the hyper-parameters


def test_a_worker_from_before_the_restart_ends_the_resume() -> None:
    run = JobRun(CoordinatorMachine(1, RULES))
    worker = run.worker()
    from_log(run)
    run.ask(worker, LOOP)

    refusal("MODEL_MISMATCH", lambda: run.worker(SLOWER))


DIFFERENT = {
    "optimizer: adam, the job has sgd": replace(
        MODEL, optimizer=OptimizerSettings("adam", ({"lr": 0.1},))
    ),
    "optimizer: 2 parameter groups": replace(
        MODEL, optimizer=OptimizerSettings("sgd", ({"lr": 0.1}, {"lr": 0.1}))
    ),
    "w: float32[2] trainable, the job has float32[1]": replace(
        MODEL, tensors=(TensorSpec("w", (2,), "float32"),)
    ),
}


@pytest.mark.parametrize("difference", DIFFERENT)
def test_another_model_or_optimizer_is_refused_with_the_difference(
    resumed: Callable[..., JobRun], difference: str
) -> None:
    text = refusal("MODEL_MISMATCH", lambda: resumed().worker(DIFFERENT[difference]))

    assert difference in text
    assert ORIGIN in text
    assert "`--resume never`" in text


def test_changes_are_named_by_key_and_group() -> None:
    one = OptimizerSettings("sgd", ({"lr": 0.1, "momentum": 0.0},))
    assert hyper_parameter_changes(one, one) == ""
    assert hyper_parameter_changes(
        one, OptimizerSettings("sgd", ({"lr": 0.2, "momentum": 0.9},))
    ) == ("lr 0.1 -> 0.2, momentum 0.0 -> 0.9")
    two = OptimizerSettings("sgd", ({"lr": 0.1}, {"lr": 0.1}))
    assert (
        hyper_parameter_changes(two, OptimizerSettings("sgd", ({"lr": 0.1}, {"lr": 0.3})))
        == "group 1 lr 0.1 -> 0.3"
    )
    clipped = OptimizerSettings("sgd", one.groups, clip_norm=0.5)
    assert hyper_parameter_changes(one, clipped) == "clip_norm None -> 0.5"


# ---- epochs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [LOOP, STREAM])
def test_more_epochs_continue_an_ended_loop(resumed: Callable[..., JobRun], spec: Spec) -> None:
    run = resumed(spec)
    more = replace(spec, epochs=2)
    before = {run.coordinator.ledger.loops[0].committed}
    numbers = run.train(run.worker(), more)

    expected = [2, 3] if spec is LOOP else [STREAM.number(0, 0) + 1]
    assert numbers == expected
    assert before == {2 if spec is LOOP else 1}
    loop = run.coordinator.ledger.loops[0]
    assert (loop.spec, loop.done) == (more, True)
    assert run.ask(run.worker(), more, idle=True) == BatchesReply(end=True)


def test_more_epochs_continue_an_interrupted_loop() -> None:
    first = JobRun(CoordinatorMachine(1, RULES))
    worker = first.worker()
    first.ask(worker, LOOP)
    first.push(worker, 1, BatchKey(0, 0, 1))

    for run in (from_snapshot(first), from_log(first)):
        assert run.train(run.worker(), replace(LOOP, epochs=3)) == [1, 2, 3, 4, 5]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 2), st.sampled_from(WAYS)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 3),
)
def test_over_several_runs_with_growing_epochs_each_batch_counts_once(
    runs: list[tuple[int, int, Callable[[JobRun], JobRun]]], size: int
) -> None:
    """Each run trains some batches, may leave one unused and may raise the epochs; the last one
    trains the rest.
    """
    run, epochs, counted = JobRun(CoordinatorMachine(1, RULES)), 1, list[int]()
    for batches, more, resume in [*runs, (1_000, 0, from_snapshot)]:
        epochs += more if run.coordinator.ledger.loops else 0
        spec = replace(LOOP, size=size, epochs=epochs)
        worker = run.worker()
        for step in range(batches):
            answer = run.ask(worker, spec, step, idle=True)
            if answer is None or not answer.numbers:
                break
            if step == batches - 1 and batches % 2:
                break  # the batch is still leased when the run ends
            run.push(worker, step + 1, BatchKey(0, answer.numbers[0], 1))
            counted += answer.numbers
        if (
            resume is from_log or batches % 3
        ):  # after recovery from a log the worker is a member until its lease ends
            run.recorder.do(Lose(worker, "killed"), 0.0)
        run = resume(run)

    assert sorted(counted) == list(range(size * epochs))
    assert run.coordinator.ledger.loops[0].done


def test_the_raised_number_of_epochs_is_replayed_and_stored_in_snapshots(
    resumed: Callable[..., JobRun],
) -> None:
    run = resumed()
    before = json.loads(json.dumps(run.coordinator.complete_state()))
    done = len(run.journal.commands)
    run.ask(run.worker(), replace(LOOP, epochs=3))

    assert run.coordinator.job.model is not None
    again = CoordinatorMachine(1, RULES, 1, before["epoch"])
    again.load_state(before, run.coordinator.job.model, 0.0)
    replay(again, run.journal.commands[done:])
    assert again.complete_state() == run.coordinator.complete_state()
    assert from_snapshot(run).coordinator.ledger.loops[0].spec.epochs == 3


REASONS: dict[str, tuple[tuple[Spec, ...], Spec]] = {
    "fewer epochs than the 2": ((replace(LOOP, epochs=2),), LOOP),
    "only the last loop": ((LOOP, replace(LOOP, loop=1)), replace(LOOP, epochs=2)),
    "size is 3 here and 2 there": ((LOOP,), replace(LOOP, size=3, epochs=2)),
}


@pytest.mark.parametrize("why", REASONS)
def test_a_loop_that_cannot_be_continued_is_refused_with_the_reason(
    resumed: Callable[..., JobRun], why: str
) -> None:
    loops, asked = REASONS[why]
    run = resumed(*loops)
    text = refusal("LOOP_MISMATCH", lambda: run.ask(run.worker(), asked))

    assert why in text
    assert f"not that of {ORIGIN}" in text
    assert "`--resume never`" in text


@pytest.mark.parametrize("first", [LOOP, replace(LOOP, epochs=2)])
def test_only_the_first_worker_may_raise_epochs(
    resumed: Callable[..., JobRun], first: LoopSpec
) -> None:
    run = resumed()
    run.ask(run.worker(), first)
    text = refusal("LOOP_MISMATCH", lambda: run.ask(run.worker(), replace(LOOP, epochs=3)))

    assert "only the first worker after a resume" in text


def test_a_stream_with_leased_batches_keeps_its_epochs() -> None:
    """Their numbers would refer to other passes."""
    run = JobRun(CoordinatorMachine(1, RULES))
    run.ask(run.worker(), STREAM)
    from_log(run)

    text = refusal("LOOP_MISMATCH", lambda: run.ask(run.worker(), replace(STREAM, epochs=2)))
    assert "hold batches of this stream" in text


def test_a_loop_of_the_current_run_is_not_taken_for_the_snapshots(
    resumed: Callable[..., JobRun],
) -> None:
    run = resumed()
    later = replace(LOOP, loop=1)
    run.ask(run.worker(), later)
    text = refusal("LOOP_MISMATCH", lambda: run.ask(run.worker(), replace(later, epochs=2)))

    assert "not that of the job: epochs is 2 here and 1 there" in text
    assert ORIGIN not in text


def test_states_of_earlier_releases_have_no_new_field() -> None:
    """A job that was not resumed writes none."""
    run = JobRun(CoordinatorMachine(1, RULES))
    run.worker()
    assert "extendable" not in run.coordinator.job.as_json()
    assert (
        from_snapshot(run).coordinator.job.as_json().get("extendable") is None
    )  # the job has no loop yet
