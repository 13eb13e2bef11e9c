"""How a step's gradients get to the servers and the weights come back. Here: all goes, then all
comes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pscommon.core.errors import PSError
from pscommon.core.log_entries import BatchKey
from psworker.core.protocols import JobClient
from psworker.core.results import PushResult
from psworker.model.adapter import ModelAdapter


@dataclass(frozen=True, slots=True)
class Push:
    """What goes with a step's gradients. groups_json: the parameter groups where they may have
    changed, else empty.
    """

    samples: int
    batches: Sequence[BatchKey]
    groups_json: str


class StepStrategy:
    """Makes steps one after another: everything goes, then everything comes."""

    def __init__(self, bridge: ModelAdapter, client: JobClient) -> None:
        self._bridge = bridge
        self._client = client

    def push(self, push: Push) -> PushResult | None:
        """Sends the model's gradients. Returns how it ended; None where that is not known yet."""
        absent = self._bridge.gather()
        result = self._client.exchange(
            gradients=self._bridge.gradients.memory,
            weights=self._bridge.weights.memory,
            absent=absent,
            samples=push.samples,
            batches=push.batches,
            groups_json=push.groups_json,
        )
        self._bridge.scatter()
        return result

    def pull(self) -> None:
        """The job's newest weights and buffers into the model."""
        self._bridge.reattach()
        self._client.exchange(gradients=None, weights=self._bridge.weights.memory)
        self._bridge.scatter()

    def settle(self) -> None:
        """Waits until no push is on its way and its weights are in the model; raises what it
        ended with.
        """

    def skip(self) -> None:
        """The gradients in hand are not sent."""

    def drop(self, error: PSError) -> None:
        """This worker has lost its place in the job, for this reason. Nothing is on its way any
        more.
        """
        self.skip()

    def renew(self) -> None:
        """The worker has a new place: everything that the job has now into the model, frozen
        tensors too.
        """
        self._bridge.reattach()
        self._client.start(self._bridge.weights.memory)
        self._bridge.scatter(everything=True)

    def close(self) -> None:
        """Takes the job's hands off the model, without waiting for anything."""
