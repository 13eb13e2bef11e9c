"""Thread of ps-run that polls the servers for status, history and result."""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pscommon.core.metric_row import MetricRow

if TYPE_CHECKING:
    from pscommon.wire.requests import A, Q, Request

POLL_SECONDS = 1.0
HISTORY_SECONDS = 5.0
CONNECT_SECONDS = 5.0
STOP_SECONDS = 30.0
JOIN_SECONDS = 5.0

Status = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class JobResult:
    """Result of a run, read from the servers at its end.

    Attributes:
        status: last status document.
        sha256: digest of the weights; None if they could not be read.
        problem: why the weights could not be read.
        undone: text about training that a rollback has lost; empty if none.
        idle: why no step of this run was counted; empty if one was, or if unknown.
        resumed: version, steps and samples of the job at the start; None for a new job.
        history: reported values, ordered by time.
    """

    status: Status
    sha256: str | None = None
    problem: str = ""
    undone: str = ""
    idle: str = ""
    resumed: Mapping[str, int] | None = None
    history: Sequence[MetricRow] = ()


class JobObserver:
    """Client of a job without membership. Every call may raise PSError."""

    def __init__(self, address: str) -> None:
        from psworker.client.client import Client  # numpy and gRPC: not for --help

        self._address = address
        self._client = Client(address, observe=True, connect_timeout=CONNECT_SECONDS)

    def status(self) -> Status:
        """Return the status document of `ps-ctl status`."""
        return self._client.status()

    def weights_sha256(self) -> str:
        """Return the digest of all tensors; raise PSError if there is no model."""
        from pscommon.snapshot import weights_sha256

        return weights_sha256(self._client.pull())

    def history(self) -> Sequence[MetricRow]:
        """Return all reported values, ordered by time."""
        from pscommon.wire.requests import GET_HISTORY

        rows = self._call(GET_HISTORY, GET_HISTORY.request()).rows
        return [
            MetricRow(row.time, row.version, row.worker, row.rank, row.name, row.value)
            for row in rows
        ]

    def stop(self) -> None:
        """Ask the servers to end the job."""
        from pscommon.wire.requests import STOP_JOB

        self._call(STOP_JOB, STOP_JOB.request(reason="all workers are done"), STOP_SECONDS)

    def report_exit(self, process: str, reason: str) -> None:
        """Report that a worker process (`pscommon.system.process_id`) has ended."""
        from pscommon.wire.requests import REPORT_EXIT

        self._call(REPORT_EXIT, REPORT_EXIT.request(process=process, reason=reason))

    def _call(self, row: "Request[Q, A]", message: "Q", timeout: float = CONNECT_SECONDS) -> "A":
        from pscommon.wire.endpoint import Endpoint, open_channel
        from pscommon.wire.requests import call

        with open_channel(Endpoint(self._address)) as channel:
            return call(channel, row, message, timeout, self._address)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


Connect = Callable[[str], JobObserver]
"""Returns the observer of the servers at an address."""


