"""What goes wrong when: drawn from a seed, so that a run can be repeated."""

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
"""How long each lasts: least and most. What was killed is started again at once, as ps-run
would.
"""

QUIET = 5.0
"""Seconds without faults at the start and at the end: everybody has to come, and the last fault
has to heal.
"""


@dataclass(frozen=True, order=True)
class Fault:
    """at, seconds: since the start of the act. target: the shard or the rank; the disk is
    everybody's.
    """

    at: float
    kind: Kind
    target: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.at:7.2f} s  {self.kind} {self.target}" + (
            f" for {self.seconds:.2f} s" if self.seconds else ""
        )


def drawn(
    seed: str, seconds: float, shards: int, workers: int, gap: float, kinds: Sequence[Kind]
) -> list[Fault]:
    """Faults of an act of so many seconds. gap: seconds between the end of one and the next, on
    average.
    """
    lots, faults, now = random.Random(seed), [], QUIET
    while True:
        now += lots.uniform(0.5 * gap, 1.5 * gap)
        kind = lots.choice(kinds)
        fault = Fault(
            now,
            kind,
            lots.randrange(workers if kind.endswith("worker") else shards),
            _lasting(lots, kind),
        )
        if fault.at + fault.seconds > seconds - QUIET:
            return faults
        faults.append(fault)
        # one in four begins while the one before lasts
        now += fault.seconds if lots.random() < 0.75 else 0.0


def _lasting(lots: random.Random, kind: Kind) -> float:
    return round(lots.uniform(*SECONDS[kind]), 2)
