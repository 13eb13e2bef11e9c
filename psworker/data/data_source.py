"""What a loader needs of a data source, and the arguments that a source is made from."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sized
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

from pscommon.core.data_stream import Spec
from pscommon.core.errors import InvalidRequestError
from pscommon.core.log_entries import BatchKey
from psworker.core.group_place import ALONE, GroupPlace
from psworker.data.leased_batches import LeasedBatches

SpecT = TypeVar("SpecT")

PassCounts = dict[tuple[int, int], int]
"""Passes that the script's loaders have begun, by size of the data set and seed."""

FETCH, COMPUTE, ORDER = 0, 1, 2
"""Last number of a random seed: to fetch a batch, to compute with it, to draw a pass's order."""


class LoaderArguments(NamedTuple):
    """Arguments of `Job.batches` that torch's DataLoader has too.

    Attributes:
        options: Further keywords of DataLoader.
        length: Its `len()` is the number of samples in a pass; None: that of the sampler, or of
            the data set.
    """

    dataset: Any
    batch_size: int | None = None
    shuffle: bool | None = None
    drop_last: bool = False
    sampler: Any = None
    batch_sampler: Any = None
    collate_fn: Any = None
    options: Mapping[str, Any] = MappingProxyType({})
    length: Sized | None = None


class PassSettings(NamedTuple):
    """Arguments of `Job.batches` that torch's DataLoader does not have.

    Attributes:
        epochs: Passes over the data in one loop.
        seed: Returns a signed 64-bit integer, from the first pass on.
        sources: Number of sources of a stream; None: not given.
        reseed: Seed the global random generators for each batch.
        name: Name of the loader; None: its place among the loaders without a name.
        place: Which part of each batch this process computes.
    """

    epochs: int = 1
    seed: Callable[[], int] = lambda: 0
    sources: int | None = None
    reseed: bool = True
    name: str | None = None
    place: GroupPlace = ALONE


class BatchFacts(NamedTuple):
    """What is known of a batch without its data.

    Attributes:
        key: Identifies the batch in the job's ledger.
        samples: Number of samples in it that count on this rank.
        all_samples: Number of samples in it, of all ranks.
        seeds: Non-negative integers that seed its random numbers.
    """

    key: BatchKey
    samples: int
    all_samples: int
    seeds: tuple[int, ...]


PassReader = Callable[[LeasedBatches], Iterable[tuple[BatchFacts, Any]]]
"""Returns the batches of a pass with these numbers, to be iterated again when there are more."""


class DataSource(Protocol):
    """Data that a loader passes over.

    Attributes:
        dataset: The data set, as the loader shows it.
        batch_size: Samples per batch; None if batches have different sizes.
    """

    dataset: Any
    batch_size: int | None

    def spec(self) -> Spec:
        """Return the spec of a pass as long as the next one, for the loader's length.

        Raises:
            TypeError: The length is not known.
        """
        ...

    def has_changed(self) -> bool:
        """Return whether the length is another one than at the beginning of the last pass."""
        ...

    def next_pass(self, loop: int) -> tuple[Spec, PassReader]:
        """Begin the next pass, as the loop of this number."""
        ...


def make_spec(kind: Callable[..., SpecT], *fields: Any) -> SpecT:
    """Return the spec of a loop from booleans and integers of Python, numpy or torch.

    Raises InvalidRequestError if they make no valid spec.
    """
    try:
        return kind(
            *(value if isinstance(value, bool) else operator.index(value) for value in fields)
        )
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"batch_size, epochs or sources of job.batches is not valid: {error}. Try: positive "
            f"whole numbers"
        ) from error


def of_group(batch_size: Any, place: GroupPlace) -> Any:
    """Return the size of a group's batches; what is no number is left for `make_spec` to refuse."""
    if isinstance(batch_size, bool) or not hasattr(batch_size, "__index__"):
        return batch_size
    return operator.index(batch_size) * place.size


def seeds_of(place: GroupPlace, *seeds: int) -> tuple[int, ...]:
    """Return the seeds of a batch on this rank: other ranks draw other dropout masks."""
    return seeds if place.size == 1 else (*seeds, place.rank)
