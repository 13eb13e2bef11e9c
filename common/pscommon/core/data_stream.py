"""A loop over a stream: sources that are read in order, none of which says beforehand how long
it is.
"""

from dataclasses import dataclass
from typing import Any

from pscommon.core.data_loop import LoopSpec


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """`epochs` passes over `sources`, each an ordered sequence of samples that is the same
    whenever it is read.

    loop: the how-many-eth loop of the script, from 0. One pass over one source is a lap; laps
    run through all epochs from 0 to `laps` - 1. The batch at a place of a lap is samples
    [offset, offset + batch_size) of the lap's source; the last one of a lap may be smaller. A
    batch's number stands for lap and place, so that a stretch of a source has the same number
    for whoever reads it.
    """

    loop: int
    sources: int
    batch_size: int
    epochs: int = 1

    def __post_init__(self) -> None:
        if min(self.loop, self.epochs) < 0:
            raise ValueError(f"a loop's numbers cannot be negative: {self}")
        if min(self.sources, self.batch_size) < 1:
            raise ValueError(f"sources and batch_size must be at least 1: {self}")

    @property
    def laps(self) -> int:
        return self.sources * self.epochs

    def number(self, lap: int, place: int) -> int:
        """Of the batch at this place of this lap."""
        return place * self.laps + lap

    def lap(self, number: int) -> int:
        return number % self.laps

    def place(self, number: int) -> int:
        """How many batches of the lap come before this one."""
        return number // self.laps

    def epoch(self, number: int) -> int:
        return self.lap(number) // self.sources

    def source(self, number: int) -> int:
        return self.lap(number) % self.sources

    def offset(self, number: int) -> int:
        """How many samples of the source come before this batch."""
        return self.place(number) * self.batch_size

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; spec_from_dict is the way back."""
        return {
            "loop": self.loop,
            "sources": self.sources,
            "batch_size": self.batch_size,
            "epochs": self.epochs,
        }


Spec = LoopSpec | StreamSpec


def spec_from_dict(fields: dict[str, Any]) -> Spec:
    """What `as_dict` gave, of either kind."""
    return StreamSpec(**fields) if "sources" in fields else LoopSpec(**fields)
