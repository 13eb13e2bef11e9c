"""Ten thousand seeded histories keep every invariant, and each planted bug is caught."""

import os
import resource
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import psserver.core.commands.recorder as recorder_module
import psserver.core.shard.state_machine as shard_module
from pscommon.core.log_entries import Apply, Cut, Entry
from psserver.core.commands.ended_leases import HUNG
from psserver.core.job.policy import policy
from psserver.core.job.settings import WorkerLossMode
from tests.sim import clipping_mutants, collective_mutants, directory_mutants, mutants
from tests.sim.arrays import UNITS, part_of
from tests.sim.invariants import InvariantError
from tests.sim.scenario import Scenario
from tests.sim.servers import SimShard
from tests.sim.world import World, run

SEEDS = 10_000
PARTS, PROCESSES = 10, 2
CORE_SECONDS = 200.0
"""Seconds of one core for all seeds."""
MUTANT_SEEDS = 400
ROOT = Path(__file__).parents[2]


def run_range(first: int, last: int) -> None:
    """Body of a child process: the first seed that fails ends it with a one-line replay."""
    for seed in range(first, last):
        try:
            run(seed)
        except Exception as error:
            sys.exit(
                f"seed {seed}: {type(error).__name__}: {error}\nreplay: python -m "
                f"tests.sim.replay {seed}"
            )


def children_seconds() -> float:
    """What processes that were started here, and have ended, have had of the processors."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.every(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_ten_thousand_histories_keep_every_invariant(part: int) -> None:
    """A tenth of them: however busy the machine is, that is done in the time that a test has."""
    before, share = children_seconds(), SEEDS // PARTS // PROCESSES
    code = (
        "import logging, sys; from tests.sim.test_simulation import run_range; "
        "logging.disable(); "  # planted errors are logged
        "run_range(int(sys.argv[1]), int(sys.argv[2]))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "common")])}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(n * share), str((n + 1) * share)],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(part * PROCESSES, (part + 1) * PROCESSES)
    ]
    failures = [message for child in children if (message := child.communicate()[1])]

    assert not failures, "\n".join(failures)
    assert [child.returncode for child in children] == [0] * PROCESSES
    assert children_seconds() - before <= CORE_SECONDS / PARTS


def test_the_seeds_reach_what_they_should() -> None:
    """A simulation in which nothing goes wrong proves nothing: losses, restarts, snapshots and
    waits do happen.
    """
    seen: Counter[str] = Counter()
    for seed in range(600):
        world = run(seed)
        seen[world.scenario.policy.name] += 1
        seen["restarted"] += world.restarts > 0
        seen["recovered"] += world.restarts > 0 and world.scenario.durable
        seen["taken over"] += world.takeovers > 0
        seen["gone back to a snapshot"] += world.rollbacks > 0 and world.saved is not None
        seen["taken over by one that lags"] += world.takeovers > 0 and world.scenario.lag
        seen["reproduced"] += world.scenario.is_reproducible and world.restarts > 0
        seen["lost"] += any(member.state == "lost" for member in world.coordinator.membership)
        seen["hung"] += any(HUNG in member.reason for member in world.coordinator.membership)
        seen["taken over in a job that moved"] += world.takeovers > 0 and world.moves > 0
        seen["moved"] += world.moves > 0
        seen["moved among restarts"] += world.moves > 0 and world.restarts > 0
        seen["proven dead"] += world.proofs > 0
        seen["called"] += len(world.results) > 0
        seen["called among restarts"] += len(world.results) > 0 and world.restarts > 0
        seen["messages"] += world.messages
        seen.update({f"{name} amid a measure": 1 for name in world.amid_measures})

    reached = (
        "sync",
        "async",
        "ssp",
        "restarted",
        "recovered",
        "taken over",
        "lost",
        "moved",
        "moved among restarts",
        "proven dead",
        "called",
        "called among restarts",
    )
    assert min(seen[name] for name in reached) >= 20
    assert seen["hung"] >= 5
    fewer = (
        "gone back to a snapshot",
        "reproduced",
        "taken over in a job that moved",
        "taken over by one that lags",
    )
    assert min(seen[name] for name in fewer) >= 5
    amid = ("evict", "reshard", "cut", "restart", "takeover", "measure", "reject")
    assert min(seen[f"{name} amid a measure"] for name in amid) >= 3
    assert seen["messages"] > 20_000


@pytest.mark.full
def test_histories_keep_every_invariant_if_departed_workers_are_dropped_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the coordinator and by the shards."""
    monkeypatch.setattr(recorder_module, "MAX_DEPARTED_COUNT", 0)
    monkeypatch.setattr(shard_module, "MAX_EVICTED_WORKERS", 1)
    dropped_count = 0
    for seed in range(600):
        world = run(seed)
        dropped_count += sum(world.coordinator.membership.run.dropped.states.values())

    assert dropped_count >= 100


CLASSES = mutants.CLASSES | clipping_mutants.CLASSES
PATCHES = (
    mutants.PATCHES
    | clipping_mutants.PATCHES
    | collective_mutants.PATCHES
    | directory_mutants.PATCHES
)
SCENARIOS = {
    **mutants.SCENARIOS,
    **clipping_mutants.SCENARIOS,
    **collective_mutants.SCENARIOS,
    **directory_mutants.SCENARIOS,
}


