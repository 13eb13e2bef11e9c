"""This worker's share of the data: batches leased from the job's ledger, pass after pass.

Each `iter()` of a loader begins the next pass, which is a loop of the job's ledger. A batch is a
number; the loop's spec says which samples it stands for. A pass leases numbers while the ledger
has some to give. When it has none, all that was fetched is used up first, then the worker waits,
sitting out of rounds, until a lost worker's batches come back or the loop ends. The ledger ends
a pass, not `len()`. Data is read in psworker/data and psworker/data/stream_dataset.py.
"""

import inspect
import logging
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from itertools import repeat
from typing import Any, NamedTuple, Protocol, Self

import torch

from pscommon.core.data_stream import Spec
from pscommon.core.errors import InvalidRequestError
from pscommon.core.log_entries import BatchKey
from psworker.data.random_state import reseed
from psworker.session.session import Session

FETCH, COMPUTE = 0, 1

BATCHES_PER_REQUEST = 10_000
"""Batches that one request names at most."""

log = logging.getLogger("psworker")


class RequestedBatch(NamedTuple):
    """A batch to fetch."""

    key: BatchKey
    indices: list[int]
    seeds: tuple[int, ...]

    @property
    def samples(self) -> int:
        return len(self.indices)


class StreamBatch(NamedTuple):
    """A batch that was read from a stream."""

    key: BatchKey
    samples: int
    seeds: tuple[int, ...]


class LeasedBatches:
    """Numbers of batches. Ends when the ledger has none at the moment; `wait` tells whether that
    was the end.

    share: number of the loop's batches that this worker can expect, as of the loop's first
    answer; None before. nothing: the loop was over before this worker got anything of it.
    """

    def __init__(self, session: Session, spec: Spec) -> None:
        self._session = session
        self._spec = spec
        self.loop = spec.loop
        self._ready: deque[int] = deque()
        self._held: dict[int, int | None] = {}
        self._evaluated: list[BatchKey] = []
        self._ended = self._got_any = False
        self.share: int | None = None

    @property
    def nothing(self) -> bool:
        return self._ended and not self._got_any

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
        return self._ended or self._session.client.stopping

    def wait(self) -> bool:
        """Sits out until there is more; False at the loop's end. Either way the model then holds
        the newest weights.
        """
        while not self._ready and not self.over:
            self._ask(idle=True)
        if not self._session.client.stopping:
            self._session.pull()
        return not self.over

    def _ask(self, idle: bool) -> None:
        """Gets nothing if the job had gone on without this worker, which is then back."""
        with self._session.rejoin_on_fence():
            lease = self._session.client.next_batches(
                self._spec, idle=idle, first_open=self._session.loops.first
            )
            self._session.reset_rejoin_count()
            self._ready.extend(lease.numbers)
            self._got_any = self._got_any or bool(lease.numbers)
            if self.share is None and (lease.numbers or lease.end):
                self.share = lease.share
            self._held.update(zip(lease.numbers, lease.following or repeat(None), strict=False))
            self._ended = lease.end and not lease.numbers
            # else it ends for this worker only, with those in hand
            if self._ended and not self._session.consumed.batches:
                self._session.loops.passed(self._spec.loop)
            if lease.sat_out and not idle:
                self._session.pull()

    def use(self, key: BatchKey, samples: int) -> bool:
        """The script gets this batch. One that it gets while gradients are off weighs nothing in
        the next step.

        False: it is not this worker's any more, and the script must not have it.
        """
        if key.number not in self._held:
            return False
        following = self._held.pop(key.number)
        evaluates = not torch.is_grad_enabled()
        if evaluates:
            self._evaluated.append(key)
        self._session.consumed.add(key, 0 if evaluates else samples, following)
        return True

    def drop_evaluated(self) -> None:
        """The loop has ended for this worker: what it only evaluated counts as done, because no
        step will count it.
        """
        keys, self._evaluated = self._evaluated, []
        if keys and self._ended:
            usage, dropped = self._session.consumed, set(keys)
            usage.batches = tuple(key for key in usage.batches if key not in dropped)
            for start in range(0, len(keys), BATCHES_PER_REQUEST):
                with self._session.rejoin_on_fence():
                    self._session.client.drop_batches(keys[start : start + BATCHES_PER_REQUEST])

    def find_end(self, key: BatchKey) -> None:
        """There is nothing in this batch: its source ends before it."""
        if key.number in self._held:
            del self._held[key.number]
            with self._session.rejoin_on_fence():
                self._session.client.return_batches([key])

    def forget(self) -> None:
        """All that was leased and not used is others' now. What the loader has fetched of it is
        passed over.
        """
        self._ready.clear()
        self._held.clear()
        self._evaluated.clear()

    def give_back(self) -> None:
        """What was leased and not used is free for others."""
        held, self._held = sorted(self._held), {}
        self._ready.clear()
        if held:
            self._session.client.return_batches(
                [BatchKey(self._spec.loop, number) for number in held]
            )


class BatchSource(Protocol):
    """Where the batches of leased numbers come from."""

    def open(self, leases: LeasedBatches) -> Iterable[tuple[RequestedBatch | StreamBatch, Any]]:
        """What the batches are and the batches, ending with `leases`; to be gone through again
        when there are more.
        """
        ...


