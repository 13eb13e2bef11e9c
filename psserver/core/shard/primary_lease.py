"""The record that names a shard's primary, and the store that holds it."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PrimaryRecord:
    """The content of a shard's failover lock.

    Attributes:
        term: Counter that grows with every new primary.
        holder: Address of the primary.
        in_sync: Id of the standby that may take over, because it has every record whose effect
            the primary has published. Empty: no standby may.
    """

    term: int
    holder: str
    in_sync: str = ""


class LeaseStore(Protocol):
    """One record that all servers of a shard share, with compare-and-swap.

    Both methods raise OSError.
    """

    def read(self) -> PrimaryRecord | None:
        """Return the record; None before the first primary."""
        ...

    def swap(self, old: PrimaryRecord | None, new: PrimaryRecord) -> bool:
        """Replace `old` by `new`. Return False, and change nothing, if the record is not `old`."""
        ...
