"""Map-style data sets, with len() and items by number, fetched by torch's DataLoader."""

import inspect
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from pscommon.core.data_loop import LoopSpec
from pscommon.core.errors import InvalidRequestError
from pscommon.core.log_entries import BatchKey
from psworker.core.group_place import GroupPlace
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
from psworker.data.order import check_sampler, name_of, order_of
from psworker.data.random_state import reseed

Requests = Callable[[], Iterator["RequestedBatch"]]


def is_map_style(arguments: LoaderArguments, settings: PassSettings) -> bool:
    """Return whether the data set has a length and items by number, or is a tuple of tensors."""
    dataset = arguments.dataset
    has_items = isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")
    return isinstance(dataset, tuple) or has_items


class RequestedBatch(NamedTuple):
    """A batch to fetch, and the numbers of its samples."""

    facts: BatchFacts
    indices: list[int]


class BatchFetcher(Dataset[Any]):
    """The data set as torch's DataLoader sees it: an item is a complete batch.

    It runs in the processes of the DataLoader.

    Attributes:
        dataset: The script's data set.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], reseed: bool) -> None:
        self.dataset, self._collate, self._reseed = dataset, collate, reseed

    def __getitem__(self, request: RequestedBatch) -> tuple[BatchFacts, Any]:
        if self._reseed:
            reseed(*request.facts.seeds, FETCH)
        fetch_all = getattr(self.dataset, "__getitems__", None)
        samples = (
            fetch_all(request.indices)
            if fetch_all
            else [self.dataset[index] for index in request.indices]
        )
        return request.facts, self._collate(samples)


def initialize_process(init: Callable[[int], object] | None, number: int) -> None:
    """Initialize a process of the DataLoader. init: The script's worker_init_fn.

    A terminal sends Ctrl-C to all processes. These ignore it: the worker handles it, completes
    its step, and ends them. torch's get_worker_info shows the script's data set there.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # it refuses assignments
    if init is not None:
        init(number)


