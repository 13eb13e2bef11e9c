"""What a client knows of its job without asking the servers."""

from collections.abc import Sequence

from psworker.connection.connection import Connection


class ClientFacts:
    """Read-only; as of the last answer of the servers."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def job(self) -> str:
        """The id of the job that the servers run."""
        return self._connection.place.job

    @property
    def worker(self) -> int:
        """This worker's number, new at every connect and `rejoin`; 0 for an observer."""
        return self._connection.place.worker

    @property
    def policy(self) -> str:
        """How the servers let pushes count, as the last heartbeat said: sync, async or ssp;
        empty for an observer.
        """
        return self._connection.place.policy

    @property
    def workers(self) -> int:
        """How many workers have registered the model and take part, as the last heartbeat said."""
        return self._connection.place.workers

    @property
    def is_first(self) -> bool:
        """This worker is the first of them, as the last heartbeat said; while the job waits for
        its workers: rank 0.
        """
        return self._connection.place.is_first

    @property
    def bad_gradients(self) -> str:
        """What becomes of gradients with NaN or Inf: abort, skip or clip; empty for an observer."""
        return self._connection.bad_gradients

    @property
    def addresses(self) -> Sequence[str]:
        """Of the servers, by shard."""
        return self._connection.lane.addresses

    @property
    def open_loop(self) -> int:
        """Loops before it had ended when this worker joined."""
        return self._connection.place.open_loop

    def has_ended(self, loop: int) -> bool:
        """Had this loop ended when this worker joined?"""
        return self._connection.place.has_ended(loop)

    @property
    def draining(self) -> bool:
        """This worker was asked to leave, by SIGTERM to ps-worker, ps-ctl drain or `drain`."""
        return self._connection.drain.asked
