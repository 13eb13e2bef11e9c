"""The parameters of a simulated job, drawn from a seed."""

import random
from dataclasses import dataclass, replace

from psserver.core.job.policy import Policy, policy
from psserver.core.job.settings import WorkerLossMode

LEASE_SECONDS = 5.0
SHRINK = WorkerLossMode()
END_SECONDS = 3000.0
PROGRESS_TIMEOUT_SECONDS = 7.0
ONE_OPTIMIZER, TWO_OPTIMIZERS = ("",), ("d", "g")


@dataclass(frozen=True)
class Scenario:
    """The parameters of a simulated job and its faults.

    Attributes:
        seed: Seed of all random draws.
        workers, shards: Numbers of workers and shards at the start.
        batches, epochs: Batches per epoch and epochs of the loop.
        accumulate: Batches per push.
        message_loss: Probability that a message is lost, and that one is repeated.
        snapshot_interval: Updates between two snapshots; None: no snapshots.
        on_loss: --on-worker-loss.
        has_log: --durability log.
        restarts_workers: Every killed worker is started again.
        worker_kills, server_kills: Numbers of kills of workers and servers.
        pauses: Number of times that a worker's process is stopped.
        drains: Number of times that a worker is asked to leave.
        policy_switches: Number of changes of the policy.
        bad_batch_interval: One of this number of pushes contains NaN; 0: none.
        standbys: Number of standbys that are started.
        has_lagging_standbys: A standby may lack the newest records when an operator promotes it
            without --failover-lock.
        reshards: Number of reshards.
        proves_deaths: The coordinator receives a proof soon after a worker is killed.
        hangs: Number of times that a script makes no call for a while.
        progress_timeout: --progress-timeout.
        invalid_senders: Number of processes that send invalid requests.
        clip_norm: Clip norm of the job's optimizer.
        collectives: Scripts make collective calls after their loop.
        optimizers: Names of the job's optimizers, which step in turn for each batch.
        test_interval: Pushes between two passes over the test data; those of each rank have
            another interval, so workers begin the passes in different orders. 0: none.
        trainings: Number of trainings that each script makes, one after another.
        sends_buffers: Scripts send a push of buffers only after every third one of gradients.
    """

    seed: int
    policy: Policy
    workers: int
    shards: int
    batches: int
    epochs: int
    accumulate: int
    message_loss: float
    snapshot_interval: int | None
    on_loss: WorkerLossMode = SHRINK
    has_log: bool = False
    restarts_workers: bool = False
    worker_kills: int = 0
    server_kills: int = 0
    pauses: int = 0
    drains: int = 0
    policy_switches: int = 0
    bad_batch_interval: int = 0
    standbys: int = 0
    has_lagging_standbys: bool = False
    reshards: int = 0
    proves_deaths: bool = False
    hangs: int = 0
    progress_timeout: float | None = None
    invalid_senders: int = 0
    clip_norm: float | None = None
    collectives: bool = False
    optimizers: tuple[str, ...] = ONE_OPTIMIZER
    test_interval: int = 0
    trainings: int = 1
    sends_buffers: bool = False

    @staticmethod
    def for_seed(seed: int) -> "Scenario":
        """Draw the scenario of a seed.

        Every fourth job must end with the same bits as the job without faults.
        """
        rng = random.Random(seed)
        workers = rng.randint(1, 3)
        backup = rng.choice([0, 0, 1]) if workers > 1 else 0
        job_policy = rng.choice(
            [
                policy("sync", backup=backup),
                policy("async"),
                policy("ssp", rng.choice([1, 1, 2, 3])),
            ]
        )
        has_log = rng.random() < 0.5
        faults = rng.random() < 0.8
        standbys = rng.choice([0, 0, 1, 3]) * has_log
        scenario = Scenario(
            seed,
            job_policy,
            workers,
            shards=rng.randint(1, 3),
            batches=rng.randint(2, 5),
            epochs=rng.randint(1, 2),
            accumulate=rng.choice([1, 1, 1, 2]),
            message_loss=rng.choice([0.0, 0.05, 0.15]),
            snapshot_interval=rng.choice([None, 2, 3]),
            on_loss=rng.choice([WorkerLossMode(), WorkerLossMode("wait", 20.0)]),
            has_log=has_log,
            restarts_workers=rng.random() < 0.5,
            worker_kills=rng.choice([0, 1, 2, 3]) * faults,
            server_kills=rng.choice([0, 1, 3 if has_log else 1]) * faults,
            pauses=rng.choice([0, 0, 1]) * faults,
            drains=rng.choice([0, 0, 0, 1]) * (workers > 1),
            policy_switches=rng.choice([0, 0, 0, 1]) * has_log,
            bad_batch_interval=rng.choice([0, 0, 3]) * has_log,
            standbys=standbys,
            reshards=rng.choice([0, 0, 1, 2]),
            proves_deaths=random.Random(seed * 31 + 7).random() < 0.5,
            invalid_senders=2 * (seed % 5 == 1),
            clip_norm=random.Random(seed * 131 + 3).choice([None, 1.0, 1e9]),
            collectives=random.Random(f"collectives of {seed}").random() < 0.5,
            optimizers=random.Random(f"optimizers of {seed}").choice(
                [ONE_OPTIMIZER, ONE_OPTIMIZER, TWO_OPTIMIZERS]
            ),
        )
        if seed % 4 == 0:
            return scenario.as_reproducible(rng)
        hangs = random.Random(f"hangs of {seed}").choice([0, 0, 1]) * faults
        timeout = PROGRESS_TIMEOUT_SECONDS if hangs else None
        return replace(
            scenario,
            has_lagging_standbys=standbys > 0 and rng.random() < 0.5,
            hangs=hangs,
            progress_timeout=timeout,
            trainings=random.Random(f"trainings of {seed}").choice([1] * 14 + [2, 3]),
            test_interval=random.Random(f"tests of {seed}").choice([0] * 8 + [1, 2]),
            sends_buffers=random.Random(f"buffers of {seed}").random() < 0.05,
        )

    def as_reproducible(self, rng: random.Random) -> "Scenario":
        """Return the same job under sync, where killed servers and workers always restart."""
        return replace(
            self,
            policy=policy("sync"),
            on_loss=WorkerLossMode("wait", 20.0),
            has_log=True,
            restarts_workers=True,
            drains=0,
            policy_switches=0,
            snapshot_interval=rng.choice([1, 2]),
            server_kills=rng.randint(1, 4),
            # a worker that dies between two steps of a batch loses the second one
            worker_kills=rng.randint(0, 3) * (self.optimizers == ONE_OPTIMIZER),
        )

    @property
    def is_reproducible(self) -> bool:
        """Whether the job must end with the same bits as the job without faults."""
        job_policy, replaces_workers = (
            self.policy,
            self.on_loss.mode == "wait" and self.restarts_workers,
        )
        same_workers = not (self.drains or self.policy_switches) and (
            replaces_workers or not self.worker_kills
        )
        if self.has_lagging_standbys or self.test_interval or self.trainings > 1:
            return False
        survives_pauses = replaces_workers or not self.pauses
        if self.optimizers != ONE_OPTIMIZER and (self.worker_kills or self.pauses):
            return False
        return (
            job_policy.barrier
            and not job_policy.backup
            and self.has_log
            and same_workers
            and survives_pauses
            and not self.hangs
        )

    @property
    def without_faults(self) -> "Scenario":
        """The same job without faults."""
        return Scenario(
            self.seed,
            self.policy,
            self.workers,
            self.shards,
            self.batches,
            self.epochs,
            self.accumulate,
            0.0,
            None,
            bad_batch_interval=self.bad_batch_interval,
            clip_norm=self.clip_norm,
            optimizers=self.optimizers,
        )
