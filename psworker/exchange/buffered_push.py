"""A push stream that sends nothing before `finish`.

`ModelExchange.begin` uses it with a transport without threads, and while the outcome of the
worker's last push is unknown.
"""

from collections.abc import Callable, Collection, Sequence

from pscommon.core.log_entries import BatchKey
from psworker.core.results import PushResult


class BufferedPush:
    """A `PushStream` whose `finish` makes one blocking exchange.

    exchange: Has the signature of `Client.exchange`.
    """

    def __init__(
        self, exchange: Callable[..., PushResult], gradients: memoryview, weights: memoryview
    ) -> None:
        self._exchange = exchange
        self._gradients, self._weights = gradients, weights

    def send(self, start: int, stop: int) -> None:
        """Do nothing: `finish` sends all bytes."""

    def finish(
        self,
        *,
        absent: Collection[int] = (),
        samples: int = 1,
        batches: Sequence[BatchKey] = (),
        groups_json: str = "",
    ) -> PushResult:
        """Push all gradients, pull the weights, and return the outcome of the push."""
        return self._exchange(
            gradients=self._gradients,
            weights=self._weights,
            absent=absent,
            samples=samples,
            batches=batches,
            groups_json=groups_json,
            base=None,
        )

    def wait(self, start: int, stop: int) -> None:
        """Return at once: all weights arrive in `finish`."""

    def close(self) -> None:
        """Do nothing: no call is open."""
