"""What a script can read about its job at any time, without waiting for the servers."""

from psworker.core.protocols import JobClient


class JobFacts:
    """Read-only; as of the last answer of the servers."""

    def __init__(self, client: JobClient) -> None:
        self.client = client

    @property
    def version(self) -> int:
        """How many updates the job's weights have had, as far as this worker knows."""
        return self.client.version

    @property
    def policy(self) -> str:
        """How the servers let steps count: sync, async or ssp; "local" without servers."""
        return self.client.policy

    @property
    def workers(self) -> int:
        """Number of workers that have called `optimizer` and take part, as of the last heartbeat
        (at most 1 s old).
        """
        return self.client.workers

    @property
    def is_first(self) -> bool:
        """This worker is the first of those, for what one worker does for all. Before the first
        step: its rank is 0.
        """
        return self.client.is_first

    @property
    def stopping(self) -> bool:
        """The job ends, or this worker was asked to leave: the next batch, pass or step raises
        `psworker.Stopping`.
        """
        return self.client.stopping
