"""What a simulated run looks like: who dies when is drawn, with all else, from a seed."""

import random
from dataclasses import dataclass, replace

from psserver.core.job.policy import Policy, policy
from psserver.core.job.settings import WorkerLossMode

LEASE = 5.0
SHRINK = WorkerLossMode()
HORIZON = 3000.0
PROGRESS_TIMEOUT = 7.0


@dataclass(frozen=True)
class Scenario:
    """The parameters of a run; `for_seed` draws them.

    durable: --durability log.
    returns: every killed worker is started again.
    bad: the interval of batches with NaN in their gradients; 0: none.
    standbys: number of standbys that are started.
    lag: a standby may lack the newest records when it takes over (--shipping async).
    proven: a proof of a worker's death arrives soon.
    hangs: number of scripts that make no call for a while.
    absurd: number of processes that send invalid requests.
    clip_norm: of the job's optimizer.
    collectives: scripts make collective calls after their loop.
    """

    seed: int
    policy: Policy
    workers: int
    shards: int
    batches: int
    epochs: int
    accumulate: int
    loss: float
    every: int | None
    on_loss: WorkerLossMode = SHRINK
    durable: bool = False
    returns: bool = False
    worker_kills: int = 0
    server_kills: int = 0
    pauses: int = 0
    drains: int = 0
    switches: int = 0
    bad: int = 0
    standbys: int = 0
    lag: bool = False
    reshards: int = 0
    proven: bool = False
    hangs: int = 0
    progress_timeout: float | None = None
    absurd: int = 0
    clip_norm: float | None = None
    collectives: bool = False

    @staticmethod
    def for_seed(seed: int) -> "Scenario":
        """Any job with any faults; every fourth is one that has to end with the bits of its
        quiet run.
        """
        rng = random.Random(seed)
        workers = rng.randint(1, 3)
        backup = rng.choice([0, 0, 1]) if workers > 1 else 0
        row = rng.choice(
            [
                policy("sync", backup=backup),
                policy("async"),
                policy("ssp", rng.choice([1, 1, 2, 3])),
            ]
        )
        durable = rng.random() < 0.5
        faults = rng.random() < 0.8
        standbys = rng.choice([0, 0, 1, 3]) * durable
        scenario = Scenario(
            seed,
            row,
            workers,
            shards=rng.randint(1, 3),
            batches=rng.randint(2, 5),
            epochs=rng.randint(1, 2),
            accumulate=rng.choice([1, 1, 1, 2]),
            loss=rng.choice([0.0, 0.05, 0.15]),
            every=rng.choice([None, 2, 3]),
            on_loss=rng.choice([WorkerLossMode(), WorkerLossMode("wait", 20.0)]),
            durable=durable,
            returns=rng.random() < 0.5,
            worker_kills=rng.choice([0, 1, 2, 3]) * faults,
            server_kills=rng.choice([0, 1, 3 if durable else 1]) * faults,
            pauses=rng.choice([0, 0, 1]) * faults,
            drains=rng.choice([0, 0, 0, 1]) * (workers > 1),
            switches=rng.choice([0, 0, 0, 1]) * durable,
            bad=rng.choice([0, 0, 3]) * durable,
            standbys=standbys,
            reshards=rng.choice([0, 0, 1, 2]),
            proven=random.Random(seed * 31 + 7).random() < 0.5,
            absurd=2 * (seed % 5 == 1),
            clip_norm=random.Random(seed * 131 + 3).choice([None, 1.0, 1e9]),
            collectives=random.Random(f"collectives of {seed}").random() < 0.5,
        )
        if seed % 4 == 0:
            return scenario.made_reproducible(rng)
        hangs = random.Random(f"hangs of {seed}").choice([0, 0, 1]) * faults
        timeout = PROGRESS_TIMEOUT if hangs else None
        return replace(
            scenario, lag=standbys > 0 and rng.random() < 0.5, hangs=hangs, progress_timeout=timeout
        )

    def made_reproducible(self, rng: random.Random) -> "Scenario":
        """The same job, with servers and workers that die as they like and always come back."""
        return replace(
            self,
            policy=policy("sync"),
            on_loss=WorkerLossMode("wait", 20.0),
            durable=True,
            returns=True,
            drains=0,
            switches=0,
            every=rng.choice([1, 2]),
            server_kills=rng.randint(1, 4),
            worker_kills=rng.randint(0, 3),
        )

    @property
    def is_reproducible(self) -> bool:
        """Must this run end with the very bits of one in which nothing goes wrong?"""
        row, returns = self.policy, self.on_loss.mode == "wait" and self.returns
        same_workers = not (self.drains or self.switches) and (returns or not self.worker_kills)
        if self.lag:
            return False
        stays = returns or not self.pauses
        return (
            row.barrier
            and not row.backup
            and self.durable
            and same_workers
            and stays
            and not self.hangs
        )

    @property
    def quiet(self) -> "Scenario":
        """The same job, and nothing goes wrong."""
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
            bad=self.bad,
            clip_norm=self.clip_norm,
        )
