"""Interface of the parts of a request, one for each shard."""

from collections.abc import Sequence
from typing import Protocol

SLICE_SECONDS = 1.0
"""Longest time for which a server holds a call before it names what the call waits for."""


class ShardCall(Protocol):
    """One shard's part of a request."""

    def run(self) -> None:
        """Run the part to its end in the calling thread."""

    def step(self, slice_seconds: float) -> bool:
        """Make one attempt, which the server may hold for this long; return whether it ended."""
        ...


def run_in_turn(calls: Sequence[ShardCall]) -> None:
    """Run all parts in the calling thread.

    Only the last open part may wait: a push is decided once all shards have it.
    """
    remaining = list(calls)
    while remaining:
        last = remaining[-1]
        remaining = [
            call for call in remaining if not call.step(SLICE_SECONDS if call is last else 0.0)
        ]
