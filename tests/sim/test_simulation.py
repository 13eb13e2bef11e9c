"""Ten thousand random histories keep every invariant, and each planted bug is found."""

import cProfile
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import psserver.core.commands.recorder as recorder_module
import psserver.core.shard.state_machine as shard_module
from pscommon.core.log_entries import Apply, Cut, Entry
from psserver.core.commands.recorder import HUNG
from psserver.core.job.policy import policy
from psserver.core.job.settings import WorkerLossMode
from tests.sim import (
    clipping_mutants,
    collective_mutants,
    directory_mutants,
    mutants,
    optimizer_mutants,
    pass_mutants,
)
from tests.sim.arrays import WEIGHT_COUNT, partition_of
from tests.sim.invariants import InvariantError
from tests.sim.scenario import Scenario
from tests.sim.servers import SimShard
from tests.sim.world import World, run

SEEDS = 10_000
PARTS, PROCESSES = 10, 2
CALLS_PER_HISTORY_COUNT = 30_000
"""Maximum mean of Python calls. Calls are counted because CPU time varies by a factor of two on a
shared machine; 25 400 calls take 20 ms.
"""
MUTANT_SEEDS = 400
ROOT = Path(__file__).parents[2]


def run_range(first: int, last: int) -> None:
    """Run these seeds. The first failure ends the process and names the command to replay it."""
    for seed in range(first, last):
        try:
            run(seed)
        except Exception as error:
            sys.exit(
                f"seed {seed}: {type(error).__name__}: {error}\nreplay: python -m "
                f"tests.sim.replay {seed}"
            )


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_ten_thousand_histories_keep_every_invariant(part: int) -> None:
    """Run a tenth of the seeds, so that one case ends within the timeout on a busy machine."""
    share = SEEDS // PARTS // PROCESSES
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
    failures = [message for _, message in [child.communicate() for child in children] if message]

    assert not failures, "\n".join(failures)
    assert [child.returncode for child in children] == [0] * PROCESSES


def test_a_history_takes_few_calls() -> None:
    """A history of twice the calls would double the minutes that all histories take."""
    profile = cProfile.Profile(builtins=False)
    profile.runcall(run_range, 0, 40)

    calls = sum(entry.callcount for entry in profile.getstats())
    assert calls <= 40 * CALLS_PER_HISTORY_COUNT


@pytest.mark.full
def test_seeds_reach_each_fault() -> None:
    """The histories keep every invariant, and contain enough of each kind of fault."""
    seen: Counter[str] = Counter()
    for seed in range(600):
        world = run(seed)
        seen[world.scenario.policy.name] += 1
        seen["restart"] += world.restarts > 0
        seen["recovery"] += world.restarts > 0 and world.scenario.has_log
        seen["failover"] += world.takeovers > 0
        seen["rollback to a snapshot"] += world.rollbacks > 0 and world.snapshot is not None
        seen["failover to a lagging standby"] += (
            world.takeovers > 0 and world.scenario.has_lagging_standbys
        )
        seen["reproducible restart"] += world.scenario.is_reproducible and world.restarts > 0
        seen["lost"] += any(member.state == "lost" for member in world.coordinator.membership)
        seen["hung"] += any(HUNG in member.reason for member in world.coordinator.membership)
        seen["failover and reshard"] += world.takeovers > 0 and world.reshards > 0
        seen["reshard"] += world.reshards > 0
        seen["reshard and restart"] += world.reshards > 0 and world.restarts > 0
        seen["proof of death"] += world.death_proofs > 0
        seen["collective call"] += len(world.collective_results) > 0
        seen["collective call and restart"] += (
            len(world.collective_results) > 0 and world.restarts > 0
        )
        seen["round of two optimizers"] += has_round_of_two_optimizers(world)
        seen["messages"] += world.messages
        seen.update({f"{name} during a measurement": 1 for name in world.measure_interruptions})

    frequent = (
        "sync",
        "async",
        "ssp",
        "restart",
        "recovery",
        "failover",
        "lost",
        "reshard",
        "reshard and restart",
        "proof of death",
        "collective call",
        "collective call and restart",
    )
    assert min(seen[name] for name in frequent) >= 20
    assert seen["hung"] >= 5
    rare = (
        "rollback to a snapshot",
        "reproducible restart",
        "failover and reshard",
        "failover to a lagging standby",
        "round of two optimizers",
    )
    assert min(seen[name] for name in rare) >= 5
    amid = ("evict", "reshard", "cut", "restart", "takeover", "measure", "reject")
    assert min(seen[f"{name} during a measurement"] for name in amid) >= 3
    assert seen["messages"] > 20_000


def has_round_of_two_optimizers(world: World) -> bool:
    """Return whether a sync round has updated both optimizers."""
    names = [world.pushes[apply.contributions[0].key].staged.optimizer for apply in world.updates]
    pairs = zip(pairwise(world.updates), pairwise(names), strict=True)
    return world.scenario.policy.barrier and any(
        one.index + 1 == other.index and name != other_name
        for (one, other), (name, other_name) in pairs
    )


