"""A flow in one piece, for where nothing is won, or nothing may go, before a push is complete."""

from collections.abc import Callable, Collection, Sequence

from pscommon.core.log_entries import BatchKey
from psworker.core.results import PushResult


class BufferedPush:
    """Sends nothing before `finish`, which ends with everything here. exchange: as
    Client.exchange.
    """

    def __init__(
        self, exchange: Callable[..., PushResult], gradients: memoryview, weights: memoryview
    ) -> None:
        self._exchange = exchange
        self._gradients, self._weights = gradients, weights

    def send(self, start: int, stop: int) -> None:
        """It goes with finish."""

    def finish(
        self,
        *,
        absent: Collection[int] = (),
        samples: int = 1,
        batches: Sequence[BatchKey] = (),
        groups_json: str = "",
    ) -> PushResult:
        """The whole exchange."""
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
        """It is here."""

    def close(self) -> None:
        """Nothing is open."""
