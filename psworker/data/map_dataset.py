"""Map-style data sets, with len() and items by number, fetched by torch's DataLoader."""

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pscommon.core.errors import InvalidRequestError
from pscommon.core.log import BatchKey
from pscommon.core.loop import LoopSpec
from psworker.batches import FETCH, Leases, Wanted
from psworker.generators import reseed

T = TypeVar("T")


class Fetcher(Dataset[Any]):
    """The data set as the loader sees it, a whole batch an item; runs in the loader's processes."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], reseed: bool) -> None:
        self._dataset, self._collate, self._reseed = dataset, collate, reseed

    def __getitem__(self, wanted: Wanted) -> tuple[Wanted, Any]:
        if self._reseed:
            reseed(*wanted.seeds, FETCH)
        fetch_all = getattr(self._dataset, "__getitems__", None)
        samples = fetch_all(wanted.indices) if fetch_all else [self._dataset[index] for index in wanted.indices]
        return wanted, self._collate(samples)


class Loaded:
    """What a loader loads. It begins on its generator's device, wherever the script makes its tensors: it draws a seed,
    which is an error for a generator of another device (torch.set_default_device).
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[tuple[Wanted, Any]]:
        with torch.device(self._loader.generator.device):
            return iter(self._loader)


class MapStyle:
    """A data set with items by number, as a loader goes through it (psworker.batches.Data).

    epochs: passes in each loop. made: how many passes the script's loaders have made so far, by size and seed.
    options: of torch's DataLoader.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        epochs: int,
        drop_last: bool,
        shuffle: bool,
        seed: int,
        fetcher: Fetcher,
        options: dict[str, Any],
        made: dict[tuple[int, int], int],
    ) -> None:
        self.dataset = dataset
        self._made = made
        self._next: int | None = None
        self._loop = spec_made(LoopSpec, 0, len(dataset), batch_size, epochs, drop_last, shuffle, seed)
        self.batch_size: int | None = self._loop.batch_size
        self._fetcher = fetcher
        self._options = options
        self._generator = options.get("generator") or torch.Generator().manual_seed(self._loop.seed)
        self._kept: tuple[Sampler, Loaded] | None = None

    def spec(self) -> LoopSpec:
        return self._loop

    def next_pass(self, loop: int) -> tuple[LoopSpec, "MapPass"]:
        spec = replace(self._loop, loop=loop, first_epoch=self._first_epoch())
        return spec, MapPass(self, spec)

    def _first_epoch(self) -> int:
        """A loader's passes are epochs in a row, after those that the loaders before it had made."""
        key = self._loop.size, self._loop.seed
        first = self._made.get(key, 0) if self._next is None else self._next
        self._next = first + self._loop.epochs
        self._made[key] = max(self._made.get(key, 0), self._next)
        return first

    def load(self, spec: LoopSpec, leases: Leases) -> Loaded:
        """What the leases stand for. With persistent_workers=True one DataLoader serves all passes."""
        if self._kept is None:
            # a generator of its own: the loader would draw its workers' seeds from the script's
            options = {"persistent_workers": self._options.get("num_workers", 0) > 0}
            options |= self._options | {"generator": self._generator}
            sampler = Sampler(spec, leases)
            loader = DataLoader(self._fetcher, batch_size=None, sampler=sampler, collate_fn=_as_it_is, **options)
            if not self._options.get("persistent_workers", False):
                return Loaded(loader)
            self._kept = sampler, Loaded(loader)
        sampler, loaded = self._kept
        sampler.turn_to(spec, leases)
        return loaded


class MapPass:
    """One pass over a map-style data set."""

    def __init__(self, data: MapStyle, spec: LoopSpec) -> None:
        self._data = data
        self._spec = spec

    def open(self, leases: Leases) -> Loaded:
        return self._data.load(self._spec, leases)


class Sampler:
    """What to fetch, in the order of the leases."""

    def __init__(self, spec: LoopSpec, leases: Leases) -> None:
        self.turn_to(spec, leases)

    def turn_to(self, spec: LoopSpec, leases: Leases) -> None:
        """From now on it is about this pass."""
        self._spec = spec
        self._leases = leases

    def __iter__(self) -> Iterator[Wanted]:
        return map(self._wanted, self._leases)

    def _wanted(self, number: int) -> Wanted:
        spec = self._spec
        seeds = spec.seed % 2**64, spec.epoch(number), spec.position(number)
        return Wanted(BatchKey(spec.loop, number), spec.indices(number).tolist(), seeds)


def spec_made(kind: Callable[..., T], *fields: Any) -> T:
    """The spec of a loop, or InvalidRequestError for numbers that make none."""
    try:
        return kind(*(value if isinstance(value, bool) else operator.index(value) for value in fields))
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"a loop's batch_size, epochs and sources are whole numbers: {error}") from error


def map_style(dataset: Any) -> Any:
    """A data set with a length and items by number, or InvalidRequestError. A tuple of tensors gives tuples of rows."""
    if isinstance(dataset, tuple):
        dataset = TensorDataset(*_rows(dataset))
    if isinstance(dataset, DataLoader):
        raise InvalidRequestError(
            "a DataLoader deals its samples to one process: give the data set that it has (loader.dataset), and what "
            "it was told, such as batch_size, as arguments of this call"
        )
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise InvalidRequestError(
            f"job.batches needs a map-style data set, with len() and items by number, or a stream, an IterableDataset "
            f"or one with read(source, offset), not {type(dataset).__name__}"
        )
    return dataset


def check_options(loader: Mapping[str, Any]) -> None:
    """InvalidRequestError for what is no option of DataLoader, or would choose the samples."""
    known = inspect.signature(DataLoader).parameters
    for name in loader:
        if name in ("sampler", "batch_sampler"):
            raise InvalidRequestError(
                f"{name}=... cannot apply: the job deals the samples to its workers. To choose or to order them, give "
                "torch.utils.data.Subset as the data set, with shuffle=False for its own order"
            )
        if name not in known or name == "dataset":
            raise InvalidRequestError(f"{name}=... is known neither to job.batches nor to torch's DataLoader")


def _rows(tensors: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Tensors of one length, at least one of them."""
    kinds = sorted({type(tensor).__name__ for tensor in tensors if not isinstance(tensor, torch.Tensor)})
    if kinds or not tensors:
        raise InvalidRequestError(
            f"a tuple is a data set of its tensors' rows, and this has {', '.join(kinds) or 'none'}: make tensors of "
            "arrays (torch.from_numpy), and give samples that are no rows of tensors as a list"
        )
    shapes = [list(tensor.shape) for tensor in tensors]
    if any(not shape or shape[0] != shapes[0][0] for shape in shapes):
        raise InvalidRequestError(f"the tensors of a data set need equally many rows, and have shapes {shapes}")
    return tensors


def _as_it_is(item: Any) -> Any:
    return item
