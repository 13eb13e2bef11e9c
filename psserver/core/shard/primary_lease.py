"""Who is the primary of a shard, where that is written down so that only one can be."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PrimaryRecord:
    """What the lock of a shard says.

    term: grows with each primary; holder: where that is; in_sync: the name of the standby that
    has all that the holder has told anybody, and so may take over; empty: none.
    """

    term: int
    holder: str
    in_sync: str = ""


class LeaseStore(Protocol):
    """One tenure that all can read, and swap for another one, if it still is what they think.
    Both raise OSError.
    """

    def read(self) -> PrimaryRecord | None:
        """What stands there; None: nobody ever was primary."""
        ...

    def swap(self, old: PrimaryRecord | None, new: PrimaryRecord) -> bool:
        """Puts `new` where `old` stands. False: something else stands there, and nothing has
        changed.
        """
        ...