class LoaderDataset:
    """The batches of a DataLoader, iterated on its generator's device.

    A DataLoader draws a seed when its iteration begins. That fails if the script has set another
    default device (torch.set_default_device).
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[tuple[BatchFacts, Any]]:
        with torch.device(self._loader.generator.device):
            return iter(self._loader)


class MapDataset:
    """The data source of a map-style data set (psworker.data.data_source.DataSource).

    Args:
        arguments: The data set and how to load it.
        settings: Epochs and seeds.
        passes: Passes begun by all loaders of the script, by size and seed; updated by each pass.

    Raises:
        InvalidRequestError: The arguments are not valid.
    """

    def __init__(
        self, arguments: LoaderArguments, settings: PassSettings, passes: PassCounts
    ) -> None:
        _check_options(arguments.options)
        # gives the order; None: the loop's spec says it
        self._sampler = _sampler_of(arguments, settings.epochs, settings.place)
        by_batch = arguments.batch_sampler is not None
        dataset: Any = arguments.dataset
        self.dataset = tensor_rows(dataset) if isinstance(dataset, tuple) else dataset
        # the first pass, with number 0 and without a seed
        self._loop = make_spec(
            LoopSpec,
            0,
            len(self.dataset),
            1 if by_batch else of_group(arguments.batch_size, settings.place),
            settings.epochs,
            arguments.drop_last,
            self._sampler is None and (arguments.shuffle is None or arguments.shuffle),
        )
        self.batch_size = None if by_batch else self._loop.batch_size // settings.place.size
        self._place = settings.place
        self._seed, self._passes, self._options = settings.seed, passes, arguments.options
        collate = arguments.collate_fn or default_collate
        self._fetcher = BatchFetcher(self.dataset, collate, settings.reseed)
        # its len(), if it has one, is the number of samples in the next pass, or of batches
        self._length: Any = self._sampler
        if self._length is None:
            self._length = self.dataset if arguments.length is None else arguments.length
        self._begun_length: int | None = None
        self._next_epoch: int | None = None
        self._generator: torch.Generator | None = self._options.get("generator")
        self._persistent: tuple[LookaheadSampler, LoaderDataset] | None = None

    def spec(self) -> LoopSpec:
        return replace(self._loop, size=len(self._length))

    def has_changed(self) -> bool:
        return self._known_length() != self._begun_length

    def _known_length(self) -> int | None:
        try:
            return len(self._length)
        except (TypeError, NotImplementedError):  # of a sampler
            return None

    def next_pass(self, loop: int) -> tuple[LoopSpec, PassReader]:
        """Begin a pass. Its epochs follow those of the loader's passes before, or for its first
        pass those of all earlier loaders.
        """
        seed = self._seed()
        if self._generator is None:
            self._generator = torch.Generator().manual_seed(seed)
        key = len(self.dataset), seed
        first = self._passes.get(key, 0) if self._next_epoch is None else self._next_epoch
        spec, indices = self._ordered(replace(self._loop, loop=loop, seed=seed, first_epoch=first))
        self._begun_length = self._known_length()
        self._next_epoch = first + spec.epochs
        self._passes[key] = max(self._passes.get(key, 0), self._next_epoch)
        return spec, partial(self._open, indices)

    def _ordered(self, spec: LoopSpec) -> tuple[LoopSpec, Callable[[int], list[int]] | None]:
        """Return the spec with the digest of its order, and a function: batch number to samples.

        Without a sampler the spec knows the samples, and there is no function.
        """
        if self._sampler is None:
            return replace(spec, size=len(self._length)), None
        order = order_of(
            self._sampler,
            None if self.batch_size is None else spec.batch_size,
            spec.drop_last,
            spec.seed,
            spec.first_epoch,
        )
        size, by_batch = len(order.indices), self.batch_size is None
        spec = replace(
            spec,
            size=size,
            order=order.digest,
            sampler=name_of(self._sampler),
            batch_size=order.largest if by_batch else spec.batch_size,
            batches=order.batches if by_batch else 0,
        )
        return spec, order.batch

    def _open(
        self, indices: Callable[[int], list[int]] | None, leases: LeasedBatches
    ) -> LoaderDataset:
        # Without a reference to this object. Otherwise a DataLoader with persistent_workers would
        # be part of a reference cycle, and torch waits 5 s for each process of such a loader.
        return self.load(partial(map, partial(_request, leases, indices, self._place), leases))

    def load(self, requests: Requests) -> LoaderDataset:
        """Return the requested batches; with persistent_workers from the same DataLoader."""
        if self._persistent is None:
            # with its own generator: otherwise the DataLoader draws from the script's generator
            options = {"persistent_workers": self._options.get("num_workers", 0) > 0}
            initialize = partial(initialize_process, self._options.get("worker_init_fn"))
            options |= {**self._options, "generator": self._generator}
            options["worker_init_fn"] = initialize
            sampler = LookaheadSampler(requests)
            loader = DataLoader(
                self._fetcher, batch_size=None, sampler=sampler, collate_fn=_identity, **options
            )
            if not self._options.get("persistent_workers", False):
                return LoaderDataset(loader)
            self._persistent = sampler, LoaderDataset(loader)
        sampler, loaded = self._persistent
        sampler.requests = requests
        return loaded


def _request(
    leases: LeasedBatches,
    indices_of: Callable[[int], list[int]] | None,
    place: GroupPlace,
    number: int,
) -> RequestedBatch:
    spec = leases.spec
    assert isinstance(spec, LoopSpec)
    seeds = seeds_of(place, spec.seed % 2**64, spec.epoch(number), spec.position(number))
    indices = spec.indices(number).tolist() if indices_of is None else indices_of(number)
    own, count = place.own(indices)
    facts = BatchFacts(BatchKey(spec.loop, number), count, len(indices), seeds)
    return RequestedBatch(facts, list(own))


class LookaheadSampler:
    """The sampler of the DataLoader: yields the requests of the current pass."""

    def __init__(self, requests: Requests) -> None:
        self.requests = requests

    def __iter__(self) -> Iterator[RequestedBatch]:
        return self.requests()


def _sampler_of(arguments: LoaderArguments, epochs: int, place: GroupPlace) -> Iterable[Any] | None:
    """Return the sampler or batch sampler; None if there is none."""
    option = "sampler" if arguments.batch_sampler is None else "batch_sampler"
    sampler = arguments.sampler if arguments.batch_sampler is None else arguments.batch_sampler
    if sampler is None:
        return None
    check_sampler(option, sampler)
    if option == "batch_sampler" and place.size > 1:
        raise InvalidRequestError(
            "batch_sampler cannot be used in a group: its batches have no parts for the ranks. "
            "Try: batch_size, with a sampler for the order"
        )
    if epochs != 1:
        raise InvalidRequestError(
            f"{option} excludes epochs={epochs!r}: it gives the order of one pass at a time. Try: "
            "`for epoch in range(epochs): for batch in loader: ...`"
        )
    found: Iterable[Any] = sampler
    return found


def _check_options(options: Mapping[str, Any]) -> None:
    known = inspect.signature(DataLoader).parameters
    for name in options:
        if name not in known or name == "dataset":
            raise InvalidRequestError(
                f"{name}=... is not valid: neither job.batches nor torch's DataLoader has this "
                "keyword. Try: check its spelling"
            )


def tensor_rows(tensors: tuple[Any, ...]) -> TensorDataset:
    """Return a data set of tuples of rows.

    Raises InvalidRequestError unless there are tensors, all with the same number of rows.
    """
    kinds = sorted(
        {type(tensor).__name__ for tensor in tensors if not isinstance(tensor, torch.Tensor)}
    )
    if kinds or not tensors:
        raise InvalidRequestError(
            f"a tuple is read as the rows of its tensors, and this one has "
            f"{', '.join(kinds) or 'none'}. Try: make tensors of arrays (torch.from_numpy); give "
            "samples that are not rows of tensors as a list"
        )
    shapes = [list(tensor.shape) for tensor in tensors]
    if any(not shape or shape[0] != shapes[0][0] for shape in shapes):
        raise InvalidRequestError(
            f"the tensors of a data set have different numbers of rows: their shapes are {shapes}. "
            "Try: tensors with the same first dimension"
        )
    return TensorDataset(*tensors)


def _identity(item: Any) -> Any:
    return item
