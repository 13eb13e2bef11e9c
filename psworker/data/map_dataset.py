"""Map-style data sets, with len() and items by number, fetched by torch's DataLoader."""

import inspect
import operator
import signal
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pscommon.core.data_loop import LoopSpec
from pscommon.core.errors import InvalidRequestError
from pscommon.core.log_entries import BatchKey
from psworker.data.batches import FETCH, LeasedBatches, RequestedBatch
from psworker.data.order import name_of, order_of
from psworker.data.random_state import reseed

T = TypeVar("T")


class BatchFetcher(Dataset[Any]):
    """The data set as the loader sees it, a whole batch an item; runs in the loader's processes."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], reseed: bool) -> None:
        self._dataset, self._collate, self._reseed = dataset, collate, reseed

    def __getitem__(self, wanted: RequestedBatch) -> tuple[RequestedBatch, Any]:
        if self._reseed:
            reseed(*wanted.seeds, FETCH)
        fetch_all = getattr(self._dataset, "__getitems__", None)
        samples = (
            fetch_all(wanted.indices)
            if fetch_all
            else [self._dataset[index] for index in wanted.indices]
        )
        return wanted, self._collate(samples)


class LoaderProcess:
    """Begins each process of a loader. A terminal sends Ctrl-C to all processes: these leave it
    to the worker, which still makes the step in progress, and end with it. init: the script's
    worker_init_fn.
    """

    def __init__(self, init: Callable[[int], object] | None) -> None:
        self._init = init

    def __call__(self, number: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._init is not None:
            self._init(number)


class LoaderDataset:
    """What a loader loads. It begins on its generator's device, wherever the script makes its
    tensors: it draws a seed, which is an error for a generator of another device
    (torch.set_default_device).
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[tuple[RequestedBatch, Any]]:
        with torch.device(self._loader.generator.device):
            return iter(self._loader)


class MapDataset:
    """A data set with items by number, as a loader goes through it (psworker.data.batches.Data).

    loop: as the first pass, with number 0. options: of torch's DataLoader. made: how many passes
    the script's loaders have made so far, by size and seed. sampler: gives the order, by_batch:
    as whole batches; None: the loop says it.
    """

    def __init__(
        self,
        dataset: Any,
        loop: LoopSpec,
        fetcher: BatchFetcher,
        options: Mapping[str, Any],
        made: dict[tuple[int, int], int],
        sampler: Any = None,
        by_batch: bool = False,
    ) -> None:
        self.dataset = dataset
        self.batch_size = None if by_batch else loop.batch_size
        self._loop = loop
        self._made = made
        self._next: int | None = None
        self._order = sampler
        self._fetcher = fetcher
        self._options = options
        self._generator = options.get("generator") or torch.Generator().manual_seed(self._loop.seed)
        self._kept: tuple[LookaheadSampler, LoaderDataset] | None = None

    def spec(self) -> LoopSpec:
        return self._loop if self._order is None else replace(self._loop, size=len(self._order))

    def next_pass(self, loop: int) -> tuple[LoopSpec, "MapPass"]:
        """A loader's passes are epochs in a row, after those that the loaders before it had
        made.
        """
        key = self._loop.size, self._loop.seed
        first = self._made.get(key, 0) if self._next is None else self._next
        spec, indices = self._ordered(replace(self._loop, loop=loop, first_epoch=first))
        self._next = first + spec.epochs
        self._made[key] = max(self._made.get(key, 0), self._next)
        return spec, MapPass(self.load, spec, indices)

    def _ordered(self, spec: LoopSpec) -> tuple[LoopSpec, Callable[[int], list[int]]]:
        """The pass, with its order, and which samples a batch has."""
        if self._order is None:
            return spec, lambda number: spec.indices(number).tolist()
        order = order_of(self._order, self.batch_size, spec.drop_last, spec.seed, spec.first_epoch)
        size, by_batch = len(order.indices), self.batch_size is None
        spec = replace(
            spec,
            size=size,
            order=order.digest,
            sampler=name_of(self._order),
            batch_size=order.largest if by_batch else spec.batch_size,
            batches=order.batches if by_batch else 0,
        )
        return spec, order.batch

    def load(self, wanted: Callable[[], Iterator[RequestedBatch]]) -> LoaderDataset:
        """What a pass wants. With persistent_workers=True one DataLoader serves all passes."""
        if self._kept is None:
            # a generator of its own: the loader would draw its workers' seeds from the script's
            options = {"persistent_workers": self._options.get("num_workers", 0) > 0}
            begin = LoaderProcess(self._options.get("worker_init_fn"))
            options |= {**self._options, "generator": self._generator, "worker_init_fn": begin}
            sampler = LookaheadSampler(wanted)
            loader = DataLoader(
                self._fetcher, batch_size=None, sampler=sampler, collate_fn=_as_it_is, **options
            )
            if not self._options.get("persistent_workers", False):
                return LoaderDataset(loader)
            self._kept = sampler, LoaderDataset(loader)
        sampler, loaded = self._kept
        sampler.wanted = wanted
        return loaded


