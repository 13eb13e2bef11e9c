"""This worker's share of the data: batches leased from the job's ledger, fetched by torch's DataLoader.

A batch is a number; the loop's spec says which samples it stands for. The loader's sampler leases numbers while the
ledger has some to give. When it has none, all that is in the loader is used up first, then the worker waits, sitting
out of rounds, until a lost worker's batches come back or the loop ends. Streams are read in psworker/streams.py.
"""

import inspect
import logging
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pscommon.core.errors import InvalidRequestError, PSError
from pscommon.core.log import BatchKey
from pscommon.core.loop import LoopSpec
from pscommon.core.stream import Spec
from psworker.generators import reseed

if TYPE_CHECKING:
    from psworker.job import Job

FETCH, COMPUTE = 0, 1

T = TypeVar("T")

log = logging.getLogger("psworker")


class Usage:
    """Batches that were handed to the script since its last push: the next one commits them.

    samples: since the last step. following: how many more batches belong to that push (--global-batch).
    lost: why that step must not count, because it uses gradients of a place that this worker has lost.
    dealt: the script has begun with a loop. shared: the servers say which batches make an update (--global-batch).
    """

    batches: tuple[BatchKey, ...]
    samples: int
    following: int
    lost: PSError | None

    def __init__(self) -> None:
        self.dealt = self.shared = False
        self.clear()

    @property
    def nothing(self) -> bool:
        """Was nothing handed out to train on, in a script whose rounds go by the data that it is dealt?"""
        return self.dealt and not self.samples and self.lost is None

    def add(self, key: BatchKey, samples: int, following: int | None) -> None:
        """following: None where each batch may be a push of its own. A batch without samples is not trained on."""
        self.batches = (*self.batches, key)
        self.samples += samples
        self.shared = following is not None
        if samples and following is not None:
            self._check_whole()
            self.following, self._ended = following, following == 0

    def _check_whole(self) -> None:
        if self._ended:
            raise InvalidRequestError(
                "--global-batch decides how many batches make an update, so call optimizer.step() after each batch: "
                "with gradients that are None for one to be left out; where there is nothing to train, go through "
                "job.batches under torch.no_grad()"
            )

    def begin(self) -> None:
        """A loop begins: the end of an update at which the one before it was left needs no step any more."""
        self._ended, self.dealt = False, True

    def lose(self, error: PSError) -> None:
        """The batches so far went back to the pool; those that are still to come are this worker's."""
        self.batches, self.following, self._ended, self.lost = (), 0, False, error

    def clear(self) -> None:
        self.batches, self.lost = (), None
        self.samples = self.following = 0
        self._ended = False


class Wanted(NamedTuple):
    """A batch to fetch."""

    key: BatchKey
    indices: list[int]
    seeds: tuple[int, ...]

    @property
    def samples(self) -> int:
        return len(self.indices)


class Found(NamedTuple):
    """A batch that was read from a stream."""

    key: BatchKey
    samples: int
    seeds: tuple[int, ...]


class Leases:
    """Numbers of batches. Ends when the ledger has none at the moment; `wait` tells whether that was the end."""

    def __init__(self, job: "Job", spec: Spec) -> None:
        self._job = job
        self._spec = spec
        self.loop = spec.loop
        self._ready: deque[int] = deque()
        self._held: dict[int, int | None] = {}
        self._ended = False

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if not self._ready and not self.over:
            self._ask(idle=False)
        if not self._ready or self.over:
            raise StopIteration
        return self._ready.popleft()

    @property
    def over(self) -> bool:
        return self._ended or self._job.client.stopping

    def wait(self) -> bool:
        """Sits out until there is more; False at the loop's end. Either way the model then holds the newest weights."""
        while not self._ready and not self.over:
            self._ask(idle=True)
        if not self._job.client.stopping:
            self._job.pull()
        return not self.over

    def _ask(self, idle: bool) -> None:
        """Gets nothing if the job had gone on without this worker, which is then back."""
        with self._job.healing():
            lease = self._job.client.next_batches(self._spec, idle=idle, first_open=self._job.loops.first)
            self._job.prospers()
            self._ready.extend(lease.numbers)
            self._held.update(zip(lease.numbers, lease.following or repeat(None), strict=False))
            self._ended = lease.end and not lease.numbers
            if self._ended and not self._job.usage.batches:  # else it ends for this worker only, with those in hand
                self._job.loops.passed(self._spec.loop)
            if lease.sat_out and not idle:
                self._job.pull()

    def use(self, key: BatchKey, samples: int) -> bool:
        """The script gets this batch. One that it gets while gradients are off weighs nothing in the next step.

        False: it is not this worker's any more, and the script must not have it.
        """
        if key.number not in self._held:
            return False
        following = self._held.pop(key.number)
        self._job.usage.add(key, samples if torch.is_grad_enabled() else 0, following)
        return True

    def find_end(self, key: BatchKey) -> None:
        """There is nothing in this batch: its source ends before it."""
        if key.number in self._held:
            del self._held[key.number]
            with self._job.healing():
                self._job.client.return_batches([key])

    def forget(self) -> None:
        """All that was leased and not used is others' now. What the loader has fetched of it is passed over."""
        self._ready.clear()
        self._held.clear()

    def give_back(self) -> None:
        """What was leased and not used is free for others."""
        held, self._held = sorted(self._held), {}
        self._ready.clear()
        if held:
            self._job.client.return_batches([BatchKey(self._spec.loop, number) for number in held])


