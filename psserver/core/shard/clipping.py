"""Clipping by the norm of an update's averaged gradient, as torch.nn.utils.clip_grad_norm_ does
it.

Theory of operation. No shard knows the norm of the average: each holds a slice, and the norms
that shards report of single pushes do not say how these pushes add up. So an update of several
pushes takes two entries. A Measure names the contributions; each shard averages its slices of
them, as the update will, and reports the sum of squares. Once all shards have reported, the
Apply of the same contributions carries the factor, multiplied into their scales: the average is
linear, so the scaled contributions average to the clipped gradient. An update of one push needs
no Measure, since its norm was reported with the push.

A measurement holds for exactly the contributions that it names. Between the two entries a worker
may be evicted, join or be taken over, the policy or the rules may change, a Cut may come:
whenever `advance` finds that the update would count other contributions by now, it measures
those, and answers to the older Measure are void. The pushes stay staged until the Apply. A
Reshard voids every measurement, because the same pushes lie in other slices afterwards.

Nothing else is kept: a coordinator that is made again from its commands has asked and heard the
same, and a shard that is made again from its log has measured the same, or has kept the answer
in its state.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pscommon.core.entry_encoding import contributions_from_json, contributions_to_json
from pscommon.core.log_entries import Contribution, ShardReport

EPSILON = 1e-6
"""What torch adds to the norm."""


def clip_factor(clip_norm: float, square_norm: float) -> float:
    """Return what a gradient of this sum of squares is multiplied with: clip_coef of torch,
    clamped to 1.0.
    """
    return min(1.0, clip_norm / (math.sqrt(square_norm) + EPSILON))


@dataclass(slots=True)
class Measurement:
    """The newest Measure and its answers.

    index: of the entry.
    contributions: those that the entry names.
    square_norms: by shard, the sum of squares of its slice of the average.
    """

    index: int
    contributions: tuple[Contribution, ...]
    square_norms: dict[int, float] = field(default_factory=dict)

    def is_answered_by(self, report: ShardReport) -> bool:
        """Does the report hold an answer that is not known yet? What is no sum of squares is
        none.
        """
        measured = report.measured
        if measured is None or measured.index != self.index or not measured.square_norm >= 0:
            return False
        return report.shard not in self.square_norms

    def take(self, report: ShardReport) -> None:
        """Note the answer that a report holds, if there is one."""
        if report.measured is not None and self.is_answered_by(report):
            self.square_norms[report.shard] = report.measured.square_norm

    def square_norm(self, shards: int) -> float | None:
        """Return the sum of squares over all shards, added in their order; None while an answer
        is missing.
        """
        if len(self.square_norms) < shards:
            return None
        return sum_in_order([self.square_norms[shard] for shard in range(shards)])

    def state(self) -> dict[str, Any]:
        """JSON-ready; `from_state` is the way back."""
        return {
            "index": self.index,
            "contributions": contributions_to_json(self.contributions),
            "square_norms": [[shard, value] for shard, value in sorted(self.square_norms.items())],
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> "Measurement":
        contributions = contributions_from_json(state["contributions"])
        return Measurement(state["index"], contributions, dict(state["square_norms"]))


def sum_in_order(values: list[float]) -> float:
    """Add one after the other: Python's own sum differs between its versions."""
    total = 0.0
    for value in values:
        total += value
    return total
