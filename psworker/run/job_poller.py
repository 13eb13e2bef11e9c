"""ps-run's view of the job: a thread that asks the servers for their status, and for the result
at the end.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from pscommon.core.metric_row import MetricRow

if TYPE_CHECKING:
    from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub

POLL_SECONDS = 1.0
HISTORY_SECONDS = 5.0
CONNECT_SECONDS = 5.0
STOP_SECONDS = 30.0
JOIN_SECONDS = 5.0

Status = Mapping[str, Any]


class JobObserver(Protocol):
    """Somebody who looks at the job and takes no part in it."""

    def status(self) -> Status:
        """GetStatus, as documented for `ps-ctl status`. Raises PSError while the servers cannot
        answer.
        """

    def weights_sha256(self) -> str:
        """Over all tensors that the servers hold. Raises PSError if there is no model."""

    def history(self) -> Sequence[MetricRow]:
        """All values that scripts have reported, by time. Raises PSError while the servers
        cannot answer.
        """

    def stop(self) -> None:
        """Asks the servers to end the job. Raises PSError if that does not reach them."""

    def report_exit(self, process: str, reason: str) -> None:
        """Tells the servers that a worker's process (`pscommon.system.process_id`) has ended.
        Raises PSError.
        """

    def close(self) -> None:
        """Gives up the connection."""


Connect = Callable[[str], JobObserver]


@dataclass(frozen=True, slots=True)
class JobResult:
    """What the servers told at the end; sha256 is None, with the problem in words, if the
    weights could not be read.

    undone: what of the training the servers do not have any more, in words. idle: why no step of
    this run was counted, in words; empty where one was, or where that is not known. resumed:
    version, steps and samples that the job had when this run began; None for a new job. history:
    reported values, by time.
    """

    status: Status
    sha256: str | None = None
    problem: str = ""
    undone: str = ""
    idle: str = ""
    resumed: Mapping[str, int] | None = None
    history: Sequence[MetricRow] = ()


class GrpcJobObserver:
    """The Observer of real servers."""

    def __init__(self, address: str) -> None:
        from psworker.client.client import Client  # numpy and gRPC: not for --help

        self._address = address
        self._client = Client(address, observe=True, connect_timeout=CONNECT_SECONDS)

    def status(self) -> Status:
        """See Observer."""
        return self._client.status()

    def weights_sha256(self) -> str:
        """See Observer."""
        from pscommon.snapshot.weights_digest import weights_sha256

        return weights_sha256(self._client.pull())

    def history(self) -> Sequence[MetricRow]:
        """See Observer."""
        from psproto.v1.coordinator_pb2 import GetHistoryRequest

        with self._coordinator() as coordinator:
            rows = coordinator.GetHistory(GetHistoryRequest(), timeout=CONNECT_SECONDS).rows
        return [
            MetricRow(row.time, row.version, row.worker, row.rank, row.name, row.value)
            for row in rows
        ]

    def stop(self) -> None:
        """See Observer."""
        from psproto.v1.coordinator_pb2 import StopJobRequest

        with self._coordinator() as coordinator:
            coordinator.StopJob(StopJobRequest(reason="all workers are done"), timeout=STOP_SECONDS)

    def report_exit(self, process: str, reason: str) -> None:
        """See Observer."""
        from psproto.v1.coordinator_pb2 import ReportExitRequest

        with self._coordinator() as coordinator:
            coordinator.ReportExit(
                ReportExitRequest(process=process, reason=reason), timeout=CONNECT_SECONDS
            )

    @contextmanager
    def _coordinator(self) -> "Iterator[CoordinatorServiceStub]":
        from pscommon.wire.channel import open_channel
        from pscommon.wire.status import translated
        from psproto.v1.coordinator_pb2_grpc import CoordinatorServiceStub

        with open_channel(self._address) as channel, translated(self._address):
            yield CoordinatorServiceStub(channel)

    def close(self) -> None:
        """See Observer."""
        self._client.close()


class JobPoller:
    """Owns the observer in a thread of its own, so that a slow answer never holds up Ctrl-C.

    `status` is the last one, empty until the servers answer; resumed: of the first one, as in
    Result. on_result and on_stopped are called from the thread.
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
        self._highest = 0  # version that was seen
        self._rests = False
        self._steps: tuple[int, int] | None = None  # at first, and the most that were seen
        self._requests: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self, address: str) -> None:
        """Begins to watch the job whose shard 0 is here; a later call changes nothing."""
        if not self._address:
            self._address = address
            self._thread.start()

    def collect(self) -> None:
        """Asks for the result: on_result follows."""
        self._requests.put(self._collect)

    def read_history(self) -> None:
        """Asks for the history of reported values: servers that end soon are not asked again."""
        self._requests.put(self._refresh_history)

    def stop_job(self) -> None:
        """Asks the servers to stop: on_stopped follows, with what went wrong or ""."""
        self._requests.put(self._stop_job)

    def report_exit(self, process: str, reason: str) -> None:
        """Tell the servers that a worker's process has ended, so that its lease ends at once.

        Without an answer the lease decides, or what the servers see themselves.
        """
        self._requests.put(partial(self._report_exit, process, reason))

    def rest(self) -> None:
        """Looks at the servers no more, which are about to end: a look would go on for as long
        as one may be silent.
        """
        self._rests = True

    def close(self) -> None:
        """Ends the thread, unless it is stuck in a call: then it ends with the process."""
        if self._address:
            self._requests.put(lambda: False)
            self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        self._attempt(
            self._poll
        )  # before the first step: those of a resumed job are not this run's
        go_on = True
        while go_on:
            try:
                go_on = self._requests.get(timeout=POLL_SECONDS)()
            except queue.Empty:
                if not self._rests:
                    self._attempt(self._poll)
        self._attempt(self._disconnect)

    def _attempt(self, call: Callable[[], None]) -> str:
        """Servers come and go while they start, restart and stop; what went wrong is returned in
        words.

        Any error counts, not only expected ones: looking on must never end a training run.
        """
        try:
            call()
        except Exception as error:
            return str(error) or type(error).__name__
        return ""

    def _poll(self) -> None:
        if self._observer is None:
            self._observer = self._connect(self._address)
        status = self._observer.status()
        if not self.status:
            self.resumed = status.get("resumed")
        self.status = status
        self._highest = max(self._highest, self.status.get("version", 0))
        steps = self.status.get("steps", 0)
        first, most = self._steps or (steps, steps)
        self._steps = first, max(most, steps)
        ends = status.get("state") == "stopping"  # the servers stop answering soon
        if status.get("metrics") and (ends or time.monotonic() >= self._next_history):
            self._refresh_history()

    def _collect(self) -> bool:
        silent, found = self._attempt(self._poll), list[str]()
        problem = "" if silent else _nothing_yet(self.status)  # an old status is not for certain
        if not problem:
            problem = self._attempt(lambda: found.append(self._need().weights_sha256()))
        if found and silent:  # they have come back meanwhile
            self._attempt(self._poll)
        self._refresh_history()
        undone = _undone(self.status, self._highest)
        idle = "" if silent else self._idle()
        weights = found[0] if found else None
        self._on_result(
            JobResult(self.status, weights, problem, undone, idle, self.resumed, self.history)
        )
        return True

    def _refresh_history(self) -> bool:
        self._next_history = time.monotonic() + HISTORY_SECONDS
        self._attempt(self._take_history)
        return True

    def _take_history(self) -> None:
        self.history = self._need().history()

    def _idle(self) -> str:
        first, most = self._steps or (0, 0)
        return _idle(self.status) if most == first else ""

    def _stop_job(self) -> bool:
        self.rest()
        self._on_stopped(self._attempt(lambda: self._need().stop()))
        return True

    def _report_exit(self, process: str, reason: str) -> bool:
        self._attempt(lambda: self._need().report_exit(process, reason))
        return True

    def _need(self) -> JobObserver:
        if self._observer is None:
            self._observer = self._connect(self._address)
        return self._observer

    def _disconnect(self) -> None:
        if self._observer is not None:
            self._observer.close()


