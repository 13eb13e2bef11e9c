"""Random histories: the coordinator decides as one that searches at each event."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pscommon.core.data_loop import LoopSpec
from pscommon.core.errors import PSError
from pscommon.core.log_entries import BatchKey, Measured, PushKey, ShardReport, Staged
from pscommon.core.model_spec import ModelSpec, OptimizerSettings, TensorSpec
from psserver.core.commands.command import Command
from psserver.core.commands.data_commands import LeaseBatches
from psserver.core.commands.job_commands import PolicySettings, SetPolicy, UseRules
from psserver.core.commands.recorder import Recorder
from psserver.core.commands.worker_commands import Join, Leave, Lose, Register
from psserver.core.coordinator.machine import CoordinatorMachine
from psserver.core.job.policy import policy
from psserver.core.job.settings import JobRules
from tests.sim.invalid_requests import FaultyCoordinator
from tests.sim.scenario import Scenario
from tests.sim.world import World
from tests.support.searching_machine import SearchingMachine, search_in
from tests.support.shard_reports import report_to

ONE = OptimizerSettings("sgd", clip_norm=1.0)
MODELS = (
    ModelSpec((TensorSpec("w", (1,), "float32"),), OptimizerSettings("sgd")),
    ModelSpec((TensorSpec("w", (1,), "float32"),), ONE),
    ModelSpec(
        (TensorSpec("d.w", (1,), "float32"), TensorSpec("g.w", (1,), "float32", group=1)),
        {"d": ONE, "g": ONE},
    ),
)
POLICIES: tuple[tuple[Any, ...], ...] = (
    ("sync",),
    ("sync", None, 2),
    ("sync", None, None, 1),
    ("async",),
    ("async", None, 3),
    ("ssp", 1),
    ("ssp", 2, 4),
    ("ssp", 3),
)
LOOP = LoopSpec(0, size=30, batch_size=1, epochs=3)
EVENT_COUNT = 120


class History:
    """A random history of one coordinator; the same seed gives the same events."""

    def __init__(self, seed: int, machine: type[CoordinatorMachine]) -> None:
        self.rng = random.Random(seed)
        self.model = self.rng.choice(MODELS)
        self.shards = self.rng.choice([1, 2])
        self.rules = self.draw_rules()
        self.recorder = Recorder(machine(self.shards, self.rules))
        self.workers: list[int] = []
        self.seqs: dict[int, int] = {}
        self.staged: dict[int, list[Staged]] = {shard: [] for shard in range(self.shards)}
        self.now = 0.0
        for _ in range(self.rng.randint(1, 4)):
            self.join()

    @property
    def coordinator(self) -> CoordinatorMachine:
        return self.recorder.coordinator

    def draw_rules(self) -> JobRules:
        rng = self.rng
        return JobRules(
            policy(*rng.choice(POLICIES)),
            rng.randint(1, 2),
            bad_gradients=rng.choice(["skip", "clip"]),
            max_norm=rng.choice([None, None, 2.5]),
            quarantine_after=rng.choice([None, 3]),
            late=rng.choice(["return", "drop"]),
            global_batch=rng.choice([None, None, 2]),
        )

    def do(self, command: Command[Any]) -> Any:
        try:
            return self.recorder.do(command, self.now)
        except (PSError, ValueError) as error:  # some of these requests come from no worker
            return type(error).__name__

    def event(self) -> None:
        self.now += 0.1
        events: list[Callable[[], object]] = [self.push] * 10
        events += [self.report] * 6 + [self.ask] * 4 + [self.join, self.leave, self.lose]
        events += [self.change_policy, self.change_rules, self.register]
        self.rng.choice(events)()

    def join(self) -> None:
        joined = self.do(Join(rank=self.rng.randint(0, 5), host="h", pid=1, device="cpu"))
        self.workers.append(joined.worker)
        if self.rng.random() < 0.9:
            self.register()

    def register(self) -> None:
        worker = self.workers[-1]
        if self.do(Register(worker, self.model)) == "upload":
            self.stage(Staged(PushKey(worker, 0), 1, 0))
            self.report()
            self.do(Register(worker, self.model))

    def push(self) -> None:
        worker = self.rng.choice(self.workers)
        self.seqs[worker] = self.seqs.get(worker, 0) + 1
        base = max(0, self.coordinator.job.version - self.rng.choice([0, 0, 0, 1, 2, 5]))
        batches = tuple(BatchKey(0, self.rng.randrange(90)) for _ in range(self.rng.randint(0, 1)))
        problem = "NON_FINITE: tensor w" if self.rng.random() < 0.05 else ""
        norm = self.rng.choice([1.0, 1.0, 9.0])
        name = self.rng.choice(list(self.model.optimizers))
        key = PushKey(worker, self.seqs[worker])
        self.stage(Staged(key, 4, base, batches, problem, norm, optimizer=name))
        self.report()

    def stage(self, staged: Staged) -> None:
        for shard in range(self.shards):
            if self.rng.random() < 0.97:
                self.staged[shard].append(staged)

    def report(self) -> None:
        for shard in self.rng.sample(range(self.shards), self.rng.randint(1, self.shards)):
            count = self.rng.randint(0, 8)
            index = self.coordinator.log.index - self.rng.choice([0, 0, 3])
            report = ShardReport(shard, 0, max(0, index), tuple(self.staged[shard][-count:]))
            measurement = self.coordinator.pending.measurement
            if measurement is not None:
                report = replace(report, measured=Measured(measurement.index, 4.0))
            report_to(self.recorder, report, self.now)

    def ask(self) -> None:
        worker = self.rng.choice(self.workers)
        idle = self.rng.random() < 0.5
        self.do(LeaseBatches(worker, LOOP, self.rng.randint(0, 4), 1, idle))

    def leave(self) -> None:
        self.do(Leave(self.rng.choice(self.workers), ""))

    def lose(self) -> None:
        worker = self.rng.choice(self.workers)
        if self.rng.random() < 0.3 and worker in self.coordinator.membership.current_workers():
            self.do(Lose(worker, "its lease ended"))

    def change_policy(self) -> None:
        if self.rng.random() < 0.2:
            name, *bounds = (*self.rng.choice(POLICIES), None, None, None)[:4]
            self.do(SetPolicy(PolicySettings(name, bounds[0], bounds[1], bounds[2] or 0)))

    def change_rules(self) -> None:
        if self.rng.random() < 0.2:
            self.do(UseRules(self.draw_rules()))

    def outcome(self) -> dict[str, Any]:
        return {**self.coordinator.complete_state(), "failure": repr(self.coordinator.job.failure)}


@pytest.mark.every(2)
@pytest.mark.parametrize("part", range(4))
def test_random_histories_have_the_decisions_of_a_search(part: int) -> None:
    update_count = 0
    for seed in range(part * 60, part * 60 + 60):
        shipped, searching = History(seed, CoordinatorMachine), History(seed, SearchingMachine)
        for number in range(EVENT_COUNT):
            shipped.event()
            searching.event()
            assert shipped.outcome() == searching.outcome(), (seed, number)
        update_count += shipped.coordinator.job.version

    assert update_count > 500


class SearchingSimulation(FaultyCoordinator):
    """The coordinator of simulations, which searches."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        search_in(self)


def simulated(seed: int, coordinator: type[CoordinatorMachine]) -> tuple[object, ...]:
    world = World(Scenario.for_seed(seed), coordinator_class=coordinator)
    world.run()
    return world.updates, world.rejections, world.messages, world.weights, world.now


@pytest.mark.full
def test_simulated_histories_have_the_decisions_of_a_search() -> None:
    """Also over restarts, failovers and reshards."""
    for seed in range(120):
        assert simulated(seed, FaultyCoordinator) == simulated(seed, SearchingSimulation), seed