class TrainingData(Protocol):
    """What a loader goes through. dataset, batch_size: as the loader shows them."""

    dataset: Any
    batch_size: int | None

    def spec(self) -> Spec:
        """Of a pass as long as the next one, for the loader's length. TypeError where none is
        known.
        """
        ...

    def next_pass(self, loop: int) -> tuple[Spec, BatchSource]:
        """The next pass, as the loop of this number."""
        ...


class BatchLoader:
    """A loader: each `iter()` is the next pass over the data. Made by `Job.batches`.

    dataset: the data set, of tensors a TensorDataset. batch_size: samples a batch and worker.
    """

    def __init__(self, session: Session, data: TrainingData, reseed: bool) -> None:
        self._session = session
        self._data = data
        self._reseed = reseed
        self._pass: DataPass | None = None
        self._iterator: weakref.ref[BatchIterator] | None = None

    @property
    def dataset(self) -> Any:
        return self._data.dataset

    @property
    def batch_size(self) -> int | None:
        return self._data.batch_size

    @property
    def skipped(self) -> bool:
        """Had the last pass ended before this worker joined, as a resumed job's have? Such a
        pass gives no batches.
        """
        return self._pass is not None and self._pass.skipped

    def __len__(self) -> int:
        """Return the number of batches that this worker can expect of a pass (with epochs=N of
        all N).

        Under sync this is exact for the workers that are registered; under async and ssp it is
        an even share. It is fixed from the beginning of a pass to the next `iter()`. What ends a
        pass is the job's ledger.

        Raises:
            TypeError: The data is a stream, or its sampler has no length.
        """
        if self._pass is not None and (share := self._pass.share) is not None:
            return share
        return self._session.client.share(self._data.spec())

    def __iter__(self) -> "BatchIterator":
        loops = self._session.loops
        spec, source = self._data.next_pass(loops.count)
        if (
            self._pass is not None
            and self._iterator is not None
            and (before := self._iterator()) is not None
        ):
            before.give_way()
            loops.discard(self._pass.loop)
        self._pass = DataPass(self._session, spec, source, self._reseed)
        iterator = BatchIterator(self._pass.batches())
        loops.make(spec.loop, iterator)
        self._iterator = weakref.ref(iterator)
        return iterator


class BatchIterator:
    """One pass, while the script goes through it. A loader has one at a time."""

    def __init__(self, batches: Generator[Any, None, None]) -> None:
        self._batches = batches
        self._gave_way = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._gave_way:
            raise InvalidRequestError(
                "this pass was left when iter() began the loader's next one. Try: for a loop "
                "inside a loop over the same data make another loader with job.batches"
            )
        return next(self._batches)

    def close(self) -> None:
        """Leaves the pass: what was not used is others'. Harmless to repeat."""
        self._batches.close()

    def give_way(self) -> None:
        """The loader's next pass begins."""
        self._gave_way = inspect.getgeneratorstate(self._batches) != inspect.GEN_CLOSED
        self._batches.close()


class DataPass:
    """One loop of the ledger, from its first batch to its end."""

    def __init__(self, session: Session, spec: Spec, source: BatchSource, reseed: bool) -> None:
        self.loop = spec.loop
        self._session = session
        self._leases = LeasedBatches(session, spec)
        self._source = source
        self._reseed = reseed
        self._past = session.client.has_ended(spec.loop)

    @property
    def skipped(self) -> bool:
        return self._past and self._leases.nothing

    @property
    def share(self) -> int | None:
        """Batches that this worker can expect, as of the beginning; None before."""
        return self._leases.share

    def batches(self) -> Generator[Any, None, None]:
        """What the script gets; to be gone through once."""
        leases = self._leases
        if not self._session.loops.open:  # what was used in loops before this one
            self._void(0)
            self._session.consumed.begin()
        steps, samples = self._session.stats.steps, self._session.consumed.samples
        with self._session.running_loop(leases):
            source = self._source.open(leases)
            more = True
            while more:
                for item, batch in self._timed(source):
                    if leases.use(item.key, item.samples):
                        if self._reseed:
                            reseed(*item.seeds, COMPUTE)
                        yield batch
                self._session.enter("wait")
                more = leases.wait()
            leases.drop_evaluated()
            self._session.enter("compute")
        if self._session.stats.steps == steps and (unused := self._void(samples)):
            log.warning(
                "no optimizer.step() in this loop: for the job its %d samples are unused; call "
                "step() of what "
                "job.optimizer returned, or, to evaluate, go through them under torch.no_grad()",
                unused,
            )

    def _void(self, samples: int) -> int:
        """Samples beyond so many weigh nothing in the next step where no parameter has a
        gradient: they were evaluated, or the script has thrown theirs away. Returns how many."""
        usage = self._session.consumed
        unused = 0 if self._session.has_gradients else max(0, usage.samples - samples)
        usage.samples -= unused
        return unused

    def _timed(
        self, source: Iterable[tuple[RequestedBatch | StreamBatch, Any]]
    ) -> Iterator[tuple[RequestedBatch | StreamBatch, Any]]:
        self._session.enter("data")
        for item in source:
            if self._session.client.stopping:
                return
            self._session.enter("compute")
            yield item
            self._session.enter("data")
