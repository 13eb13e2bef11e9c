"""A worker's place in the job: kept by heartbeats, lost for ever when the job went on without it."""

import logging
import threading
from dataclasses import dataclass

from pscommon.core.errors import FencedError, MismatchError, PSError
from psproto.v1 import coordinator_pb2 as co
from psworker.lane import Lane

BEATS_PER_LEASE = 5
MIN_CALL_SECONDS = 1.0
MIN_INTERVAL_SECONDS = 0.01

log = logging.getLogger("psworker")


@dataclass(frozen=True, slots=True)
class Progress:
    """What the next heartbeat says for people: steps made, seconds of a step, and the phase the worker is in."""

    steps: int = 0
    step_seconds: float = 0.0
    samples_per_second: float = 0.0
    phase: str = ""


class Place:
    """What is known about a worker's place; shared by the client and its heartbeat."""

    def __init__(self, job: str, worker: int) -> None:
        self.job = job
        self.worker = worker
        self.progress = Progress()
        self.stopping = False
        self._lost: PSError | None = None

    def lose(self, error: PSError) -> None:
        self._lost = self._lost or error

    def check(self) -> None:
        """FencedError, or MismatchError for another job on the same servers, once the place is lost."""
        if self._lost is not None:
            raise type(self._lost)(str(self._lost), self._lost.reason)

    def beat(self, lane: Lane, timeout: float) -> None:
        """One heartbeat. Silence is no loss: whoever needs an answer will notice."""
        now = self.progress
        request = co.HeartbeatRequest(
            job=self.job,
            worker=self.worker,
            steps=now.steps,
            step_seconds=now.step_seconds,
            samples_per_second=now.samples_per_second,
            phase=now.phase,
        )
        try:
            self.stopping = lane.heartbeat(request, timeout).stopping or self.stopping
        except (FencedError, MismatchError) as error:
            self.lose(error)
            log.error("worker %d is out of job %s: %s", self.worker, self.job, error)
        except PSError as error:
            log.debug("no heartbeat of worker %d: %s", self.worker, error)


class Heartbeat:
    """Sends one every fifth of a lease, from a daemon thread, until stopped or fenced."""

    def __init__(self, place: Place, lane: Lane, lease_seconds: float) -> None:
        self._place = place
        self._lane = lane
        self._interval = max(lease_seconds / BEATS_PER_LEASE, MIN_INTERVAL_SECONDS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heartbeat-{place.worker}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No heartbeat is under way any more when this returns, unless a server is holding one up."""
        self._stop.set()
        if self._thread is not threading.current_thread():  # a forgotten client may be collected anywhere
            self._thread.join(self._call_seconds + 1.0)

    @property
    def _call_seconds(self) -> float:
        return max(self._interval, MIN_CALL_SECONDS)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self._place.beat(self._lane, self._call_seconds)
                self._place.check()
            except PSError:
                return
