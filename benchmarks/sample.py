"""Statistics of what was measured: medians with their spread, and ratios of contenders that took
turns.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One number, measured once a round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def least(self) -> float:
        return min(self.values)

    @property
    def greatest(self) -> float:
        return max(self.values)

    def quantile(self, share: float) -> float:
        """The smallest value that at least `share` of the values do not exceed."""
        return sorted(self.values)[max(0, math.ceil(share * len(self.values)) - 1)]


@dataclass(frozen=True)
class Ratio:
    """Of two medians. low and high: the quartiles of the rounds' own ratios, each of neighbours
    in time.
    """

    value: float
    low: float
    high: float


def ratio(ours: Sample, peer: Sample) -> Ratio:
    """ours / peer, for contenders of the same rounds. Infinite where the peer's is too small to
    be measured.
    """
    pairs = Sample(tuple(_ratio(a, b) for a, b in zip(ours.values, peer.values, strict=True)))
    return Ratio(_ratio(ours.median, peer.median), pairs.quantile(0.25), pairs.quantile(0.75))


def sample(values: Sequence[float]) -> Sample:
    """Of at least one value."""
    if not values:
        raise ValueError("a sample needs values")
    return Sample(tuple(values))


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.inf
