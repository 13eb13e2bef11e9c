"""A worker's place in its job, as its script sees it: got again when it is lost, given up when
it is to leave.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Never, TypeVar

from pscommon.core.errors import FencedError, PSError, QuarantinedError
from psworker.client.local_client import JobClient
from psworker.data.batches import ConsumedBatches
from psworker.session.drain import DrainedError, Stopping
from psworker.session.job_facts import JobFacts
from psworker.session.open_loops import OpenLoops

if TYPE_CHECKING:
    from psworker.optim.optimizer import ServerOptimizer

T = TypeVar("T")

ASKED = "this worker was asked to leave"

MOST_RETURNS = 5
"""So often in a row a worker comes back and is out again before anything that it asks for has
succeeded.
"""

log = logging.getLogger("psworker")


class Rejoin(JobFacts):
    """Part of a Job.

    client: the connection underneath. usage: batches that the script has in hand. loops: those
    that it is in.
    """

    def __init__(self, client: JobClient) -> None:
        super().__init__(client)
        self.usage = ConsumedBatches()
        self.loops = OpenLoops()
        self._optimizer: ServerOptimizer | None = None
        self._stopped = ""  # why, once the script was told to end
        self._returns = 0
        self._closed = False

    def insist(self, call: Callable[[], T]) -> T:
        """What `call` returns, which is repeated when the job had gone on without this worker."""
        while True:
            result: tuple[T] | None = None
            with self.healing():
                result = (call(),)
                self.prospers()
            if result is not None:
                return result[0]

    @contextmanager
    def healing(self) -> Iterator[None]:
        """A body that finds the job gone on without this worker is left; the worker is back
        then, with all weights.

        Stopping where the worker was asked to leave, and the body would keep it for longer; once
        it has been raised, where the body fails.
        """
        try:
            yield
        except DrainedError as error:
            self.stop(str(error), "drained")
        except FencedError as error:
            self.come_back(error)
        except PSError as error:
            if self._stopped:
                raise Stopping(self._stopped) from error
            raise

    def check_stopping(self) -> None:
        """Raise Stopping once the script is to end."""
        if self.client.stopping:
            self.stop(ASKED if self.client.draining else "the job ends")

    def stop(self, reason: str, leaves: str = "") -> Never:
        """Raise Stopping. leaves: why the worker leaves the rounds, when it has not made its
        last step.
        """
        self._quit(reason, leaves)
        raise Stopping(self._stopped)

    def _quit(self, reason: str, leaves: str) -> None:
        """No round waits for this worker any more, and what it held is other workers' data. It
        looks on from now on.

        Where the job ends there are no rounds, and nothing to come to again.
        """
        if self._stopped:
            return
        self._stopped = reason
        log.info("worker %d stops training: %s", self.client.worker, reason)
        self._let_go(DrainedError(reason))
        if self.client.draining and not self._closed:
            try:
                self.client.retire(leaves)
            except PSError as error:  # then it leaves when it closes the job
                log.debug("worker %d could not leave the rounds yet: %s", self.client.worker, error)

    def come_back(self, error: FencedError) -> None:
        """The worker has lost its place, for this reason: gets another, and all that the job has
        into the model.

        Raises what cannot be healed: QuarantinedError, FencedError where the servers went back
        to before what the script has behind it, or time and again. Stopping where the worker is
        to leave anyway.
        """
        try:
            self._come_back(error)
        except DrainedError as drained:
            self.stop(str(drained), "drained")

    def _come_back(self, error: FencedError) -> None:
        while True:
            self.check_stopping()
            self._check_curable(error)
            log.warning(
                "worker %d lost its place in job %s: %s", self.client.worker, self.client.job, error
            )
            self._let_go(error)
            self.client.rejoin()
            try:
                self._renew()
            except FencedError as again:
                error = again
            else:
                return self._check_loop()

    def prospers(self) -> None:
        """The worker's place holds."""
        self._returns = 0

    def _check_curable(self, error: FencedError) -> None:
        if isinstance(error, QuarantinedError) or self._returns == MOST_RETURNS:
            raise error
        self._returns += 1

    def _let_go(self, error: PSError) -> None:
        """Nothing of the old place is used any more."""
        if self._optimizer is not None:
            self._optimizer.drop(error)
        for leases in self.loops.open:
            leases.forget()
        if self.usage.batches:
            self.usage.lose(error)

    def _renew(self) -> None:
        """The script has what the job has."""
        if self._optimizer is not None:
            self._optimizer.renew()
        log.info(
            "back in job %s as worker %d, version %d",
            self.client.job,
            self.client.worker,
            self.version,
        )

    def _check_loop(self) -> None:
        if self.loops.come_again(self.client.has_ended, self.version):
            raise FencedError(
                f"the servers went back to version {self.version}, in an earlier loop: start the "
                f"script again"
            )
