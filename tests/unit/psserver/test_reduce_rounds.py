"""Reduce rounds of policy allreduce: who takes part, and what the policy excludes."""

from typing import Any

import pytest

from pscommon.core.errors import InvalidRequestError, TooFewWorkersError
from pscommon.core.limits import check_allreduce
from pscommon.core.log_entries import PushKey, ShardReport, Staged
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from psserver.core.commands.waiting import waiting_for
from psserver.core.coordinator.admission import (
    check_registration,
    check_reshard,
    check_switch,
    largest_push_nbytes,
)
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import policy
from psserver.core.job.reduction import ReduceRequest, ReduceRound
from psserver.core.job.settings import JobRules
from psserver.core.job.snapshot_schedule import SnapshotInterval
from psserver.core.workers.members import WorkerState

WEIGHTS = (TensorSpec("w", (2, 3), "float32"),)
MODEL = ModelSpec(WEIGHTS, OptimizerSettings("sgd"))


class Job:
    """A job on one shard, with workers 1 to `workers` at version 0."""

    def __init__(
        self,
        workers: int = 2,
        every: int | None = None,
        generation: int = 0,
        policy_name: str = "allreduce",
    ) -> None:
        rules = JobRules(policy(policy_name), 1, every=SnapshotInterval(steps=every))
        self.machine = CoordinatorMachine(1, rules, generation)
        self.asked: dict[int, int] = {}
        for _ in range(workers):
            self.join()

    def join(self) -> int:
        worker = self.machine.membership.join(0.0, None, "host", 1, "cpu", 0).worker
        if self.machine.registration.register(worker, MODEL, 0.0) == "upload":
            self.report(Staged(PushKey(worker, 0), 1, 0))
            self.machine.registration.register(worker, MODEL, 0.0)
        return worker

    def report(self, staged: Staged) -> None:
        self.machine.reports.process(ShardReport(0, self.machine.job.log_id, 0, (staged,)), 0.0)

    def ask(
        self, worker: int, version: int, samples: int = 1, completed: int = 0
    ) -> ReduceRound | None:
        self.asked[worker] = self.asked.get(worker, 0) + 1
        return self.repeat(worker, version, samples, completed)

    def repeat(
        self, worker: int, version: int, samples: int = 1, completed: int = 0
    ) -> ReduceRound | None:
        number = self.asked[worker]
        request = ReduceRequest(worker, number, version, samples, completed=completed)
        return self.machine.reduction.ask(request, 0.0)

    def push(self, worker: int, seq: int, number: int, samples: int = 1) -> None:
        self.report(Staged(PushKey(worker, seq), samples, 0, reduce_round=number))

    def step(self, version: int) -> None:
        """Let workers 1 and 2 make an update."""
        self.ask(1, version)
        found = self.ask(2, version)
        assert found is not None
        for worker in found.workers:
            self.push(worker, version + 1, found.number)


def test_a_round_opens_when_all_active_workers_have_asked() -> None:
    job = Job()

    assert job.ask(1, 0) is None
    found = job.ask(2, 0)
    assert found is not None
    assert (found.kind, found.workers) == ("gradients", (1, 2))
    assert job.repeat(1, 0) == found

    job.push(1, 1, found.number)
    assert job.machine.job.version == 0
    job.push(2, 1, found.number)
    assert job.machine.job.version == 1


def test_a_departure_voids_the_round_and_its_pushes() -> None:
    job = Job(3)
    for worker in (1, 2, 3):
        found = job.ask(worker, 0)
    assert found is not None
    job.push(1, 1, found.number)

    job.machine.registration.lose(3, "its lease ended", 0.0)
    job.push(2, 1, found.number)

    assert job.machine.job.version == 0
    assert job.machine.job.counts["stale"] == 2
    job.ask(1, 0)
    after = job.ask(2, 0)
    assert after is not None
    assert after.workers == (1, 2)
    assert after.group > found.group


def test_rounds_of_the_same_workers_have_one_group() -> None:
    job = Job()
    groups = []
    for version in range(3):
        job.ask(1, version)
        found = job.ask(2, version)
        assert found is not None
        groups.append(found.group)
        for worker in (1, 2):
            job.push(worker, version + 1, found.number)

    assert groups == [1, 1, 1]


