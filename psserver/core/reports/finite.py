"""JSON form of numbers that may be NaN or infinite."""

import math


def json_number(value: float) -> float | str:
    """Return the value, or "nan", "inf" or "-inf"; float() is the inverse.

    Standard JSON has no such numbers, and NaN is not equal to itself after a round trip.
    """
    return value if math.isfinite(value) else str(value)
