"""Time source of a client."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """Time and pauses, in seconds; a simulation supplies its own."""

    now: Callable[[], float]
    sleep: Callable[[float], None]