def _nothing_yet(status: Status) -> str:
    """Why there are no weights, where that is for certain: they would be waited for; else
    nothing.
    """
    if status.get("model", True) is None:
        return "no worker has registered a model; a script does with psworker.connect() and job.optimizer(...)"
    if status.get("state") == "waiting for a model":
        return "the worker that registered a model has not brought its weights"
    return ""


def _undone(status: Status, highest: int) -> str:
    """What the servers have lost since the workers were done, if anything: nobody is there who
    would do it again.

    They went back if all workers that they know are of before that; to the end of the training,
    if no data was left.
    """
    workers, version = status.get("workers", ()), status.get("version", 0)
    went_back = all(worker.get("state") == "past" for worker in workers)
    whole = version >= highest and all(loop.get("ended", True) for loop in status.get("data", ()))
    if not went_back or whole:
        return ""
    return f"the servers went back to version {version} after the workers were done: what came after it is lost"


def _idle(status: Status) -> str:
    """Why a run without a step is no success: its script has no model, or left data behind. Else
    empty.
    """
    if status.get("model", True) is None:
        return f"nothing was trained: {_nothing_yet(status)}"
    if not all(loop.get("ended", True) for loop in status.get("data", ())):
        return (
            "nothing was trained: no step was counted, and data is left; a step is step() of the "
            "optimizer that "
            "job.optimizer(...) returned"
        )
    return ""