@pytest.mark.every(5)
@pytest.mark.parametrize("name", list(CLASSES | PATCHES))
def test_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    classes = CLASSES.get(name, {})
    if name in PATCHES:
        monkeypatch.setattr(*PATCHES[name])

    drawn = SCENARIOS.get(name, lambda scenario: scenario)

    def histories() -> None:
        for seed in range(MUTANT_SEEDS):
            World(drawn(Scenario.for_seed(seed)), **classes).run()  # type: ignore[arg-type]

    with pytest.raises(AssertionError):
        histories()


def quiet(policy_name: str, workers: int, seed: int) -> Scenario:
    """Return a scenario with delays and losses, and without killed processes."""
    row = policy(policy_name, 2 if policy_name == "ssp" else None)
    return Scenario(
        seed, row, workers, shards=2, batches=7, epochs=2, accumulate=1, loss=0.1, every=None
    )


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_sync_gives_the_same_bits_on_any_network(workers: int) -> None:
    """Delays, losses and repeats change when things happen, never what is computed."""
    results = set()
    for seed in range(20):
        world = World(quiet("sync", workers, seed))
        world.run()
        results.add(tuple(world.weights))

    assert len(results) == 1


def test_async_depends_on_the_network() -> None:
    """The counterpart: without the barrier the same seeds do differ, so the test above can fail."""
    results = set()
    for seed in range(20):
        world = World(quiet("async", 3, seed))
        world.run()
        results.add(tuple(world.weights))

    assert len(results) > 1


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_clipped_sync_gives_the_same_bits_on_any_network(shards: int) -> None:
    """What is measured, and so how much an update is clipped, does not depend on when reports
    come.
    """
    results = set()
    for seed in range(20):
        world = World(replace(quiet("sync", 3, seed), shards=shards, clip_norm=1e6))
        world.run()
        results.add(tuple(world.weights))

    assert len(results) == 1


def test_a_cut_is_one_version_on_all_shards() -> None:
    for seed in range(200):
        scenario = replace(Scenario.for_seed(seed), every=2, server_kills=0, reshards=0, lag=False)
        world = World(scenario)
        world.run()
        for shard in world.shards:
            for version, numbers in shard.disk.parts.values():
                assert numbers == replayed(world, shard, version)


def replayed(world: World, shard: SimShard, version: int) -> list[float]:
    """The weights of a shard at a version, from the world's own record."""
    return part_of(
        [unit_at(world, unit, version) for unit in range(UNITS)], shard.machine.shard, shard.shards
    )


def unit_at(world: World, unit: int, version: int) -> float:
    weight = 1.0
    for apply in world.decided[:version]:
        total, mean = sum(c.samples for c in apply.contributions), 0.0
        for contribution in apply.contributions:
            share = contribution.samples / total * contribution.scale
            mean += world.pushes[contribution.key].gradients[unit] * share
        weight -= mean
    return weight


def test_shard_carries_out_each_entry_once_and_in_order() -> None:
    from psserver.core.shard.state_machine import ShardMachine

    shard = ShardMachine(0)
    shard.follow(1, 0)
    entries: list[Entry] = [Cut(1, 0), Cut(2, 0), Cut(3, 0)]
    carried = [
        e.index
        for part in ([2], [1, 2], [1], [3, 1])
        for e in shard.accept(1, [entries[i - 1] for i in part])
    ]

    assert carried == [1, 2, 3]


def test_shard_refuses_to_apply_what_it_does_not_hold() -> None:
    from pscommon.core.log_entries import Contribution, PushKey
    from psserver.core.shard.state_machine import LogInvariantError, ShardMachine

    shard = ShardMachine(0)
    shard.begun = True

    with pytest.raises(LogInvariantError):
        shard.done(Apply(1, 1, (Contribution(PushKey(1, 1), 1, 0),)))


def test_failure_names_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        World, "verify", lambda self: (_ for _ in ()).throw(InvariantError("planted"))
    )

    with pytest.raises(
        SystemExit, match=r"seed 7: .*planted\nreplay: python -m tests.sim.replay 7"
    ):
        run_range(7, 8)


@pytest.mark.parametrize("timeout", [None, 7.0])
@pytest.mark.parametrize("on_loss", [WorkerLossMode(), WorkerLossMode("wait", 500.0)], ids=str)
@pytest.mark.parametrize("policy_name", ["sync", "ssp"])
def test_others_go_on_without_a_worker_whose_script_hangs_where_there_is_a_progress_timeout(
    policy_name: str, on_loss: WorkerLossMode, timeout: float | None
) -> None:
    """Its place is not kept: it lives. It comes back as a new worker, and not before its script
    does.
    """
    world = World(
        replace(quiet(policy_name, 2, 1), batches=12, on_loss=on_loss, progress_timeout=timeout)
    )
    ended, places = list[bool](), list[int]()

    def hang() -> None:
        hung = world.workers[1]
        hung.hangs_from, hung.hangs_until = world.now, 200.0

    def look_at_loops() -> None:
        ended.append(all(loop.ended for loop in world.coordinator.ledger.loops.values()))
        places.append(world.workers[1].begun)

    world.after(2.0, hang)
    world.after(199.0, look_at_loops)
    world.run()

    assert (ended, places) == ([timeout is not None], [1])