class JobPoller:
    """Owner of the observer, in a thread of its own: a slow answer does not delay Ctrl-C.

    The thread calls on_result and on_stopped.

    Attributes:
        status: last status; empty until the servers answer.
        resumed, history: as in JobResult.
    """

    def __init__(
        self,
        connect: Connect,
        on_result: Callable[[JobResult], None],
        on_stopped: Callable[[str], None],
    ) -> None:
        self.status: Status = {}
        self.resumed: Mapping[str, int] | None = None
        self.history: Sequence[MetricRow] = ()
        self._next_history = 0.0
        self._connect = connect
        self._on_result = on_result
        self._on_stopped = on_stopped
        self._observer: JobObserver | None = None
        self._address = ""
        self._highest_version = 0
        self._is_polling = True
        self._steps: tuple[int, int] | None = None  # first and highest count
        # None ends the thread
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self, address: str) -> None:
        """Start polling shard 0 at this address; a later call has no effect."""
        if not self._address:
            self._address = address
            self._thread.start()

    def collect(self) -> None:
        """Request the result; on_result follows."""
        self._requests.put(self._collect)

    def read_history(self) -> None:
        """Request the history of reported values, before the servers end."""
        self._requests.put(self._refresh_history)

    def stop_job(self) -> None:
        """Ask the servers to stop; on_stopped follows, with the problem or ""."""
        self._requests.put(self._stop_job)

    def report_exit(self, process: str, reason: str) -> None:
        """Report the end of a worker process, so that its lease ends at once.

        If the report fails, the lease expires by itself.
        """
        self._requests.put(partial(self._report_exit, process, reason))

    def stop_polling(self) -> None:
        """Stop polling servers that are about to end; a poll would block until its deadline."""
        self._is_polling = False

    def close(self) -> None:
        """End the thread; one that is blocked in a call ends with the process."""
        if self._address:
            self._requests.put(None)
            self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        # before the first step: the steps of a resumed job do not belong to this run
        self._attempt(self._poll)
        while True:
            try:
                request = self._requests.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if self._is_polling:
                    self._attempt(self._poll)
                continue
            if request is None:
                break
            request()
        if self._observer is not None:
            self._attempt(self._observer.close)

    def _attempt(self, call: Callable[[], None]) -> str:
        """Call and return the error text, or "". No error of the poller may end the run."""
        try:
            call()
        except Exception as error:
            return str(error) or type(error).__name__
        return ""

    def _poll(self) -> None:
        status = self._connected().status()
        if not self.status:
            self.resumed = status.get("resumed")
        if status.get("training") != self.status.get("training") and self.status.get("training"):
            self._highest_version, self.resumed = 0, None  # the counts begin again
        self.status = status
        self._highest_version = max(self._highest_version, self.status.get("version", 0))
        steps = self.status.get("steps", 0)
        first, highest = self._steps or (steps, steps)
        self._steps = first, max(highest, steps)
        is_stopping = status.get("state") == "stopping"  # the servers stop answering soon
        if status.get("metrics") and (is_stopping or time.monotonic() >= self._next_history):
            self._refresh_history()

    def _collect(self) -> None:
        poll_error, digests = self._attempt(self._poll), list[str]()
        problem = "" if poll_error else _why_no_weights(self.status)  # an old status proves nothing
        if not problem:
            problem = self._attempt(lambda: digests.append(self._connected().weights_sha256()))
        if digests and poll_error:  # the servers answer again
            self._attempt(self._poll)
        self._refresh_history()
        undone = _describe_lost_training(self.status, self._highest_version)
        idle = "" if poll_error else self._why_idle()
        weights = digests[0] if digests else None
        self._on_result(
            JobResult(self.status, weights, problem, undone, idle, self.resumed, self.history)
        )

    def _refresh_history(self) -> None:
        self._next_history = time.monotonic() + HISTORY_SECONDS
        self._attempt(self._store_history)

    def _store_history(self) -> None:
        self.history = self._connected().history()

    def _why_idle(self) -> str:
        first, highest = self._steps or (0, 0)
        return _why_idle(self.status) if highest == first else ""

    def _stop_job(self) -> None:
        self.stop_polling()
        self._on_stopped(self._attempt(lambda: self._connected().stop()))

    def _report_exit(self, process: str, reason: str) -> None:
        self._attempt(lambda: self._connected().report_exit(process, reason))

    def _connected(self) -> JobObserver:
        if self._observer is None:
            self._observer = self._connect(self._address)
        return self._observer


def _why_no_weights(status: Status) -> str:
    """Return why the servers have no weights; empty if they may have some.

    Without this check a pull would wait for weights.
    """
    if status.get("model", True) is None:
        return (
            "no worker has registered a model. "
            "Try: call psworker.connect() and job.optimizer(...) in the script"
        )
    if status.get("state") == "waiting for a model":
        return "the worker that registered the model has not sent its weights"
    return ""


def _describe_lost_training(status: Status, highest: int) -> str:
    """Return a text about updates that a rollback lost after the workers were done.

    After a rollback every worker has the state "past". Nothing is lost if the restored version
    is the highest one and no data is left.
    """
    workers, version = status.get("workers", ()), status.get("version", 0)
    is_rolled_back = all(worker.get("state") == "past" for worker in workers)
    is_complete = version >= highest and all(
        loop.get("ended", True) for loop in status.get("data", ())
    )
    if not is_rolled_back or is_complete:
        return ""
    return (
        f"the servers rolled back to version {version} after the workers were done: "
        f"later updates are lost"
    )


def _why_idle(status: Status) -> str:
    """Return why a run without a step failed: no model, or data left; otherwise empty."""
    if status.get("model", True) is None:
        return f"nothing was trained: {_why_no_weights(status)}"
    if not all(loop.get("ended", True) for loop in status.get("data", ())):
        return (
            "nothing was trained: no step was counted, and data is left. "
            "Try: call step() of the optimizer that job.optimizer(...) returned"
        )
    return ""
