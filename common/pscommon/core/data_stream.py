"""Loops over a stream: sources that are read in order and whose length is not known in advance."""

from dataclasses import dataclass
from typing import Any

from pscommon.core.data_loop import LoopSpec


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """`epochs` passes over `sources`, each an ordered sequence of samples, equal at every read.

    A lap is one pass over one source; laps run through all epochs from 0 to `laps` - 1. The batch
    at an index of a lap has samples [offset, offset + batch_size) of the lap's source. The last
    batch of a lap may be smaller. A batch number encodes lap and index, so it denotes the same
    samples for every worker.

    loop: number of the loop in the script, from 0.
    sources: number of sources.
    batch_size: samples in a batch.
    epochs: number of passes over all sources.
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

    def number(self, lap: int, index: int) -> int:
        """Return the number of the batch at this index of this lap."""
        return index * self.laps + lap

    def lap(self, number: int) -> int:
        return number % self.laps

    def lap_index(self, number: int) -> int:
        """Return the number of batches of the lap before this one."""
        return number // self.laps

    def epoch(self, number: int) -> int:
        return self.lap(number) // self.sources

    def source(self, number: int) -> int:
        return self.lap(number) % self.sources

    def offset(self, number: int) -> int:
        """Return the number of samples of the source before this batch."""
        return self.lap_index(number) * self.batch_size

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, JSON-ready; spec_from_dict is the inverse."""
        return {name: getattr(self, name) for name in self.__slots__}


Spec = LoopSpec | StreamSpec


def spec_from_dict(fields: dict[str, Any]) -> Spec:
    """Return the spec from the result of `as_dict`, of either class."""
    return StreamSpec(**fields) if "sources" in fields else LoopSpec(**fields)
