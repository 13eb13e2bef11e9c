"""Detector of in-place changes that a script makes to job weights."""

import logging
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from itertools import compress
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from pscommon.core.partition import ByteRange

SAMPLE = 1 << 9
"""Number of 8-byte words compared per step: all of a small model, an even sample of a large one."""

COUNTED = 1 << 9
"""From this many trainable tensors on, torch's version counter is checked for an even sample only.
"""

NAMED = 3

_VERSION = attrgetter("_version")

log = logging.getLogger("psworker")


class ChangeDetector:
    """Warns once per job about trainable tensors that the script has changed in place.

    The next weights from the servers overwrite such changes. The torch version counter finds them
    exactly below COUNTED tensors. It misses writes through `.data` or numpy; a comparison of
    sampled bytes covers those.

    Args:
        names: Name of each trainable tensor.
        indices: Index of each trainable tensor in the model spec.
        tensors: The trainable tensors in flat buffer order.
        extents: Byte range of each tensor in `tape`.
        tape: The bytes of all trainable tensors, uint8.
    """

    def __init__(
        self,
        names: Sequence[str],
        indices: Sequence[int],
        tensors: list[Tensor],
        extents: Sequence[ByteRange],
        tape: Tensor,
    ) -> None:
        self._names = names
        self._counted_places = range(0, len(tensors), len(tensors) // COUNTED + 1)
        self._indices = [indices[place] for place in self._counted_places]
        self._tensors = [tensors[place] for place in self._counted_places]
        self._starts = [extent.start for extent in extents]
        words = tape.view(torch.int64)
        # an odd stride reaches every column of a matrix whose width is a power of two
        self._stride = words.numel() // SAMPLE | 1
        self._sample = words[:: self._stride]
        self._kept: Tensor | None = None
        self._expected = self._counted()
        self._told = False

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

    def came(self) -> None:
        """Record a sample of the newest weights, which have all arrived."""
        self._kept = None if self._told else self._sample.clone()

    def check(self, replaced: Iterable[int]) -> None:
        """Warn if the script changed weights. Call this before the client writes weights again.

        Args:
            replaced: Places of tensors whose storage the script replaced by other values.
        """
        if self._told:
            return
        counted = self._counted()
        changed = [
            self._counted_places[place] for place in np.flatnonzero(counted != self._expected)
        ]
        places = sorted({*replaced, *changed, *self._differing()})
        self._expected, self._kept = counted, None
        if places:
            self._told = True
            more = f" and {len(places) - NAMED} more" if len(places) > NAMED else ""
            log.warning(
                "the script has changed %s%s in place: that is lost, because the job's weights "
                "live on the servers and overwrite this worker's copy. Load or set weights before "
                "job.optimizer, and bound them in the forward pass (torch.nn.utils.parametrize). "
                "This is said once; it does not matter for weights that the script has put back "
                "since",
                ", ".join(self._names[place] for place in places[:NAMED]),
                more,
            )

    def _counted(self) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        return np.fromiter(map(_VERSION, self._tensors), np.int64, len(self._tensors))

    def _differing(self) -> set[int]:
        if self._kept is None or torch.equal(self._sample, self._kept):
            return set()
        words = (self._sample != self._kept).nonzero().flatten().tolist()
        return {bisect_right(self._starts, word * self._stride * 8) - 1 for word in words}
