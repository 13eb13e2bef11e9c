"""Memory for pushes between their arrival and the update that counts them."""

import threading
from collections.abc import Collection, Mapping

import torch

from pscommon.core.errors import InvalidRequestError
from pscommon.core.model import Scalar
from psserver.stretch import Stretch, raw


class Staging:
    """One push, or one upload of initial weights, of one worker on this shard.

    views: writable bytes, to be filled one after another with what comes from the wire. They lie in a buffer as long
    as a whole push, with holes for the absent tensors, so that all pushes line up.
    absent: trainable tensors (indices into the model) that the push has no gradient for.
    groups: the push's hyper-parameters of each group, set by whoever received them; None: unchanged.
    """

    def __init__(self, stretch: Stretch, memory: torch.Tensor, absent: frozenset[int], initial: bool) -> None:
        self.memory: torch.Tensor | None = memory
        self.absent = absent
        self.initial = initial
        self.groups: tuple[Mapping[str, Scalar], ...] | None = None
        kept = [*stretch.plan.without(stretch.ranges["trainable"], absent), stretch.ranges["buffer"]]
        if initial:
            kept.append(stretch.ranges["frozen"])
        self.views = [raw(stretch.bytes_of(memory, span)) for span in kept if span.nbytes]
        self.nbytes = sum(span.nbytes for span in kept)


class StagingPool:
    """Makes stagings and keeps their buffers for the next ones, because fresh memory costs more than the copy into it.

    Thread-safe. It holds as many buffers as were ever in use at once.
    """

    def __init__(self, stretch: Stretch) -> None:
        self._stretch = stretch
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, absent: Collection[int], initial: bool) -> Staging:
        """Room for a push, contents undefined. InvalidRequestError: an absent index is not a trainable tensor's."""
        missing = frozenset(absent)
        self._check(missing)
        if initial:
            return Staging(self._stretch, torch.empty(self._stretch.nbytes, dtype=torch.uint8), missing, initial)
        with self._lock:
            memory = self._free.pop() if self._free else None
        if memory is None:
            memory = torch.empty(self._stretch.step_nbytes, dtype=torch.uint8)
        return Staging(self._stretch, memory, missing, initial)

    def give(self, staging: Staging) -> None:
        """Take a staging's buffer back; nobody may write to its views from now on. Repeating it is harmless."""
        with self._lock:
            memory, staging.memory = staging.memory, None
            if memory is not None and not staging.initial:
                self._free.append(memory)
        staging.views = []

    def _check(self, absent: frozenset[int]) -> None:
        tensors = self._stretch.plan.spec.tensors
        for index in absent:
            if not 0 <= index < len(tensors) or tensors[index].role != "trainable":
                raise InvalidRequestError(f"absent: {index} is not a trainable tensor of the model's {len(tensors)}")
