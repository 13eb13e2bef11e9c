"""RPC faults between a worker and its servers: lost requests, lost replies, repeated calls.

A lost request and a lost reply look alike to the worker but not to the server; exactly-once depends
on this.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Literal, TypeVar

from pscommon.core.errors import UnreachableError
from pscommon.settings.values import Lanes
from pscommon.wire.frames import Frame
from pscommon.wire.requests import EXCHANGE, A, Q, Request
from psproto.v1 import parameter_server_pb2 as ps
from psworker.connection.discovery import discover
from psworker.transport.exchange_calls import AnswerReceiver, Cancellation, ExchangeAnswer
from psworker.transport.grpc_transport import GrpcTransport
from psworker.transport.interface import Transport

T = TypeVar("T")
Fault = Literal["", "request lost", "reply lost", "duplicate"]
CONNECT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Rule:
    """Probabilities of faults. method: "ParameterServerService.Exchange", or a pattern with stars.

    limit: maximum number of faults.
    """

    method: str
    limit: int
    request: float
    reply: float
    duplicate: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """Parse "Service.Method=LIMIT:REQUEST%:REPLY%[:DUPLICATE%]"; ValueError for other texts."""
        method, _, rest = text.strip().partition("=")
        limit, *shares = rest.split(":")
        if (
            not method
            or len(shares) not in (2, 3)
            or not all(share.endswith("%") for share in shares)
        ):
            raise ValueError(f"{text!r} is not Service.Method=LIMIT:REQUEST%:REPLY%[:DUPLICATE%]")
        return cls(method, int(limit), *(float(share[:-1]) / 100 for share in shares))

    def draw(self, lot: float) -> Fault:
        """Return the fault for a random number between 0 and 1."""
        shares: tuple[tuple[Fault, float], ...] = (
            ("request lost", self.request),
            ("reply lost", self.reply),
            ("duplicate", self.duplicate),
        )
        for fault, share in shares:
            if lot < share:
                return fault
            lot -= share
        return ""


class Faults:
    """Draws the fault of each call by the first matching rule. Thread-safe.

    The n-th call of a method to a shard has the same fault in every run with the same seed while
    the limits last. counts: faults so far by (method, fault).
    """

    def __init__(self, rules: str, seed: int = 0) -> None:
        """rules: as for Rule.parse, separated by commas."""
        self.counts: Counter[tuple[str, Fault]] = Counter()
        self._rules = [Rule.parse(text) for text in rules.split(",")]
        self._left = [rule.limit for rule in self._rules]
        self._seed = seed
        self._calls: Counter[tuple[str, int]] = Counter()
        self._lock = threading.Lock()

    def draw(self, method: str, shard: int = 0) -> Fault:
        with self._lock:
            self._calls[method, shard] += 1
            lot = random.Random(
                f"{self._seed} {method} {shard} {self._calls[method, shard]}"
            ).random()
            place = next(
                (i for i, rule in enumerate(self._rules) if fnmatchcase(method, rule.method)), None
            )
            if (
                place is None
                or not self._left[place]
                or not (fault := self._rules[place].draw(lot))
            ):
                return ""
            self._left[place] -= 1
            self.counts[method, fault] += 1
            return fault

    def happened(self, fault: Fault) -> int:
        """Return how often a fault occurred over all methods."""
        return sum(count for (_, kind), count in self.counts.items() if kind == fault)


class FaultyLane:
    """A lane with faults over another lane: `Client(lane=FaultyLane(lane, Faults(...)))`.

    A lost reply leaves the receiver unchanged, except where the server writes into the worker's
    memory. Of a repeated call the first answer counts. A push that is sent in parts is never
    repeated.
    """

    def __init__(self, lane: Transport, faults: Faults) -> None:
        self.lane = lane
        self.faults = faults
        self.direct, self.clock = lane.direct, lane.clock

    @property
    def addresses(self) -> Sequence[str]:
        return self.lane.addresses

    def learn(
        self, job: str, addresses: Sequence[str], terms: Sequence[int], standbys: Sequence[str]
    ) -> None:
        self.lane.learn(job, addresses, terms, standbys)

    def find_primaries(self, job: str, timeout: float) -> bool:
        return self.lane.find_primaries(job, timeout)

    def end_stalled(self) -> None:
        self.lane.end_stalled()

    def answers(self, timeout: float) -> bool:
        return self.lane.answers(timeout)

    def end_calls(self) -> None:
        self.lane.end_calls()

    def relocate(self, addresses: Sequence[str]) -> bool:
        return self.lane.relocate(addresses)

    def offer_memory(
        self, shard: int, header: ps.PushPullHeader, share: Callable[[], int], timeout: float
    ) -> None:
        self.lane.offer_memory(shard, header, share, timeout)

    def request(self, row: Request[Q, A], message: Q, timeout: float, shard: int = 0) -> A:
        call = partial(self.lane.request, row, message, timeout, shard)
        return self._carried(str(row), shard, call, call)

    def exchange(
        self,
        shard: int,
        header: ps.PushPullHeader,
        send: Sequence[memoryview],
        receiver: AnswerReceiver,
        timeout: float,
        cancellation: Cancellation,
        frames: Iterator[Frame[ps.PushPullHeader]] | None = None,
    ) -> ExchangeAnswer:
        def call(header: ps.PushPullHeader, receiver: AnswerReceiver) -> ExchangeAnswer:
            return self.lane.exchange(shard, header, send, receiver, timeout, cancellation, frames)

        def unheard() -> object:
            return call(header, _nowhere(receiver))

        def again() -> object:
            return (
                call(_without_memory_to_write(header), _nowhere(receiver))
                if frames is None
                else None
            )

        return self._carried(str(EXCHANGE), shard, lambda: call(header, receiver), unheard, again)

    def worker_key(self, worker: int) -> bytes:
        return self.lane.worker_key(worker)

    def close(self) -> None:
        self.lane.close()

    def _carried(
        self,
        method: str,
        shard: int,
        call: Callable[[], T],
        unheard: Callable[[], object],
        again: Callable[[], object] | None = None,
    ) -> T:
        """Make a call with its fault. unheard: the call without its answer; again: the repeated
        call.
        """
        fault = self.faults.draw(method, shard)
        if fault == "request lost":
            raise _lost(method, shard, fault)
        if fault == "reply lost":
            unheard()
            raise _lost(method, shard, fault)
        answer = call()
        if fault == "duplicate":
            (again or unheard)()
        return answer


def faulty_lane(servers: str, rules: str, seed: int = 0, lanes: Lanes = "grpc") -> FaultyLane:
    """Connect to the job of these servers ("HOST:PORT,...") over the network with faults."""
    addresses = discover(servers.split(","), CONNECT_SECONDS).addresses
    return FaultyLane(GrpcTransport(addresses, lanes=lanes), Faults(rules, seed))


def _lost(method: str, shard: int, fault: Fault) -> UnreachableError:
    return UnreachableError(f"shard {shard} ({method}): {fault}, by a fault tool", "UNREACHABLE")


def _nowhere(receiver: AnswerReceiver) -> AnswerReceiver:
    """Return a receiver that discards the answer."""
    return AnswerReceiver(
        lambda result: [memoryview(bytearray(view.nbytes)) for view in receiver.views(result)]
    )


def _without_memory_to_write(header: ps.PushPullHeader) -> ps.PushPullHeader:
    """Return the same push without a pull, which would overwrite the worker's shared memory."""
    copy = ps.PushPullHeader()
    copy.CopyFrom(header)
    if header.memory:
        copy.pull = ps.PULL_NONE
    return copy
