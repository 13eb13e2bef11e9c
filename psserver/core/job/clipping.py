"""Clipping by the norm of an update's averaged gradient, as torch.nn.utils.clip_grad_norm_.

The coordinator decides and scales (core/coordinator/update_rounds.py); shards measure. The other
clipping, of single pushes by --max-norm, is in update_rounds.py alone.

Theory of operation. Each shard holds a slice of the average, so no shard knows its norm. The
norms that shards report of single pushes do not add up to the norm of their average. An update
of several pushes therefore takes two entries. A Measure names the contributions; each shard
averages its slices of them, as the update will, and reports the sum of squares. After all shards
have reported, the Apply of the same contributions carries the clip factor, multiplied into their
scales: the average is linear, so the scaled contributions average to the clipped gradient. An
update of one push needs no Measure, because its norm was reported with the push.

States of an update: measured by no shard, by some, by all. Events: a report with an answer, a
change of the contributions, a Reshard.

Invariants:

- A measurement is valid only for exactly the contributions that it names. Between the two
  entries a worker may be evicted, join or be replaced, the policy or the rules may change, and
  a Cut may come. If the update would then count other contributions, the coordinator measures
  those and ignores answers to the older Measure. The pushes stay staged until the Apply.
- A Reshard voids every measurement, because the pushes are cut into other slices afterwards.
- There is no state outside the log and the commands. A coordinator that replays its commands has
  asked for the same measurements; a shard that replays its log has the same answer, or has it in
  its saved state.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pscommon.core.entry_encoding import contributions_from_json, contributions_to_json
from pscommon.core.log_entries import Contribution, ShardReport


@dataclass(slots=True)
class Measurement:
    """A Measure and the answers to it.

    Attributes:
        index: Index of the entry.
        contributions: Contributions that the entry names.
        square_norms: By shard, the sum of squares of its slice of the average.
    """

    index: int
    contributions: tuple[Contribution, ...]
    square_norms: dict[int, float] = field(default_factory=dict)

    def is_answered_by(self, report: ShardReport) -> bool:
        """Return whether the report has a valid answer from a shard that has not answered."""
        measured = report.measured
        if measured is None or measured.index != self.index or not measured.square_norm >= 0:
            return False
        return report.shard not in self.square_norms

    def take(self, report: ShardReport) -> None:
        """Store the answer of a report, if it has one."""
        if report.measured is not None and self.is_answered_by(report):
            self.square_norms[report.shard] = report.measured.square_norm

    def square_norm(self, shards: int) -> float | None:
        """Return the sum of squares over all shards; None while an answer is missing.

        It is added in the order of the shards.
        """
        if len(self.square_norms) < shards:
            return None
        return sum_in_order([self.square_norms[shard] for shard in range(shards)])

    def state(self) -> dict[str, Any]:
        """Return the measurement as JSON values for `from_state`."""
        return {
            "index": self.index,
            "contributions": contributions_to_json(self.contributions),
            "square_norms": [[shard, value] for shard, value in sorted(self.square_norms.items())],
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> "Measurement":
        """Return the measurement whose `state` this is."""
        contributions = contributions_from_json(state["contributions"])
        return Measurement(state["index"], contributions, dict(state["square_norms"]))


def sum_in_order(values: list[float]) -> float:
    """Return the sum from left to right; sum() differs between versions of Python."""
    total = 0.0
    for value in values:
        total += value
    return total
