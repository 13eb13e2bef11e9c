"""Detector of in-place changes that a script makes to a job's tensors."""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import compress
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from pscommon.core.partition import ByteRange
from pscommon.telemetry.logs import get_logger

SAMPLE_WORD_COUNT = 1 << 9
"""Number of 8-byte words compared per step: all of a small model, an even sample of a large one."""

SAMPLE_TENSOR_COUNT = 1 << 9
"""Number of tensors whose version counter is checked: all, or an even sample of more."""

MAX_NAMES_COUNT = 3
"""Number of tensors that the warning names."""

_VERSION = attrgetter("_version")

log = get_logger(__name__)


def warn_of_overwritten(tensors: str) -> None:
    """Log that the servers overwrite changed weights. tensors: Their names."""
    log.warning(
        "weights_changed_by_script",
        tensors=tensors,
        problem="the job's weights live on the servers and overwrite this worker's copy",
        remedy="load or set weights before job.optimizer, or begin a training; bound them in the "
        "forward pass (torch.nn.utils.parametrize)",
    )


def warn_of_unstored(tensors: str) -> None:
    """Log that the servers do not store changed frozen parameters. tensors: Their names."""
    first = tensors.partition(",")[0]
    module = first.rpartition(".")[0]
    pattern = f"{module}.*" if module else first
    log.warning(
        "frozen_changed_by_script",
        tensors=tensors,
        problem="the job does not store changes of frozen parameters: they are missing in saved "
        "files, in a resumed run, and in a worker that rejoins",
        remedy=f'name them in job.optimizer(..., buffers={{"{pattern}": "first"}})',
    )


def short(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    more = len(names) - MAX_NAMES_COUNT
    return ", ".join(names[:MAX_NAMES_COUNT]) + (f" and {more} more" if more > 0 else "")


class ChangeDetector:
    """Warns about tensors that the script has changed in place.

    torch's version counters show changes for all of up to SAMPLE_TENSOR_COUNT tensors. They miss
    writes through `.data` or numpy; a comparison of sampled bytes covers those.

    Args:
        names: Name of each tensor.
        indices: Index of each tensor in the model spec.
        tensors: The tensors in flat buffer order.
        extents: Byte range of each tensor in the flat buffer.
        weights: The bytes of all these tensors, uint8.
        warn: Logs a change of the tensors with these names.

    Attributes:
        has_warned: It has warned about a change.
    """

    def __init__(
        self,
        names: Sequence[str],
        indices: Sequence[int],
        tensors: list[Tensor],
        extents: Sequence[ByteRange],
        weights: Tensor,
        warn: Callable[[str], None] = warn_of_overwritten,
    ) -> None:
        self._names, self._warn = names, warn
        self._counted_tensors = range(0, len(tensors), len(tensors) // SAMPLE_TENSOR_COUNT + 1)
        self._indices = [indices[index] for index in self._counted_tensors]
        self._tensors = [tensors[index] for index in self._counted_tensors]
        self._starts = [extent.start - extents[0].start for extent in extents]
        words = weights.view(torch.int64)
        # an odd stride reaches every column of a matrix whose width is a power of two
        self._stride = words.numel() // SAMPLE_WORD_COUNT | 1
        self._sample = words[:: self._stride]
        self._last_sample: Tensor | None = None
        self._expected = self._counted()
        self._warns_again = self.has_warned = False

    def step(self, absent: Collection[int]) -> None:
        """Increment the torch version of each tensor with a gradient, as an optimizer step does.

        Servers write below torch, which does not see the change. With the increment, backward
        through earlier results raises, as after any optimizer step.
        """
        stepped = np.isin(self._indices, list(absent), invert=True) if absent else None
        self._expected += 1 if stepped is None else stepped
        torch.autograd.graph.increment_version(
            self._tensors if stepped is None else list(compress(self._tensors, stepped))
        )

    def record_arrival(self) -> None:
        """Record a sample of the newest weights, which have all arrived."""
        self._last_sample = self._sample.clone()

    def keep(self, replaced: Iterable[int]) -> bool:
        """Return whether the script has changed weights, which then stay for now.

        `check` warns of each change that was kept. Arguments as of `check`.
        """
        self._warns_again = self._warns_again or bool(self._changed(replaced, self._counted()))
        return self._warns_again

    def check(self, replaced: Iterable[int]) -> None:
        """Warn of the first change by the script, and of each one that was kept.

        Call this before the client writes weights again.

        Args:
            replaced: Numbers of tensors whose storage the script replaced by other values.
        """
        counted = self._counted()
        numbers = self._changed(replaced, counted)
        has_warned = self.has_warned and not self._warns_again
        self._expected, self._last_sample, self._warns_again = counted, None, False
        if not numbers or has_warned:
            return
        self.has_warned = True
        self._warn(short([self._names[number] for number in numbers]))

    def _changed(
        self, replaced: Iterable[int], counted: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    ) -> list[int]:
        places = np.flatnonzero(counted != self._expected)
        changed = (self._counted_tensors[place] for place in places)
        return sorted({*replaced, *changed, *self._differing()})

    def _counted(self) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        return np.fromiter(map(_VERSION, self._tensors), np.int64, len(self._tensors))

    def _differing(self) -> set[int]:
        if self._last_sample is None or torch.equal(self._sample, self._last_sample):
            return set()
        words = (self._sample != self._last_sample).nonzero().flatten().tolist()
        return {bisect_right(self._starts, word * self._stride * 8) - 1 for word in words}
