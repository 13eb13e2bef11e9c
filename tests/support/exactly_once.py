"""Pushes of one each through everything that networks and dying servers do: what has counted is
what was acknowledged.

As a program: python -m tests.support.exactly_once --pushes 10000
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
LANES = ("grpc", "auto")
"""Worker 0's and worker 1's: over the network, and through shared memory."""

RULES = "*.AttachMemory=0:0%:0%,*=-1:2%:2%:2%"
"""But for the offer of shared memory: one that is lost makes a worker go on without."""
KILLS = 2
RESET_SECONDS = 1.0
SECONDS_A_PUSH = 0.1
END = re.compile(r"acknowledged (\d+), fenced (\d+), faults (\d+)")


@dataclass(frozen=True)
class Tally:
    """Of one run. counted: in the weights, which in sync counts rounds; steps: pushes that the
    coordinator counts.
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


class Havoc:
    """Resets connections at random moments, and kills a server at each of a few shares of the
    way.
    """

    def __init__(self, job: ProxiedJob, seed: int, pushes: int) -> None:
        self.resets = self.kills = 0
        self._job, self._random = job, random.Random(seed)
        self._marks = [pushes * (number + 1) // (KILLS + 1) for number in range(KILLS)]
        self._next = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._random.uniform(0.0, 2 * RESET_SECONDS)
            self._random.choice(self._job.everywhere).reset()
            self.resets += 1
        done = sum(len(lines(self._job.lives[f"w{rank}"], "pushed")) for rank in range(WORKERS))
        if self.kills < len(self._marks) and done >= self._marks[self.kills]:
            self._job.lives[f"s{self.kills % 2}"].kill()
            self.kills += 1


def run(folder: Path, policy: str, pushes: int, seed: int = 1) -> Tally:
    """So many pushes in all, by two workers, to two servers."""
    began = time.monotonic()
    each = pushes // WORKERS
    with ProxiedJob(
        folder, 2, (*POLICIES[policy], *FLAGS), count, seed, pushes=each, lanes=LANES, faults=RULES
    ) as job:
        job.start_all(WORKERS)
        havoc = Havoc(job, seed, pushes)
        job.tend(job.workers_done, 60 + pushes * SECONDS_A_PUSH, havoc)
        ends = [
            END.search(lines(job.lives[f"w{rank}"], "acknowledged")[0]) for rank in range(WORKERS)
        ]
        acknowledged, fenced, faults = (
            sum(int(end[place]) for end in ends if end) for place in (1, 2, 3)
        )
        seen = status(job.address)
        found = counted(weights_of(job.address))
    return Tally(
        acknowledged,
        fenced,
        found,
        seen["steps"],
        seen["version"],
        faults,
        havoc.resets,
        havoc.kills,
        time.monotonic() - began,
    )


def check(tally: Tally, policy: str, pushes: int) -> None:
    """AssertionError where something was lost or counted twice, or where nothing was tried."""
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
    """Runs all policies, or those named, and prints what came of each."""
    for policy in policies or POLICIES:
        with tempfile.TemporaryDirectory(prefix="ps-") as folder:
            tally = run(Path(folder), policy, pushes, seed)
        click.echo(f"{policy}: {tally}")
        check(tally, policy, pushes)


if __name__ == "__main__":
    main()