@pytest.mark.full
def test_histories_keep_every_invariant_if_departed_workers_are_dropped_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both the coordinator and the shards drop them."""
    monkeypatch.setattr(recorder_module, "MAX_DEPARTED_COUNT", 0)
    monkeypatch.setattr(shard_module, "MAX_EVICTED_WORKERS", 1)
    dropped_count = 0
    for seed in range(600):
        world = run(seed)
        dropped_count += sum(world.coordinator.membership.departed.states.values())

    assert dropped_count >= 100


CLASSES = mutants.CLASSES | clipping_mutants.CLASSES
PATCHES = (
    mutants.PATCHES
    | clipping_mutants.PATCHES
    | collective_mutants.PATCHES
    | directory_mutants.PATCHES
    | optimizer_mutants.PATCHES
    | pass_mutants.PATCHES
)
SCENARIOS = {
    **mutants.SCENARIOS,
    **clipping_mutants.SCENARIOS,
    **collective_mutants.SCENARIOS,
    **directory_mutants.SCENARIOS,
    **optimizer_mutants.SCENARIOS,
    **pass_mutants.SCENARIOS,
}


@pytest.mark.every(5)
@pytest.mark.parametrize("name", list(CLASSES | PATCHES))
def test_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    classes = CLASSES.get(name, {})
    if name in PATCHES:
        monkeypatch.setattr(*PATCHES[name])

    changed = SCENARIOS.get(name, lambda scenario: scenario)

    def histories() -> None:
        for seed in range(MUTANT_SEEDS):
            World(changed(Scenario.for_seed(seed)), **classes).run()  # type: ignore[arg-type]

    with pytest.raises(AssertionError):
        histories()


def without_kills(policy_name: str, workers: int, seed: int) -> Scenario:
    """Return a scenario with delays and losses, and without killed processes."""
    job_policy = policy(policy_name, 2 if policy_name == "ssp" else None)
    return Scenario(
        seed,
        job_policy,
        workers,
        shards=2,
        batches=7,
        epochs=2,
        accumulate=1,
        message_loss=0.1,
        snapshot_interval=None,
    )


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_sync_gives_the_same_bits_on_any_network(workers: int) -> None:
    """Delays, losses and repeats of messages do not change the weights."""
    results = set()
    for seed in range(20):
        world = World(without_kills("sync", workers, seed))
        world.run()
        results.add(tuple(world.weights))

    assert len(results) == 1


def test_async_depends_on_the_network() -> None:
    """Without the barrier the same seeds give different bits, so the test above can fail."""
    results = set()
    for seed in range(20):
        world = World(without_kills("async", 3, seed))
        world.run()
        results.add(tuple(world.weights))

    assert len(results) > 1


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_clipped_sync_gives_the_same_bits_on_any_network(shards: int) -> None:
    """The time at which reports arrive does not change the measured norms."""
    results = set()
    for seed in range(20):
        world = World(replace(without_kills("sync", 3, seed), shards=shards, clip_norm=1e6))
        world.run()
        results.add(tuple(world.weights))

    assert len(results) == 1


@pytest.mark.every(5)
@pytest.mark.parametrize("part", range(5))
def test_a_cut_is_one_version_on_all_shards(part: int) -> None:
    for seed in range(part * 40, part * 40 + 40):
        scenario = replace(
            Scenario.for_seed(seed),
            snapshot_interval=2,
            server_kills=0,
            reshards=0,
            has_lagging_standbys=False,
            trainings=1,  # the parts of an earlier one are of other updates
        )
        world = World(scenario)
        world.run()
        for shard in world.shards:
            for version, weights in shard.disk.parts.values():
                assert weights == weights_at(world, shard, version)


def weights_at(world: World, shard: SimShard, version: int) -> list[float]:
    """Return the weights of a shard at a version, from the world's own record of pushes."""
    return partition_of(
        [weight_at(world, index, version) for index in range(WEIGHT_COUNT)],
        shard.machine.shard,
        shard.shards,
    )


def weight_at(world: World, index: int, version: int) -> float:
    weight = 1.0
    for apply in world.updates[:version]:
        total, mean = sum(c.samples for c in apply.contributions), 0.0
        for contribution in apply.contributions:
            share = contribution.samples / total * contribution.scale
            mean += world.pushes[contribution.key].gradients[index] * share
        weight -= mean
    return weight


def test_shard_carries_out_each_entry_once_and_in_order() -> None:
    from psserver.core.shard.state_machine import ShardMachine

    shard = ShardMachine(0)
    shard.follow(1, 0)
    entries: list[Entry] = [Cut(1, 0), Cut(2, 0), Cut(3, 0)]
    indexes = [
        e.index
        for part in ([2], [1, 2], [1], [3, 1])
        for e in shard.accept(1, [entries[i - 1] for i in part])
    ]

    assert indexes == [1, 2, 3]


def test_shard_refuses_to_apply_a_push_that_it_does_not_hold() -> None:
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
def test_workers_continue_without_a_hanging_one_only_with_a_progress_timeout(
    policy_name: str, on_loss: WorkerLossMode, timeout: float | None
) -> None:
    """`wait` does not hold the rank of a worker that hangs. The worker does not rejoin before its
    script continues.
    """
    world = World(
        replace(
            without_kills(policy_name, 2, 1), batches=12, on_loss=on_loss, progress_timeout=timeout
        )
    )
    are_loops_ended, start_counts = list[bool](), list[int]()

    def hang() -> None:
        hung = world.workers[1]
        hung.hangs_from, hung.hangs_until = world.now, 200.0

    def record_state() -> None:
        are_loops_ended.append(all(loop.ended for loop in world.coordinator.ledger.loops.values()))
        start_counts.append(world.workers[1].start_count)

    world.after(2.0, hang)
    world.after(199.0, record_state)
    world.run()

    assert (are_loops_ended, start_counts) == ([timeout is not None], [1])
