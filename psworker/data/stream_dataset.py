"""Streams: data of unknown length that is read in order, from one or several sources.

A worker reads a source alone, from where it had counted before. It looks one sample ahead, so
that it knows with each batch whether the source ends there.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from io import IOBase
from itertools import islice
from typing import Any, Protocol

from torch.utils.data import IterableDataset

from pscommon.core.data_stream import StreamSpec
from pscommon.core.errors import InvalidRequestError
from pscommon.core.log_entries import BatchKey
from psworker.data.batches import FETCH, LeasedBatches, StreamBatch
from psworker.data.map_dataset import spec_made
from psworker.data.random_state import reseed
from psworker.data.torch_loader import LoaderArguments

END = object()


class StreamDataset(Protocol):
    """A data set of numbered sources, each an ordered sequence of samples that is the same
    whenever it is read.
    """

    def read(self, source: int, offset: int) -> Iterator[Any]:
        """The samples of a source after its first `offset` ones; none where it has no more."""
        ...


class SingleSourceStream:
    """An IterableDataset as a stream of one source: to go on at an offset it passes over what
    comes before.
    """

    def __init__(self, dataset: IterableDataset[Any]) -> None:
        self._dataset = dataset

    def read(self, source: int, offset: int) -> Iterator[Any]:
        return islice(iter(self._dataset), offset, None)


def is_stream(dataset: Any) -> bool:
    """Is it to be read in order, without a length?"""
    has_items = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return isinstance(dataset, IterableDataset) or (hasattr(dataset, "read") and not has_items)


def stream_of(dataset: Any, sources: int) -> StreamDataset:
    """InvalidRequestError for what is no stream, or no stream of so many sources."""
    if hasattr(dataset, "read"):
        if isinstance(dataset, IOBase):
            raise InvalidRequestError(
                "an open file is no stream of samples: job.batches needs read(source, offset)"
            )
        stream: StreamDataset = dataset
        return stream
    if sources != 1 or not isinstance(dataset, IterableDataset):
        raise InvalidRequestError(
            f"to be read as {sources} sources, {type(dataset).__name__} needs read(source, "
            "offset), which gives an iterator over the source's samples from there on; an "
            "IterableDataset without it is one source, read by one worker"
        )
    return SingleSourceStream(dataset)


def refuse(given: LoaderArguments) -> None:
    """InvalidRequestError for arguments that mean nothing here."""
    chosen = {"sampler": given.sampler, "batch_sampler": given.batch_sampler}
    unfit = [name for name, value in chosen.items() if value is not None]
    unfit += [*(["drop_last"] if given.drop_last else []), *sorted(given.options)]
    if unfit:
        raise InvalidRequestError(
            f"a stream is read in order, in this process: {', '.join(unfit)} cannot apply to it"
        )


class StreamData:
    """A stream as a loader goes through it (psworker.data.batches.Data)."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None,
        epochs: int,
        sources: int,
        collate: Callable[[list[Any]], Any],
        seed: int | None,
    ) -> None:
        self.dataset = dataset
        self._loop = spec_made(StreamSpec, 0, sources, batch_size, epochs)
        self.batch_size: int | None = self._loop.batch_size
        self._stream = stream_of(dataset, self._loop.sources)
        self._collate = collate
        self._seed = seed

    def spec(self) -> StreamSpec:
        raise TypeError(
            f"a loader over a stream has no len(): {type(self.dataset).__name__} ends where it ends"
        )

    def next_pass(self, loop: int) -> tuple[StreamSpec, "StreamReader"]:
        spec = replace(self._loop, loop=loop)
        return spec, StreamReader(spec, self._stream, self._collate, self._seed)


class StreamReader:
    """Reads this worker's sources where the ledger says.

    seed: None: the global generators are left alone; else they are set before each sample is
    read, as a function of the sample's place.
    """

    def __init__(
        self,
        spec: StreamSpec,
        dataset: StreamDataset,
        collate: Callable[[list[Any]], Any],
        seed: int | None,
    ) -> None:
        self._spec = spec
        self._dataset = dataset
        self._collate = collate
        self._seed = seed
        self._at = (-1, 0)
        self._iterator: Iterator[Any] = iter(())
        self._ahead: Any = END

    def open(self, leases: LeasedBatches) -> "StreamPass":
        return StreamPass(self.read, self._collate, leases)

    def read(self, number: int) -> tuple[StreamBatch, list[Any]]:
        """The samples of a batch, fewer where the source ends in it, perhaps none."""
        start = lap, offset = self._spec.lap(number), self._spec.offset(number)
        if self._at != start:
            self._at = start
            self._iterator = self._dataset.read(self._spec.source(number), offset)
            self._advance()
        samples: list[Any] = []
        while self._ahead is not END and len(samples) < self._spec.batch_size:
            samples.append(self._ahead)
            self._at = lap, self._at[1] + 1
            self._advance()
        key = BatchKey(self._spec.loop, number, len(samples), end=self._ahead is END)
        return StreamBatch(key, len(samples), self._seeds(lap, offset)), samples

    def _advance(self) -> None:
        if self._seed is not None:
            reseed(*self._seeds(*self._at), FETCH)
        self._ahead = next(self._iterator, END)

    def _seeds(self, lap: int, offset: int) -> tuple[int, ...]:
        return (self._seed or 0) % 2**64, self._spec.loop, lap, offset


class StreamPass:
    """The batches of leased numbers. One that has nothing in it tells the ledger where its
    source ends.
    """

    def __init__(
        self,
        read: Callable[[int], tuple[StreamBatch, list[Any]]],
        collate: Callable[[list[Any]], Any],
        leases: LeasedBatches,
    ) -> None:
        self._read = read
        self._collate = collate
        self._leases = leases

    def __iter__(self) -> Iterator[tuple[StreamBatch, Any]]:
        for number in self._leases:
            found, samples = self._read(number)
            if samples:
                yield found, self._collate(samples)
            else:
                self._leases.find_end(found.key)
