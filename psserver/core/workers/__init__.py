"""Which workers take part, how they fare, what they report and combine in collectives."""

__all__ = [
    "collectives",
    "health",
    "members",
    "membership",
    "replacement",
    "reported_values",
    "smallest",
]