def test_a_newcomer_gets_the_weights_of_the_first_worker() -> None:
    job = Job()
    job.step(0)
    newcomer = job.join()

    assert job.ask(newcomer, -1, 0) is None
    job.ask(1, 1)
    found = job.ask(2, 1)

    assert found is not None
    assert (found.kind, found.source, found.workers) == ("weights", 1, (1, 2, newcomer))
    for worker in (1, 2):
        assert job.ask(worker, 1, completed=found.number) is None
    after = job.ask(newcomer, 1, completed=found.number)
    assert after is not None
    assert after.kind == "gradients"
    assert after.group == found.group


@pytest.mark.parametrize("failed", [1, 3])
def test_a_worker_that_fails_voids_a_round_of_weights(failed: int) -> None:
    """The others notice, and the next round has another process group."""
    job = Job()
    job.step(0)
    newcomer = job.join()
    versions = {1: 1, 2: 1, newcomer: -1}
    for worker, version in versions.items():
        found = job.ask(worker, version)
    assert found is not None
    job.ask(2, 1, completed=found.number)

    job.ask(failed, versions[failed])

    assert job.machine.job.reduction.open.number == 0
    for worker in {1, newcomer} - {failed}:
        after = job.ask(worker, versions[worker])
    assert after is not None
    assert (after.kind, after.workers) == ("weights", (1, 2, newcomer))
    assert after.group > found.group


def test_a_worker_that_has_got_the_weights_is_waited_for() -> None:
    job = Job()
    job.step(0)
    job.ask(1, 1)
    found = job.ask(2, -1, 0)
    assert found is not None
    assert found.kind == "weights"

    assert job.ask(1, 1, completed=found.number) is None
    after = job.ask(2, 1, 0, found.number)

    assert after is not None
    assert after.kind == "none"
    assert job.machine.job.reduction.open.number == 0


def test_a_request_names_the_workers_that_it_waits_for() -> None:
    job = Job()
    job.step(0)
    newcomer = job.join()
    job.ask(newcomer, -1, 0)
    job.ask(1, 1)

    text = waiting_for(job.machine, 0.0)

    assert "worker 2 " in text
    assert "worker 1 " not in text


def test_servers_with_the_newest_weights_give_them() -> None:
    job = Job()

    found = job.ask(1, -1, 0)
    assert found is not None
    assert found.kind == "download"
    found = job.ask(1, 0, 0)
    assert found is not None
    assert found.kind == "none"


def test_an_upload_comes_before_a_snapshot() -> None:
    job = Job(every=1)
    job.step(0)
    assert not job.machine.cut(0.0)

    job.ask(2, 1)
    job.ask(1, 1)
    found = job.repeat(1, 1)
    assert found is not None
    assert (found.kind, found.source) == ("upload", 1)
    job.report(Staged(PushKey(1, 2), 0, 1, upload=True))

    assert job.machine.cut(0.0)


def test_the_job_fails_when_no_worker_has_the_weights() -> None:
    job = Job()
    job.step(0)
    for worker in (1, 2):
        job.machine.registration.lose(worker, "its lease ended", 0.0)

    job.ask(job.join(), -1, 0)

    assert isinstance(job.machine.job.failure, TooFewWorkersError)


def test_a_worker_has_the_weights_of_its_update_before_it_asks_again() -> None:
    """It may count as idle: a late repetition of its request for data may arrive."""
    job = Job()
    job.step(0)
    newcomer, index = job.join(), job.machine.membership.index
    for worker in (1, 2):
        index.set_state(job.machine.membership.members[worker], WorkerState.IDLE)

    assert job.ask(newcomer, -1, 0) is None
    assert job.machine.job.failure is None


def test_a_snapshot_that_is_due_does_not_block_an_open_round() -> None:
    """A snapshot was being written when the round opened, so no upload came before it."""
    job = Job(every=1)
    job.step(0)
    job.report(Staged(PushKey(1, 2), 0, 1, upload=True))
    assert job.machine.cut(0.0)
    job.ask(1, 1)
    found = job.ask(2, 1)
    assert found is not None
    job.push(1, 3, found.number)
    job.push(2, 2, found.number)
    job.ask(1, 2)
    found = job.ask(2, 2)
    assert found is not None
    assert found.kind == "gradients"

    job.machine.cuts.abandon()
    assert job.machine.cuts.due_at(2)
    job.push(1, 4, found.number)
    job.push(2, 3, found.number)

    assert job.machine.job.version == 3