class Source(Protocol):
    """Where the batches of leased numbers come from."""

    def open(self, leases: Leases) -> Iterable[tuple[Wanted | Found, Any]]:
        """What the batches are and the batches, ending with `leases`; to be gone through again when there are more."""
        ...


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
    """A data set with items by number. loader: options of torch's DataLoader."""

    def __init__(self, spec: LoopSpec, fetcher: Fetcher, loader: dict[str, Any]) -> None:
        self._spec = spec
        self._fetcher = fetcher
        self._options = loader

    def open(self, leases: Leases) -> Loaded:
        # a generator of its own: the loader would draw its workers' seeds from the script's
        generator = self._options.get("generator") or torch.Generator().manual_seed(self._spec.seed)
        options = {"persistent_workers": self._options.get("num_workers", 0) > 0}
        options |= self._options | {"generator": generator}
        sampler = Sampler(self._spec, leases)
        return Loaded(DataLoader(self._fetcher, batch_size=None, sampler=sampler, collate_fn=_as_it_is, **options))


class Sampler:
    """What to fetch, in the order of the leases."""

    def __init__(self, spec: LoopSpec, leases: Leases) -> None:
        self._spec = spec
        self._leases = leases

    def __iter__(self) -> Iterator[Wanted]:
        return map(self._wanted, self._leases)

    def _wanted(self, number: int) -> Wanted:
        spec = self._spec
        seeds = spec.seed % 2**64, spec.epoch(number), spec.position(number)
        return Wanted(BatchKey(spec.loop, number), spec.indices(number).tolist(), seeds)


class Batches:
    """One loop, to be gone through once: `for batch in job.batches(...)`. Made by `Job.batches`.

    spec: the loop; spec.total is its number of batches, all workers together, where it is no stream.
    """

    def __init__(self, job: "Job", spec: Spec, source: Source, reseed: bool) -> None:
        self.spec = spec
        self._job = job
        job.loops.make(spec.loop)
        self._source = source
        self._reseed = reseed
        self._begun = False

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            raise InvalidRequestError("a loop can be gone through once; call job.batches again for another")
        self._begun = True
        return self._run()

    def _run(self) -> Iterator[Any]:
        leases = Leases(self._job, self.spec)
        if not self._job.loops.open:  # what was used in loops before this one
            self._void(0)
            self._job.usage.begin()
        steps, samples = self._job.stats.steps, self._job.usage.samples
        with self._job.looping(leases):
            source = self._source.open(leases)
            more = True
            while more:
                for item, batch in self._timed(source):
                    if leases.use(item.key, item.samples):
                        if self._reseed:
                            reseed(*item.seeds, COMPUTE)
                        yield batch
                self._job.enter("wait")
                more = leases.wait()
            self._job.enter("compute")
        if self._job.stats.steps == steps and (unused := self._void(samples)):
            log.warning(
                "no optimizer.step() in this loop: for the job its %d samples are unused; call step() of what "
                "job.optimizer returned, or, to evaluate, go through them under torch.no_grad()",
                unused,
            )

    def _void(self, samples: int) -> int:
        """Samples beyond so many weigh nothing in the next step where no parameter has a gradient: they were evaluated,
        or the script has thrown theirs away. Returns how many."""
        usage = self._job.usage
        unused = 0 if self._job.has_gradients else max(0, usage.samples - samples)
        usage.samples -= unused
        return unused

    def _timed(self, source: Iterable[tuple[Wanted | Found, Any]]) -> Iterator[tuple[Wanted | Found, Any]]:
        self._job.enter("data")
        for item in source:
            if self._job.client.stopping:
                return
            self._job.enter("compute")
            yield item
            self._job.enter("data")


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
