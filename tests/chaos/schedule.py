"""Schedule of faults, drawn from a seed so that a run can be repeated."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "kill server",
    "kill worker",
    "stop server",
    "stop worker",
    "cut",
    "half-open",
    "reset",
    "slow link",
    "full disk",
]

SECONDS: dict[Kind, tuple[float, float]] = {
    "kill server": (0.0, 0.0),
    "kill worker": (0.0, 0.0),
    "stop server": (0.2, 3.0),
    "stop worker": (0.2, 8.0),
    "cut": (0.2, 4.0),
    "half-open": (0.2, 4.0),
    "reset": (0.0, 0.0),
    "slow link": (1.0, 6.0),
    "full disk": (1.0, 6.0),
}
"""Shortest and longest duration. Killed processes are restarted at once, as ps-run does."""

QUIET = 5.0
"""Seconds without faults at the start and the end, for joining and for the last recovery."""


@dataclass(frozen=True, order=True)
class Fault:
    """One fault. at: start relative to the job, in seconds; target: shard or rank; a full disk
    affects all.
    """

    at: float
    kind: Kind
    target: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.at:7.2f} s  {self.kind} {self.target}" + (
            f" for {self.seconds:.2f} s" if self.seconds else ""
        )


def draw_faults(
    seed: str, seconds: float, shards: int, workers: int, gap: float, kinds: Sequence[Kind]
) -> list[Fault]:
    """Draw the faults of a run. gap: mean seconds between the end of a fault and the next fault."""
    rng, faults, now = random.Random(seed), [], QUIET
    while True:
        now += rng.uniform(0.5 * gap, 1.5 * gap)
        kind = rng.choice(kinds)
        fault = Fault(
            now,
            kind,
            rng.randrange(workers if kind.endswith("worker") else shards),
            _draw_duration(rng, kind),
        )
        if fault.at + fault.seconds > seconds - QUIET:
            return faults
        faults.append(fault)
        # one fault in four overlaps the next
        now += fault.seconds if rng.random() < 0.75 else 0.0


def _draw_duration(rng: random.Random, kind: Kind) -> float:
    return round(rng.uniform(*SECONDS[kind]), 2)
