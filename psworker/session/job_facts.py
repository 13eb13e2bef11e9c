"""Facts about the job that a script can read at any time, without a request."""

from psworker.core.protocols import JobClient


class JobFacts:
    """Read-only properties of the job, as of the last answer of the servers."""

    def __init__(self, client: JobClient) -> None:
        self.client = client

    @property
    def training(self) -> str:
        """The name of the training, see `psworker.connect`."""
        return self.client.training

    @property
    def version(self) -> int:
        """Number of updates in the job's weights, as far as this worker knows."""
        return self.client.version

    @property
    def policy(self) -> str:
        """The policy of the servers: sync, async or ssp; "local" without servers."""
        return self.client.policy

    @property
    def workers(self) -> int:
        """Number of workers that train now, as of the last heartbeat (at most 1 s old).

        Before training starts: the larger of the workers that have joined and `--min-workers`.
        """
        return self.client.workers

    @property
    def is_first(self) -> bool:
        """True on exactly one of the workers that train, for work that one worker does for all.

        Before the first step: True on the worker with rank 0.
        """
        return self.client.is_first

    @property
    def stopping(self) -> bool:
        """True if the job ends or this worker was asked to leave.

        The next batch, pass or step then raises `psworker.Stopping`.
        """
        return self.client.stopping
