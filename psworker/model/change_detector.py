"""What a script does in place to weights that are the job's: noticed before the job's next
weights overwrite it.
"""

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
"""So many words of 8 bytes are compared with each step: all of a small model, in a large one
some of each part.
"""

COUNTED = 1 << 9
"""Of so many tensors torch's count of changes is looked at: of all in most models, else of some
of each part.
"""

NAMED = 3

_VERSION = attrgetter("_version")

log = logging.getLogger("psworker")


class ChangeDetector:
    """Warns, once a job, of trainable tensors that the script has changed in place: nobody else
    gets to know of it.

    torch counts changes in place, so those are found exactly, unless there are thousands of
    tensors. It does not count what goes through `.data` or numpy: for that a sample of the bytes
    is compared.

    indices: of the tensors, into the model's spec. tape: the bytes of all of them, at `extents`.
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
        # an odd stride meets each column of a matrix
        self._stride = words.numel() // SAMPLE | 1
        self._sample = words[:: self._stride]
        self._kept: Tensor | None = None
        self._expected = self._counted()
        self._told = False

    def step(self, absent: Collection[int]) -> None:
        """For torch, too, a step changes each tensor that has a gradient: backward through what
        was computed before it raises, as after any optimizer's step. (Servers write below torch,
        which does not see that.)
        """
        stepped = np.isin(self._indices, list(absent), invert=True) if absent else None
        self._expected += 1 if stepped is None else stepped
        torch.autograd.graph.increment_version(
            self._tensors if stepped is None else list(compress(self._tensors, stepped))
        )

    def came(self) -> None:
        """All of the job's newest weights are here."""
        self._kept = None if self._told else self._sample.clone()

    def check(self, replaced: Iterable[int]) -> None:
        """To be called before the client may write weights again. replaced: tensors that the
        script gave other values by giving them other storage.
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
                "live on the servers and "
                "overwrite this worker's copy. Load or set weights before job.optimizer, and "
                "bound them in the forward "
                "pass (torch.nn.utils.parametrize). This is said once; it does not matter for "
                "weights that the script "
                "has put back since",
                ", ".join(self._names[place] for place in places[:NAMED]),
                more,
            )

    def _counted(self) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        return np.fromiter(map(_VERSION, self._tensors), np.int64, len(self._tensors))

    def _differing(self) -> set[int]:
        """By the sample."""
        if self._kept is None or torch.equal(self._sample, self._kept):
            return set()
        words = (self._sample != self._kept).nonzero().flatten().tolist()
        return {bisect_right(self._starts, word * self._stride * 8) - 1 for word in words}
