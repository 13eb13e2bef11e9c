"""Numbers in JSON that is compared and read by others."""

import math


def json_number(value: float) -> float | str:
    """Return the value, or "nan", "inf" or "-inf": float() is the way back.

    JSON has no such numbers, and a NaN is not equal to itself after a round trip.
    """
    return value if math.isfinite(value) else str(value)
