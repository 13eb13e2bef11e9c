"""A client with the slowest allowed network, which reveals early reads and late writes."""

from typing import Any

import numpy as np
import torch

from pscommon.core.errors import UnreachableError
from psworker.client.local_client import LocalClient
from psworker.core.results import PushResult

POISON = 0xFF
"""Floats of these bytes are NaN and would change every weight."""


class LateClient(LocalClient):
    """A LocalClient that copies sent bytes at once and delivers weights only when awaited.

    sent: per push, the byte ranges sent before `finish`.
    broken: weights do not arrive any more.
    open: the push that has begun and is not closed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[list[tuple[int, int]]] = []
        self.broken = False
        self.open: LateFlow | None = None

    def begin(self) -> "LateFlow":
        assert self.open is None, "one push at a time"
        self.sent.append([])
        self.open = LateFlow(self, self._gradients, self._received)
        return self.open

    def exchange(self, **call: Any) -> PushResult:
        assert self.open is None or self.open.asking, "nothing else while a push is open"
        return super().exchange(**call)


class LateFlow:
    def __init__(self, client: LateClient, gradients: memoryview, weights: memoryview) -> None:
        self._client = client
        self._gradients, self._weights = (
            np.frombuffer(buffer, np.uint8) for buffer in (gradients, weights)
        )
        self._travelled = np.full_like(self._gradients, POISON)
        self._has_left = np.zeros(len(self._gradients), bool)
        self._arrived = np.ones(len(self._weights), bool)
        self._new = self._weights.copy()
        self.asking = self.finished = False

    def send(self, start: int, stop: int) -> None:
        assert start < stop
        assert not self.finished
        self._client.sent[-1].append((start, stop))
        self._travelled[start:stop] = self._gradients[start:stop]
        self._has_left[start:stop] = True

    def finish(self, **call: Any) -> PushResult:
        rest = ~self._has_left
        self._travelled[rest] = self._gradients[rest]
        self.asking = True
        result = self._client.exchange(
            gradients=self._travelled.data, weights=self._new.data, **call
        )
        self.asking, self.finished = False, True
        moving = self._client.plan.section("buffer").stop
        self._weights[:moving], self._arrived[:moving] = POISON, False
        return result

    def wait(self, start: int, stop: int) -> None:
        assert self.finished
        if self._client.broken:
            raise UnreachableError("the server is gone")
        coming = np.flatnonzero(~self._arrived[start:stop]) + start
        self._weights[coming] = self._new[coming]
        self._arrived[coming] = True

    def close(self) -> None:
        if self._client.open is self:
            self._client.open = None
        if self.finished and not self._client.broken:
            moving = self._client.plan.section("buffer").stop
            self.wait(0, moving)

    @property
    def missing(self) -> int:
        """Number of bytes that have not arrived."""
        return int(np.count_nonzero(~self._arrived))


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the model's state."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
