"""Medians, quantiles and ratios."""

import math

import pytest

from benchmarks.sample import Sample, ratio, sample


def test_median_and_quantiles() -> None:
    """The median of an even number of values is the mean of the middle two; quantiles are observed
    values.
    """
    found = sample([4.0, 1.0, 2.0, 100.0])

    assert (found.least, found.median, found.greatest) == (1.0, 3.0, 100.0)
    assert [found.quantile(share) for share in (0.0, 0.25, 0.5, 0.75, 0.99, 1.0)] == [
        1.0,
        1.0,
        2.0,
        4.0,
        100.0,
        100.0,
    ]


def test_p99_exceeds_99_percent_of_values() -> None:
    """One in a hundred may be above it."""
    assert sample([float(number) for number in range(1, 201)]).quantile(0.99) == 198.0


def test_empty_sample() -> None:
    with pytest.raises(ValueError, match="needs values"):
        sample([])


def test_ratio_compares_medians_and_spread_compares_rounds() -> None:
    """A slow machine changes medians, but not the ratios of single rounds."""
    found = ratio(Sample((1.0, 2.0, 2.0, 1.0)), Sample((2.0, 4.0, 4.0, 2.0)))

    assert (found.value, found.low, found.high) == (0.5, 0.5, 0.5)
    assert ratio(Sample((3.0, 1.0, 1.0)), Sample((1.0, 1.0, 2.0))).value == 1.0


def test_ratio_needs_equal_numbers_of_rounds() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratio(Sample((1.0, 2.0)), Sample((1.0,)))


def test_ratio_to_zero_is_undefined() -> None:
    """CPU time below one tick cannot be compared."""
    assert ratio(Sample((1.0,)), Sample((0.0,))).value == math.inf