@pytest.mark.parametrize(
    "setting",
    [
        {"staleness": 2},
        {"max_staleness": 3},
        {"backup_workers": 1},
        {"max_norm": 1.0},
        {"standby_of": "host:1"},
        {"staleness": 0},
        {"max_staleness": 0},
        {"quarantine_after": 1},
        {"tls_cert": "cert.pem"},
        {"token_file": "tokens"},
        {"global_batch": 64},
        {"bad_gradients": "skip"},
        {"bad_gradients": "clip"},
        {"durability": "log"},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_a_setting_excludes_the_policy(setting: dict[str, Any]) -> None:
    flag = next(iter(setting)).replace("_", "-")

    with pytest.raises(InvalidRequestError, match=f"policy allreduce excludes `--{flag} "):
        check_allreduce(**setting)


def test_several_optimizers_are_refused() -> None:
    tensors = (WEIGHTS[0], TensorSpec("v", (1,), "float32", group=1))
    model = ModelSpec(tensors, dict.fromkeys(("d", "g"), OptimizerSettings("sgd")))
    job = Job(0)
    worker = job.machine.membership.join(0.0, None, "host", 1, "cpu", 0).worker

    with pytest.raises(InvalidRequestError, match="one optimizer, not of d, g"):
        job.machine.registration.register(worker, model, 0.0)


@pytest.mark.parametrize(("before", "after"), [("sync", "allreduce"), ("allreduce", "async")])
def test_the_policy_is_not_switched(before: str, after: str) -> None:
    machine = CoordinatorMachine(1, JobRules(policy(before)))

    with pytest.raises(InvalidRequestError, match="restart the servers with"):
        check_switch(machine, policy(after), 1 << 30)


def test_a_reshard_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="keeps the weights in the workers"):
        check_reshard(Job().machine, 2, 1 << 30)


def test_numbers_are_others_after_a_restart_of_the_servers() -> None:
    """Workers that live on may still use an earlier process group, or its store."""
    numbers = []
    for generation in (1, 2):
        job = Job(0, generation=generation)
        first, second = job.join(), job.join()
        job.ask(first, 0)
        found = job.ask(second, 0)
        assert found is not None
        numbers += [found.number, found.group]

    assert len({*numbers[::2]}) == len({*numbers[1::2]}) == 2


def test_an_upload_must_fit_the_memory_for_pushes() -> None:
    """It is refused at the start, not at the end of a training. Gradients take no memory."""
    reduced, sync = policy("allreduce"), policy("sync")
    upload = largest_push_nbytes(reduced, MODEL, 1, states=2)
    machine = Job().machine

    assert (largest_push_nbytes(sync, MODEL, 1, states=2), upload) == (64, 3 * 64)
    check_registration(machine, 3, upload, upload)
    with pytest.raises(InvalidRequestError, match="Try: `--in-flight 192`"):
        check_registration(machine, 3, upload, upload - 1)


def test_other_policies_have_no_reduce_rounds() -> None:
    machine = CoordinatorMachine(1, JobRules(policy("sync")))
    worker = machine.membership.join(0.0, None, "host", 1, "cpu", 0).worker

    with pytest.raises(InvalidRequestError, match="is sync, not allreduce"):
        machine.reduction.ask(ReduceRequest(worker, 1, 0, 1), 0.0)


@pytest.mark.parametrize(
    "push",
    [
        Staged(PushKey(1, 1), 1, 0, reduce_round=1),
        Staged(PushKey(1, 1), 0, 0, upload=True),
    ],
    ids=["round", "upload"],
)
def test_other_policies_refuse_what_only_allreduce_pushes(push: Staged) -> None:
    """The servers would have an update without its gradient, or other weights without one."""
    job = Job(1, policy_name="sync")

    job.report(push)

    assert job.machine.job.version == 0
    assert job.machine.job.counts["stale"] == 1


def test_buffers_alone_are_refused() -> None:
    """The servers would have buffers of another version than their weights."""
    job = Job(1)

    job.report(Staged(PushKey(1, 1), 0, 0))

    assert job.machine.job.counts["stale"] == 1
