"""Streams: data of unknown length that is read in order, from one or several sources.

A worker reads a source alone, from the last position that has counted. It reads one sample ahead,
so that it knows with each batch whether the source ends there.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from io import IOBase
from itertools import islice
from typing import Any, Protocol

from torch.utils.data import IterableDataset, default_collate

from pscommon.core.data_stream import StreamSpec
from pscommon.core.errors import InvalidRequestError
from pscommon.core.log_entries import BatchKey
from psworker.core.group_place import ALONE, GroupPlace
from psworker.data.data_source import (
    FETCH,
    BatchFacts,
    LoaderArguments,
    PassCounts,
    PassReader,
    PassSettings,
    make_spec,
    of_group,
    seeds_of,
)
from psworker.data.leased_batches import LeasedBatches
from psworker.data.random_state import reseed

END = object()


class StreamDataset(Protocol):
    """A data set of numbered sources, each an ordered sequence of samples.

    Each read of a source must give the same samples, on every worker and in a resumed job.
    """

    def read(self, source: int, offset: int) -> Iterator[Any]:
        """Return the samples of a source after the first `offset` ones.

        Args:
            source: Number of the source, from 0.
            offset: Number of samples to skip. If the source has no more, return an empty iterator.
        """
        ...


def is_stream(arguments: LoaderArguments, settings: PassSettings) -> bool:
    """Return whether the data is to be read in order, without a length."""
    dataset = arguments.dataset
    has_items = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    can_read = hasattr(dataset, "read") and not has_items
    return settings.sources is not None or isinstance(dataset, IterableDataset) or can_read


class SingleSourceStream:
    """An IterableDataset as a stream of one source: `read` skips the samples before the offset."""

    def __init__(self, dataset: IterableDataset[Any]) -> None:
        self._dataset = dataset

    def read(self, source: int, offset: int) -> Iterator[Any]:
        return islice(iter(self._dataset), offset, None)


def stream_of(dataset: Any, sources: int) -> StreamDataset:
    """Return the data set as a stream of this number of sources.

    Raises:
        InvalidRequestError: It cannot be read so.
    """
    if hasattr(dataset, "read"):
        if isinstance(dataset, IOBase):
            raise InvalidRequestError(
                "job.batches cannot read an open file: it is no stream of samples. Try: an object "
                "with read(source, offset)"
            )
        stream: StreamDataset = dataset
        return stream
    if sources != 1 or not isinstance(dataset, IterableDataset):
        raise InvalidRequestError(
            f"{type(dataset).__name__} cannot be read as {sources} sources: it has no read(source, "
            "offset). Try: add this method, or give an IterableDataset, which is one source"
        )
    return SingleSourceStream(dataset)


def _check_arguments(arguments: LoaderArguments) -> None:
    samplers = {"sampler": arguments.sampler, "batch_sampler": arguments.batch_sampler}
    unfit = [name for name, value in samplers.items() if value is not None]
    unfit += [*(["drop_last"] if arguments.drop_last else []), *sorted(arguments.options)]
    if unfit:
        raise InvalidRequestError(
            f"{', '.join(unfit)} cannot apply to a stream: it is read in order, in this process. "
            f"Try: leave out {', '.join(unfit)}"
        )


class StreamSource:
    """The data source of a stream (psworker.data.data_source.DataSource).

    Raises:
        InvalidRequestError: The data set cannot be read this way, or an argument does not apply
            to streams.
    """

    def __init__(
        self, arguments: LoaderArguments, settings: PassSettings, passes: PassCounts
    ) -> None:
        _check_arguments(arguments)
        sources = 1 if settings.sources is None else settings.sources
        self.dataset = arguments.dataset
        # the first pass, with number 0
        self._spec = make_spec(
            StreamSpec, 0, sources, of_group(arguments.batch_size, settings.place), settings.epochs
        )
        self._place = settings.place
        self.batch_size: int | None = self._spec.batch_size // self._place.size
        self._stream = stream_of(self.dataset, self._spec.sources)
        self._collate = arguments.collate_fn or default_collate
        self._seed = settings.seed if settings.reseed else None

    def spec(self) -> StreamSpec:
        raise TypeError(
            f"a loader over a stream has no len(): the length of {type(self.dataset).__name__} is "
            "not known"
        )

    def has_changed(self) -> bool:
        return False

    def next_pass(self, loop: int) -> tuple[StreamSpec, PassReader]:
        spec = replace(self._spec, loop=loop)
        seed = None if self._seed is None else self._seed()
        return spec, StreamReader(self._stream, self._collate, seed, self._place).open


class StreamReader:
    """Reads the batches of one pass, each at the position that its number denotes.

    All ranks of a group read all samples, and each collates its own.

    seed: with the position of a sample it seeds the global generators before the sample is read;
        None: they stay as they are.
    """

    def __init__(
        self,
        dataset: StreamDataset,
        collate: Callable[[list[Any]], Any],
        seed: int | None,
        place: GroupPlace = ALONE,
    ) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed, self._place = seed, place
        self._leases: LeasedBatches
        self._position = (-1, 0)  # lap, and offset of the sample that was read ahead
        self._iterator: Iterator[Any] = iter(())
        self._next_sample: Any = END

    def open(self, leases: LeasedBatches) -> "StreamReader":
        """Read the batches of these numbers; one without samples is reported to the ledger."""
        self._leases = leases
        return self

    def __iter__(self) -> Iterator[tuple[BatchFacts, Any]]:
        for number in self._leases:
            assert isinstance(self._leases.spec, StreamSpec)
            facts, samples = self.read(self._leases.spec, number)
            if samples:
                yield facts, self._collate(list(self._place.own(samples)[0]))
            else:
                self._leases.find_end(facts.key)

    def read(self, spec: StreamSpec, number: int) -> tuple[BatchFacts, list[Any]]:
        """Return the samples of a batch: fewer than batch_size, or none, where the source ends."""
        start = lap, offset = spec.lap(number), spec.offset(number)
        if self._position != start:
            self._position = start
            self._iterator = self._dataset.read(spec.source(number), offset)
            self._read_ahead(spec)
        samples: list[Any] = []
        while self._next_sample is not END and len(samples) < spec.batch_size:
            samples.append(self._next_sample)
            self._position = lap, self._position[1] + 1
            self._read_ahead(spec)
        key = BatchKey(spec.loop, number, len(samples), end=self._next_sample is END)
        seeds = seeds_of(self._place, *self._seeds(spec, lap, offset))
        _, count = self._place.own(samples)
        return BatchFacts(key, count, len(samples), seeds), samples

    def _read_ahead(self, spec: StreamSpec) -> None:
        if self._seed is not None:
            reseed(*self._seeds(spec, *self._position), FETCH)
        self._next_sample = next(self._iterator, END)

    def _seeds(self, spec: StreamSpec, lap: int, offset: int) -> tuple[int, ...]:
        return (self._seed or 0) % 2**64, spec.loop, lap, offset
