"""Where the time of a push went on a shard."""

from typing import NamedTuple


class Timing(NamedTuple):
    """Seconds that a push waited, staged, for the decision, and that the update took that counted it."""

    seq: int
    wait: float
    apply: float
