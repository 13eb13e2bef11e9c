"""Memory for pushes between their arrival and the update that counts them."""

import math
import threading
from collections.abc import Collection, Mapping

import torch

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model_spec import Scalar
from psserver.parameters.memory_budget import MemoryClaim
from psserver.parameters.partition import RoleBuffers, ShardPartition


class Staging:
    """One push, or one upload of initial weights, of one worker on this shard.

    memory: the ranges, with holes for the absent tensors, so that all pushes line up; None once
    it was released. ours: it is the server's, which may overwrite it; else a worker's, who waits
    until the push is decided. views: writable bytes, to be filled one after another with what
    comes from the wire; none in a worker's memory. absent: trainable tensors (indices into the
    model) that the push has no gradient for. groups: the push's hyper-parameters of each group,
    set by whoever received them; None: unchanged. claim: what the server's budget lent for it.
    stretch: the part of the model that it is for.
    """

    def __init__(
        self,
        stretch: ShardPartition,
        memory: RoleBuffers,
        absent: frozenset[int],
        initial: bool = False,
        ours: bool = True,
    ) -> None:
        self.memory: RoleBuffers | None = memory
        self.ours = ours
        self.absent = absent
        self.initial = initial
        self.groups: tuple[Mapping[str, Scalar], ...] | None = None
        self.claim: MemoryClaim | None = None
        self.stretch = stretch
        spans = stretch.push(absent, initial)
        self.views = [memory.raw(*span) for span in spans] if ours else []
        self.nbytes = sum(stop - start for _, start, stop in spans)
        self._watched = _single(stretch, memory, absent) if ours else None
        self._seen, self._finite = 0, True

    def close(self, absent: Collection[int]) -> None:
        """All bytes are here that will come, for every tensor but those in `absent`. Errors as
        of StagingPool.take.
        """
        self.absent = _checked(self.stretch, absent)

    @property
    def needed(self) -> list[tuple[int, int]]:
        """What must come, as ranges of bytes of `views` of a push that was begun without
        `absent` tensors.
        """
        trainable, buffers = self.stretch.ranges["trainable"], self.stretch.ranges["buffer"].nbytes
        kept = self.stretch.plan.without(trainable, self.absent)
        gradients = [(start - trainable.start, stop - trainable.start) for start, stop in kept]
        return [*gradients, (trainable.nbytes, trainable.nbytes + buffers)]

    def filled(self, nbytes: int) -> None:
        """The first `nbytes` bytes are here: look for NaN and Inf in the new ones while they are
        in the cache.
        """
        if self._watched is not None:
            upto = min(nbytes // self._watched.element_size(), len(self._watched))
            if upto > self._seen:
                self._finite = self._finite and math.isfinite(
                    self._watched[self._seen : upto].sum().item()
                )
                self._seen = upto

    @property
    def gradients_are_finite(self) -> bool:
        """True: all were looked at and are. False: nobody knows yet."""
        return self._watched is not None and self._finite and self._seen == len(self._watched)

    @property
    def contents(self) -> list[memoryview]:
        """Its bytes as they travel, without absent tensors, wherever they lie."""
        if self.memory is None:
            raise ValueError("this staging was released")
        return [self.memory.raw(*span) for span in self.stretch.push(self.absent, self.initial)]

    def release(self) -> RoleBuffers | None:
        """Lets go of the memory, which is returned the first time."""
        memory, self.memory = self.memory, None
        self.views, self._watched = [], None
        return memory


def _checked(stretch: ShardPartition, absent: Collection[int]) -> frozenset[int]:
    tensors = stretch.plan.spec.tensors
    for index in absent:
        if not 0 <= index < len(tensors) or tensors[index].role != "trainable":
            raise InvalidRequestError(
                f"absent: {index} is not a trainable tensor of the model's {len(tensors)}"
            )
    return frozenset(absent)


def _single(
    stretch: ShardPartition, memory: RoleBuffers, absent: frozenset[int]
) -> torch.Tensor | None:
    """The gradients as one flat tensor, if they are of one dtype and without holes."""
    if stretch.only_dtype is None or not stretch.trainable.isdisjoint(absent):
        return None
    return stretch.view(memory, stretch.only_dtype, *stretch.ranges["trainable"])


class StagingPool:
    """Makes stagings and keeps their buffers for the next ones, because fresh memory costs more
    than the copy into it.

    Thread-safe. It holds as many buffers as were ever in use at once.
    """

    def __init__(self, stretch: ShardPartition) -> None:
        self._stretch = stretch
        self._free: list[RoleBuffers] = []
        self._lock = threading.Lock()

    def take(self, absent: Collection[int], initial: bool) -> Staging:
        """Room for a push, contents undefined. InvalidRequestError: an absent index is not a
        trainable tensor's.
        """
        missing = self.checked(absent)
        if initial:
            whole = self._stretch.end_to_end(torch.empty(self._stretch.nbytes, dtype=torch.uint8))
            return Staging(self._stretch, whole, missing, initial)
        return Staging(self._stretch, self.borrow(), missing)

    def borrow(self) -> RoleBuffers:
        """Room for all that steps, contents undefined; `give_back` it."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return self._stretch.end_to_end(torch.empty(self._stretch.step_nbytes, dtype=torch.uint8))

    def give_back(self, memory: RoleBuffers) -> None:
        """Nobody may look at it from now on."""
        with self._lock:
            self._free.append(memory)

    def give(self, staging: Staging) -> None:
        """Take a staging's buffer back; nobody may write to its views from now on. Repeating it
        is harmless.
        """
        memory = staging.release()
        if (
            memory is not None
            and staging.ours
            and not staging.initial
            and staging.stretch is self._stretch
        ):
            self.give_back(memory)

    def checked(self, absent: Collection[int]) -> frozenset[int]:
        """The same as a set; InvalidRequestError as for `take`."""
        return _checked(self._stretch, absent)
