"""A clock that a test sets."""


class HandClock:
    """A monotonic clock that stands still.

    Attributes:
        now: Its time in seconds.
    """

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
