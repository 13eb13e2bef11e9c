"""The loader of a script: passes over this worker's share of the data.

Each `iter()` of a loader begins the next pass, which is a loop of the job's ledger; the pass is
named by its loader and its count. A batch is a number; the loop's spec says which samples it
denotes. A pass leases numbers while the ledger has
some. When it has none, the script first uses all fetched batches. Then the worker waits outside of
rounds until a lost worker's batches return or the loop ends. The ledger ends a pass, not `len()`.
"""

import inspect
import weakref
from collections.abc import Generator
from dataclasses import replace
from typing import Any, Final, Self

import torch

from pscommon.core.data_stream import Spec
from pscommon.core.errors import InvalidRequestError
from pscommon.core.script_place import PassName
from pscommon.telemetry.logs import get_logger
from psworker.data.data_source import COMPUTE, DataSource, PassReader
from psworker.data.leased_batches import LeasedBatches
from psworker.data.random_state import reseed
from psworker.session.session import Session

log = get_logger(__name__)

UPDATES: Final = object()
"""Item of a pass that marks updates: see `BatchLoader.marks_updates`."""


class BatchLoader:
    """A loader, made by `Job.batches`: each `iter()` is the next pass over the data.

    Attributes:
        marks_updates: Passes yield `UPDATES`, too, for adapters of frameworks: at the beginning,
            and where this worker had no batch, so that the job may have made updates without it.
            The model then has the newest weights, and no batch waits to be used. A pass that is
            skipped yields nothing.
    """

    def __init__(
        self, session: Session, source: DataSource, reseed: bool, name: str | None = None
    ) -> None:
        self._session = session
        self._name = session.loops.name_loader(self, name)
        self._source = source
        self._reseed = reseed
        self.marks_updates = False
        self._pass: DataPass | None = None
        self._iterator: weakref.ref[BatchIterator] | None = None

    @property
    def dataset(self) -> Any:
        """The data set; for tensors a TensorDataset."""
        return self._source.dataset

    @property
    def batch_size(self) -> int | None:
        """Samples per batch and worker; None with a batch_sampler."""
        return self._source.batch_size

    @property
    def skipped(self) -> bool:
        """The last pass gave no batches, because it had ended before this worker joined."""
        return self._pass is not None and self._pass.is_skipped

    def __len__(self) -> int:
        """Return the number of batches that this worker can expect of a pass.

        With epochs=N a pass has N epochs. Under sync the number is exact for the registered
        workers; under async and ssp it is an even share. It is fixed from the beginning of a pass
        to the next `iter()`, unless the length of the data set or sampler changes. The job's
        ledger ends a pass, not this number.

        Raises:
            TypeError: The data is a stream, or its sampler has no length.
        """
        share = self._pass.leases.share if self._pass is not None else None
        if share is not None and not self._source.has_changed():
            return share
        return self._session.client.data.share(self._source.spec())

    def __iter__(self) -> "BatchIterator":
        loops = self._session.loops
        spec, read = self._source.next_pass(loops.count)
        if self._session.trial is not None and not torch.is_grad_enabled():
            spec = replace(spec, epochs=1)  # only training passes repeat for a trial
        if self._pass is not None:
            self._session.consumed.decide(self._pass.leases.spec.loop)
        if (
            self._pass is not None
            and self._iterator is not None
            and (before := self._iterator()) is not None
        ):
            before.replace()
            loops.discard(self._pass.name)
        iterator = BatchIterator()
        name = loops.make(self._name, iterator)
        self._pass = DataPass(self._session, spec, name, read, self._reseed, self.marks_updates)
        iterator.begin(self._pass.batches())
        self._iterator = weakref.ref(iterator)
        return iterator

    def release(self) -> None:
        """Return the batches that the script has not received yet; the pass leases others later.

        A script that waits for other workers inside a pass calls it, so that a worker without a
        batch does not wait for these.
        """
        if self._pass is not None and self._iterator is not None and self._iterator() is not None:
            self._pass.leases.release()


class BatchIterator:
    """One pass of a loader. A loader has one iterator at a time."""

    _batches: Generator[Any, None, None]

    def __init__(self) -> None:
        self._is_replaced = False

    def begin(self, batches: Generator[Any, None, None]) -> None:
        """Use these batches; call it once."""
        self._batches = batches

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._is_replaced:
            raise InvalidRequestError(
                "cannot continue this pass: iter() has begun the loader's next one. Try: for a "
                "loop inside a loop over the same data make another loader with job.batches"
            )
        return next(self._batches)

    def close(self) -> None:
        """Leave the pass and return unused batches to the job; a second call does nothing."""
        self._batches.close()

    def replace(self) -> None:
        """Leave the pass, because the loader's next one begins."""
        self._is_replaced = inspect.getgeneratorstate(self._batches) != inspect.GEN_CLOSED
        self._batches.close()


class DataPass:
    """One loop of the ledger, from its first batch to its end.

    Attributes:
        name: Name of the pass.
        leases: Its batches that this worker has leased.
    """

    def __init__(
        self,
        session: Session,
        spec: Spec,
        name: PassName,
        read: PassReader,
        reseed: bool,
        marks_updates: bool,
    ) -> None:
        self.name = name
        self._session = session
        self.leases = LeasedBatches(session, spec, name)
        self._read = read
        self._reseed = reseed
        self._marks_updates = marks_updates
        self._was_finished = session.client.data.has_ended(name)

    @property
    def is_skipped(self) -> bool:
        """The loop had ended before this worker began it."""
        return self._was_finished and self.leases.is_empty

    def batches(self) -> Generator[Any, None, None]:
        """Yield the batches that the script receives. Only one call is valid."""
        session, leases, consumed = self._session, self.leases, self._session.consumed
        if not session.loops.open:  # nothing of earlier loops belongs to the next step
            consumed.begin()
        steps, samples = session.stats.steps, consumed.samples
        with session.running_loop(leases, torch.is_grad_enabled()):
            fetched = self._read(leases)
            more = True
            while more:
                if self._marks_updates and not self._was_finished:
                    yield UPDATES
                session.enter("data")
                for facts, batch in fetched:
                    if session.client.stopping:
                        break
                    session.enter("compute")
                    if leases.use(facts.key, facts.samples, facts.all_samples):
                        if self._reseed:
                            reseed(*facts.seeds, COMPUTE)
                        yield batch
                    session.enter("data")
                session.enter("wait")
                more = leases.wait()
                if self._marks_updates and leases.waits_for_rest:
                    yield UPDATES  # the script pushes the rest, and then waits like the others
                    more = leases.continue_after_rest()
            consumed.decide(leases.spec.loop)
            leases.drop_evaluated()
            session.enter("compute")
            if self._marks_updates and not self.is_skipped:
                yield UPDATES
        if session.stats.steps == steps and (unused := consumed.void(samples)):
            log.warning(
                "batches_unused",
                samples=unused,
                reason="no optimizer.step() in this loop",
                remedy="call step() of what job.optimizer returned, or, to evaluate, "
                "iterate under torch.no_grad()",
            )
