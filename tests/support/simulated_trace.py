"""A job that is simulated event by event, and the spans that its processes would record.

Each process has its own clock, far away from those of the others. A delay is added at one place.
"""

import heapq
import random
import struct
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from pscommon.tracing.spans import ProcessSpans, Span
from psworker.core.trace_events import Trace

PLACES = (
    *("data", "compute", "link", "apply", "log", "standby", "answer", "decide", "shard link"),
)
"""The delay's place; `data`, `compute` and `link` are those of a worker."""
SHARD_CLOCK_SECONDS = 5000.0
LEASE_SECONDS = 0.5
WORKER_CLOCK_SECONDS = -300.0


class Delay(NamedTuple):
    """Seconds that are added at a place of one process; `number` None: of all."""

    place: str = ""
    number: int | None = None
    seconds: float = 0.05


NO_DELAY = Delay()


@dataclass
class SimulatedJob:
    """A job, which `trace()` runs once.

    Attributes:
        strategy: "plain", "pipelined" or "overlapped".
        staleness: Of policy ssp.
        jitter: Times are longer by a random part, at most this one.
        recording: Start and end of the recording, as parts of the time until a worker is done.
        asks_again_seconds: A push that is not answered by then is asked for again.
        killed: A worker that dies in the middle of its steps; the others wait for its lease.
    """

    workers: int = 3
    shards: int = 2
    policy: str = "sync"
    delay: Delay = NO_DELAY
    strategy: str = "plain"
    steps: int = 24
    compute: float = 0.04
    staleness: int = 1
    jitter: float = 0.02
    recording: tuple[float, float] = (0.3, 0.95)
    asks_again_seconds: float = 1e9
    killed: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self.now = 0.0
        self._spans: dict[tuple[str, int], list[Span]] = defaultdict(list)
        self._reports: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        self._sent: dict[tuple[int, int, int], float] = {}
        self._clocks = dict.fromkeys(range(self.workers), 0)
        self._waiting: list[tuple[int, int]] = []
        self._version = 0
        self._decided_at = 0.0
        self._done_at = float("inf")
        self._applied_at = [0.0] * self.shards
        self._answers: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        self._blocked: dict[int, tuple[int, Callable[[], None]]] = {}

    def trace(self) -> Trace:
        """Run all steps."""
        for worker in range(self.workers):
            self._at(0.0, lambda worker=worker: self._step(worker, 1))  # type: ignore[misc]
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
        first, last = (part * self._done_at for part in self.recording)
        processes = []
        for (role, number), spans in sorted(self._spans.items()):
            clock = self._clock(role, number)
            recorded = [s for s in spans if s.began - clock >= first and s.ended - clock <= last]
            recorded.sort(key=lambda span: span.ended)
            processes.append(ProcessSpans(role, number, recorded, -clock, 0.0002))
        return Trace(processes, last - first, "1.0")

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _seconds(self, usual: float, place: str = "", number: int = 0) -> float:
        """Return how long something takes, with the delay if this is its place."""
        seconds = usual * (1 + self.jitter * self._random.random())
        return seconds + self._delay(place, number)

    def _delay(self, place: str, number: int) -> float:
        here = self.delay.place == place and self.delay.number in (None, number)
        return self.delay.seconds if place and here else 0.0

    @staticmethod
    def _clock(role: str, number: int) -> float:
        if role == "worker":
            return WORKER_CLOCK_SECONDS * (number + 1)
        return SHARD_CLOCK_SECONDS * number

    def _span(
        self,
        process: tuple[str, int],
        name: str,
        began: float,
        ended: float,
        pushes: tuple[tuple[int, int], ...] = (),
        version: int = 0,
        shard: int = 0,
        thread: str = "",
    ) -> None:
        clock = self._clock(*process)
        place = shard if process[0] == "worker" or name == "barrier" else process[1]
        (seconds,) = struct.unpack("f", struct.pack("f", ended - began))  # as on the wire
        span = Span(name, began + clock, seconds, pushes, version, place, thread)
        self._spans[process].append(span)

    # ---- workers ---------------------------------------------------------------------------------

    def _step(self, worker: int, push: int) -> None:
        if push > self.steps:
            self._done_at = min(self._done_at, self.now)
        if worker == self.killed and push > self.steps // 2:
            self._at(self.now + LEASE_SECONDS, lambda: self._evict(worker))
            return
        if push > self.steps:
            return
        time = self.now
        for name, usual in (("data", 0.002), ("compute", self.compute), ("gather", 0.001)):
            began, time = time, time + self._seconds(usual, name, worker)
            self._span(
                ("worker", worker), name, began, time, ((worker, push),), thread="MainThread"
            )
        early = self.compute / 2 if self.strategy == "overlapped" else 0.0
        if self.strategy == "pipelined" and push > 1:
            self._at(time, lambda: self._await(worker, push - 1, lambda: self._go_on(worker, push)))
            return
        for shard in range(self.shards):
            self._send(worker, push, shard, time - early, time)
        if self.strategy == "pipelined":
            self._at(time, lambda: self._scatter(worker, push))
        else:
            self._at(time, lambda: self._await(worker, push, lambda: self._scatter(worker, push)))

    def _go_on(self, worker: int, push: int) -> None:
        """Send a push once the answer to the one before is there."""
        for shard in range(self.shards):
            self._send(worker, push, shard, self.now, self.now)
        self._scatter(worker, push)

    def _await(self, worker: int, push: int, then: Callable[[], None]) -> None:
        if len(self._answers[worker, push]) == self.shards:
            then()
        else:
            self._blocked[worker] = push, then

    def _scatter(self, worker: int, push: int) -> None:
        began, ended = self.now, self.now + self._seconds(0.0005)
        self._span(
            ("worker", worker), "scatter", began, ended, ((worker, push),), thread="MainThread"
        )
        self._at(ended, lambda: self._step(worker, push + 1))

    def _send(self, worker: int, push: int, shard: int, began: float, ready: float) -> None:
        ended = ready + self._seconds(0.0005)
        thread = f"exchange {shard}"
        self._span(("worker", worker), "send", began, ended, ((worker, push),), 0, shard, thread)
        self._answers[worker, push].pop(shard, None)
        way = self._seconds(0.0005) + self._delay("link", worker) / 2
        self._at(ended + way, lambda: self._receive(worker, push, shard, ended))

    def _answered(self, worker: int, push: int, shard: int, sent: float) -> None:
        """Record the answer, in several attempts if it took long."""
        thread, own, began = f"exchange {shard}", ((worker, push),), sent
        while self.now - began > self.asks_again_seconds:
            ended = began + self.asks_again_seconds
            self._span(("worker", worker), "receive", began, ended, own, 0, shard, thread)
            began = ended + 0.0001
            self._span(("worker", worker), "send", ended, began, own, 0, shard, thread)
        version = self._version
        self._span(("worker", worker), "receive", began, self.now, own, version, shard, thread)
        self._answers[worker, push][shard] = self.now
        awaited = self._blocked.get(worker)
        if awaited and awaited[0] == push and len(self._answers[worker, push]) == self.shards:
            del self._blocked[worker]
            self._at(self.now + 0.00005, awaited[1])

    # ---- shards ----------------------------------------------------------------------------------

    def _receive(self, worker: int, push: int, shard: int, sent: float) -> None:
        process, own = ("shard", shard), ((worker, push),)
        time = self.now
        self._span(process, "receive", time - 0.0002, time, own, thread="streams")
        for name, usual in (("check", 0.0003), ("log", 0.0005), ("standby", 0.0005)):
            began, time = time, time + self._seconds(usual, name, shard)
            self._span(process, name, began, time, own, thread=f"worker {worker}")
        way = self._seconds(0.0002 if shard else 0.00002)
        way += self._delay("shard link", shard) / 2 if shard else 0.0
        self._at(time + way, lambda: self._report(worker, push, shard, sent))

    def _apply(
        self, shard: int, version: int, pushes: tuple[tuple[int, int], ...], sent: dict[int, float]
    ) -> None:
        process = ("shard", shard)
        began = max(self.now, self._applied_at[shard])
        logged = began + self._seconds(0.0003)
        self._span(process, "log", began, logged, (), version, thread="updates")
        time = logged + self._seconds(0.001, "apply", shard)
        self._span(process, "apply", logged, time, pushes, version, thread="updates")
        self._applied_at[shard] = time
        for worker, push in pushes:
            copied = time + self._seconds(0.0002)
            ended = copied + self._seconds(0.0003, "answer", shard)
            own, thread = ((worker, push),), f"worker {worker}"
            self._span(process, "copy", time, copied, own, version, thread=thread)
            self._span(process, "send", copied, ended, own, thread=thread)
            way = self._seconds(0.0005) + self._delay("link", worker) / 2
            back = (worker, push, shard, sent[worker])
            self._at(ended + way, lambda back=back: self._answered(*back))  # type: ignore[misc]

    # ---- coordinator -----------------------------------------------------------------------------

    def _report(self, worker: int, push: int, shard: int, sent: float) -> None:
        arrivals = self._reports[worker, push]
        arrivals[shard] = self.now
        self._sent[worker, push, shard] = sent
        if len(arrivals) < self.shards:
            return
        self._waiting.append((worker, push))
        self._count()

    def _evict(self, worker: int) -> None:
        del self._clocks[worker]
        self._count()

    def _count(self) -> None:
        if self.policy == "sync":
            if self._waiting and len(self._waiting) == len(self._clocks):
                self._decide(sorted(self._waiting))
            return
        while allowed := [each for each in self._waiting if self._may_count(each[0])]:
            self._decide(allowed[:1])

    def _may_count(self, worker: int) -> bool:
        if self.policy == "async":
            return True
        others = [clock for w, clock in self._clocks.items() if w != worker and clock < self.steps]
        return self._clocks[worker] + 1 - min(others, default=self.steps) <= self.staleness

    def _decide(self, pushes: list[tuple[int, int]]) -> None:
        self._version += 1
        version, counted = self._version, tuple(pushes)
        for worker, push in counted:
            self._waiting.remove((worker, push))
            self._clocks[worker] += 1
            for shard, arrival in self._reports[worker, push].items():
                self._span(
                    ("shard", 0),
                    "barrier",
                    arrival,
                    self.now,
                    ((worker, push),),
                    version,
                    shard,
                    "coordinator",
                )
        began = max(self.now, self._decided_at)
        ended = began + self._seconds(0.0003, "decide", 0)
        self._span(("shard", 0), "log", ended - 0.0001, ended, (), thread="coordinator")
        self._span(("shard", 0), "decide", self.now, ended, counted, version, 0, "coordinator")
        self._decided_at = ended
        for shard in range(self.shards):
            way = self._seconds(0.0002 if shard else 0.00002)
            way += self._delay("shard link", shard) / 2 if shard else 0.0
            sent = {worker: self._sent[worker, push, shard] for worker, push in counted}
            entry = (shard, version, counted, sent)
            self._at(ended + way, lambda entry=entry: self._apply(*entry))  # type: ignore[misc]