class MapPass:
    """One pass over a map-style data set. indices: the samples of a batch."""

    def __init__(
        self,
        load: Callable[[Callable[[], Iterator[RequestedBatch]]], LoaderDataset],
        spec: LoopSpec,
        indices: Callable[[int], list[int]],
    ) -> None:
        self._load = load
        self._spec = spec
        self._indices = indices

    def open(self, leases: LeasedBatches) -> LoaderDataset:
        return self._load(lambda: map(self._wanted, leases))

    def _wanted(self, number: int) -> RequestedBatch:
        spec = self._spec
        seeds = spec.seed % 2**64, spec.epoch(number), spec.position(number)
        return RequestedBatch(BatchKey(spec.loop, number), self._indices(number), seeds)


class LookaheadSampler:
    """What torch's DataLoader is to fetch: what the pass wants that goes on."""

    def __init__(self, wanted: Callable[[], Iterator[RequestedBatch]]) -> None:
        self.wanted = wanted

    def __iter__(self) -> Iterator[RequestedBatch]:
        return self.wanted()


def spec_made(kind: Callable[..., T], *fields: Any) -> T:
    """The spec of a loop, or InvalidRequestError for numbers that make none."""
    try:
        return kind(
            *(value if isinstance(value, bool) else operator.index(value) for value in fields)
        )
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"a loop's batch_size, epochs and sources are whole numbers: {error}"
        ) from error


def map_style(dataset: Any) -> Any:
    """A data set with a length and items by number, or InvalidRequestError. A tuple of tensors
    gives tuples of rows.
    """
    if isinstance(dataset, tuple):
        dataset = TensorDataset(*_rows(dataset))
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise InvalidRequestError(
            "job.batches needs a map-style data set, with len() and items by number, or a stream, "
            f"an IterableDataset or one with read(source, offset), not {type(dataset).__name__}"
        )
    return dataset


def check_options(loader: Mapping[str, Any]) -> None:
    """InvalidRequestError for what is no option of DataLoader."""
    known = inspect.signature(DataLoader).parameters
    for name in loader:
        if name not in known or name == "dataset":
            raise InvalidRequestError(
                f"{name}=... is known neither to job.batches nor to torch's DataLoader"
            )


def _rows(tensors: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Tensors of one length, at least one of them."""
    kinds = sorted(
        {type(tensor).__name__ for tensor in tensors if not isinstance(tensor, torch.Tensor)}
    )
    if kinds or not tensors:
        raise InvalidRequestError(
            f"a tuple is a data set of its tensors' rows, and this has "
            f"{', '.join(kinds) or 'none'}: make tensors of "
            "arrays (torch.from_numpy), and give samples that are no rows of tensors as a list"
        )
    shapes = [list(tensor.shape) for tensor in tensors]
    if any(not shape or shape[0] != shapes[0][0] for shape in shapes):
        raise InvalidRequestError(
            f"the tensors of a data set need equally many rows, and have shapes {shapes}"
        )
    return tensors


def _as_it_is(item: Any) -> Any:
    return item
