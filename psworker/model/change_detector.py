"""Detector of in-place changes that a script makes to job weights."""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
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


class ChangeDetector:
    """Warns once per job about trainable tensors that the script has changed in place.

    The next weights from the servers overwrite such changes. torch's version counters show them
    for all of up to SAMPLE_TENSOR_COUNT tensors. They miss writes through `.data` or numpy; a
    comparison of sampled bytes covers those.

    Args:
        names: Name of each trainable tensor.
        indices: Index of each trainable tensor in the model spec.
        tensors: The trainable tensors in flat buffer order.
        extents: Byte range of each tensor in `weights`.
        weights: The bytes of all trainable tensors, uint8.
    """

    def __init__(
        self,
        names: Sequence[str],
        indices: Sequence[int],
        tensors: list[Tensor],
        extents: Sequence[ByteRange],
        weights: Tensor,
    ) -> None:
        self._names = names
        self._counted_tensors = range(0, len(tensors), len(tensors) // SAMPLE_TENSOR_COUNT + 1)
        self._indices = [indices[index] for index in self._counted_tensors]
        self._tensors = [tensors[index] for index in self._counted_tensors]
        self._starts = [extent.start for extent in extents]
        words = weights.view(torch.int64)
        # an odd stride reaches every column of a matrix whose width is a power of two
        self._stride = words.numel() // SAMPLE_WORD_COUNT | 1
        self._sample = words[:: self._stride]
        self._last_sample: Tensor | None = None
        self._expected = self._counted()
        self._has_warned = False

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
        self._last_sample = None if self._has_warned else self._sample.clone()

    def check(self, replaced: Iterable[int]) -> None:
        """Warn if the script changed weights. Call this before the client writes weights again.

        Args:
            replaced: Numbers of tensors whose storage the script replaced by other values.
        """
        if self._has_warned:
            return
        counted = self._counted()
        changed = [
            self._counted_tensors[index] for index in np.flatnonzero(counted != self._expected)
        ]
        numbers = sorted({*replaced, *changed, *self._differing()})
        self._expected, self._last_sample = counted, None
        if numbers:
            self._has_warned = True
            more = (
                f" and {len(numbers) - MAX_NAMES_COUNT} more"
                if len(numbers) > MAX_NAMES_COUNT
                else ""
            )
            log.warning(
                "weights_changed_by_script",
                tensors=", ".join(self._names[number] for number in numbers[:MAX_NAMES_COUNT])
                + more,
                problem="the job's weights live on the servers and overwrite this worker's copy",
                remedy="load or set weights before job.optimizer; bound them in the forward pass "
                "(torch.nn.utils.parametrize)",
            )

    def _counted(self) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        return np.fromiter(map(_VERSION, self._tensors), np.int64, len(self._tensors))

    def _differing(self) -> set[int]:
        if self._last_sample is None or torch.equal(self._sample, self._last_sample):
            return set()
        words = (self._sample != self._last_sample).nonzero().flatten().tolist()
        return {bisect_right(self._starts, word * self._stride * 8) - 1 for word in words}
