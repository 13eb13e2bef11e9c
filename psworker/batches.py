"""This worker's share of the data: batches leased from the job's ledger, fetched by torch's DataLoader.

A batch is a number; the loop's spec says which samples it stands for. The loader's sampler leases numbers while the
ledger has some to give. When it has none, all that is in the loader is used up first, then the worker waits, sitting
out of rounds, until a lost worker's batches come back or the loop ends.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sized
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pscommon.core.errors import InvalidRequestError
from pscommon.core.log import BatchKey
from pscommon.core.loop import LoopSpec

if TYPE_CHECKING:
    from psworker.job import Job

FETCH, COMPUTE = 0, 1


class Usage:
    """Batches that were handed to the script since its last step: the next one commits them."""

    def __init__(self) -> None:
        self.batches: tuple[BatchKey, ...] = ()
        self.samples = 0

    def add(self, key: BatchKey, samples: int) -> None:
        self.batches = (*self.batches, key)
        self.samples += samples

    def clear(self) -> None:
        self.batches, self.samples = (), 0


class Wanted(NamedTuple):
    """A batch to fetch."""

    number: int
    indices: list[int]
    seeds: tuple[int, ...]


class Leases:
    """The loader's sampler. Ends when the ledger has nothing at the moment; `wait` tells whether that was the end."""

    def __init__(self, job: "Job", spec: LoopSpec) -> None:
        self._job = job
        self._spec = spec
        self._ready: deque[int] = deque()
        self._held: set[int] = set()
        self._ended = False

    def __iter__(self) -> Iterator[Wanted]:
        return self

    def __next__(self) -> Wanted:
        if not self._ready and not self.over:
            self._ask(idle=False)
        if not self._ready or self.over:
            raise StopIteration
        number = self._ready.popleft()
        return Wanted(number, self._spec.indices(number).tolist(), self._seeds(number))

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
        lease = self._job.client.next_batches(self._spec, idle=idle)
        self._ready.extend(lease.numbers)
        self._held.update(lease.numbers)
        self._ended = lease.end and not lease.numbers
        if lease.sat_out and not idle:
            self._job.pull()

    def use(self, number: int) -> None:
        """The script gets this batch. One that it gets while gradients are off weighs nothing in the next step."""
        self._held.remove(number)
        weight = len(self._spec.indices(number)) if torch.is_grad_enabled() else 0
        self._job.usage.add(BatchKey(self._spec.loop, number), weight)

    def give_back(self) -> None:
        """What was leased and not used is free for others."""
        held, self._held = sorted(self._held), set()
        self._ready.clear()
        if held:
            self._job.client.return_batches([BatchKey(self._spec.loop, number) for number in held])

    def _seeds(self, number: int) -> tuple[int, ...]:
        return self._spec.seed % 2**64, self._spec.epoch(number), self._spec.position(number)


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


class Batches:
    """One loop, to be gone through once: `for batch in job.batches(...)`. Made by `Job.batches`.

    spec: the loop; spec.total is its number of batches, all workers together.
    """

    def __init__(self, job: "Job", spec: LoopSpec, fetcher: Fetcher, reseed: bool, loader: dict[str, Any]) -> None:
        self.spec = spec
        self._job = job
        self._fetcher = fetcher
        self._reseed = reseed
        self._options = loader
        self._begun = False

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            raise InvalidRequestError("a loop can be gone through once; call job.batches again for another")
        self._begun = True
        return self._run()

    def _run(self) -> Iterator[Any]:
        leases = Leases(self._job, self.spec)
        with self._job.looping(leases):
            loader = self._loader(leases)
            more = True
            while more:
                for wanted, batch in self._timed(loader):
                    leases.use(wanted.number)
                    if self._reseed:
                        reseed(*wanted.seeds, COMPUTE)
                    yield batch
                self._job.enter("wait")
                more = leases.wait()
            self._job.enter("compute")

    def _timed(self, loader: DataLoader[Any]) -> Iterator[tuple[Wanted, Any]]:
        self._job.enter("data")
        for item in loader:
            if self._job.client.stopping:
                return
            self._job.enter("compute")
            yield item
            self._job.enter("data")

    def _loader(self, leases: Leases) -> DataLoader[Any]:
        # a generator of its own: the loader would draw its workers' seeds from the script's
        generator = torch.Generator().manual_seed(self.spec.seed)
        options = {"generator": generator, "persistent_workers": self._options.get("num_workers", 0) > 0}
        options |= self._options
        return DataLoader(self._fetcher, batch_size=None, sampler=leases, collate_fn=_as_it_is, **options)


def map_style(dataset: Any) -> Any:
    """A data set with a length and items by number, or InvalidRequestError. A tuple of tensors gives tuples of rows."""
    if isinstance(dataset, tuple):
        dataset = TensorDataset(*dataset)
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise InvalidRequestError(
            f"job.batches needs a map-style data set, with len() and items by number, not {type(dataset).__name__}"
        )
    return dataset


def reseed(*entropy: int) -> None:
    """Sets the global generators of torch, numpy and random, as a pure function of numbers that are not negative."""
    words = np.random.SeedSequence(entropy).generate_state(4)
    torch.manual_seed(int(words[0]) << 32 | int(words[1]))
    np.random.seed(words)
    random.seed(int(words[2]) << 32 | int(words[3]))


def _as_it_is(item: Any) -> Any:
    return item
