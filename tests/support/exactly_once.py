"""Pushes of ones through network faults and server crashes: acknowledged pushes count once.

Program: python -m tests.support.exactly_once --pushes 10000
"""

import random
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click

from tests.support.proxied_job import ProxiedJob, lines
from tests.support.worker_scripts import count
from tests.support.workers import counted, status, weights_of

POLICIES = {
    "sync": ("--policy", "sync"),
    "async": ("--policy", "async"),
    "ssp": ("--policy", "ssp", "--staleness", 2),
}
FLAGS = (
    "--lease",
    "60s",
    "--min-workers",
    2,
    "--durability",
    "log",
    "--snapshot-every",
    "200steps",
)
WORKERS = 2
LANES = {"sync": ("grpc", "auto"), "async": ("stream", "auto"), "ssp": ("stream", "grpc")}
"""Lanes of worker 0 and worker 1, by policy."""

RULES = "*=-1:2%:2%:2%"
KILLS = 2
RESET_SECONDS = 1.0
SECONDS_A_PUSH = 0.1
END = re.compile(r"acknowledged (\d+), fenced (\d+), faults (\d+)")


@dataclass(frozen=True)
class Tally:
    """Result of one run.

    counted: pushes in the weights, under sync rounds.
    steps: pushes that the coordinator counted.
    """

    acknowledged: int
    fenced: int
    counted: int
    steps: int
    version: int
    faults: int
    resets: int
    kills: int
    seconds: float


class FaultInjector:
    """Resets random connections and kills a server at each of KILLS points of progress."""

    def __init__(self, job: ProxiedJob, seed: int, pushes: int) -> None:
        self.resets = self.kills = 0
        self._job, self._random = job, random.Random(seed)
        self._marks = [pushes * (number + 1) // (KILLS + 1) for number in range(KILLS)]
        self._next = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._random.uniform(0.0, 2 * RESET_SECONDS)
            self._random.choice(self._job.all_proxies).reset()
            self.resets += 1
        done = sum(len(lines(self._job.processes[f"w{rank}"], "pushed")) for rank in range(WORKERS))
        if self.kills < len(self._marks) and done >= self._marks[self.kills]:
            self._job.processes[f"s{self.kills % 2}"].kill()
            self.kills += 1


def run(folder: Path, policy: str, pushes: int, seed: int = 1) -> Tally:
    """Run two workers with `pushes` pushes in all, against two servers."""
    began = time.monotonic()
    pushes_per_worker = pushes // WORKERS
    with ProxiedJob(
        folder,
        2,
        (*POLICIES[policy], *FLAGS),
        count,
        seed,
        pushes=pushes_per_worker,
        lanes=LANES[policy],
        faults=RULES,
    ) as job:
        job.start_all(WORKERS)
        injector = FaultInjector(job, seed, pushes)
        job.supervise(job.workers_done, 60 + pushes * SECONDS_A_PUSH, injector)
        ends = [
            END.search(lines(job.processes[f"w{rank}"], "acknowledged")[0])
            for rank in range(WORKERS)
        ]
        acknowledged, fenced, faults = (
            sum(int(end[group]) for end in ends if end) for group in (1, 2, 3)
        )
        job_status = status(job.address)
        counted_pushes = counted(weights_of(job.address))
    return Tally(
        acknowledged,
        fenced,
        counted_pushes,
        job_status["steps"],
        job_status["version"],
        faults,
        injector.resets,
        injector.kills,
        time.monotonic() - began,
    )


def check(tally: Tally, policy: str, pushes: int) -> None:
    """Raise AssertionError if a push was lost or repeated, or if no fault was injected."""
    assert (tally.acknowledged, tally.fenced, tally.steps) == (pushes, 0, pushes), tally
    assert tally.counted == tally.version == (pushes // WORKERS if policy == "sync" else pushes), (
        tally
    )
    assert tally.kills == KILLS, tally
    assert min(tally.resets, tally.faults) > 0, tally


@click.command()
@click.option("--pushes", default=10_000, show_default=True, help="For each policy.")
@click.option("--seed", default=1, show_default=True)
@click.argument("policies", nargs=-1, type=click.Choice(list(POLICIES)))
def main(pushes: int, seed: int, policies: tuple[str, ...]) -> None:
    """Run all policies, or those given, and print the result of each."""
    for policy in policies or POLICIES:
        with tempfile.TemporaryDirectory(prefix="ps-") as folder:
            tally = run(Path(folder), policy, pushes, seed)
        click.echo(f"{policy}: {tally}")
        check(tally, policy, pushes)


if __name__ == "__main__":
    main()
