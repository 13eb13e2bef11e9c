"""Reduce rounds under policy allreduce: which workers reduce their gradients, and what they need.

Theory of operation. Workers keep the weights and reduce gradients among themselves. Before each
reduce a worker asks for a round. A round opens when every active worker has asked; it has a fixed
set of workers. Its kind says what they do:

- gradients: they reduce their gradients, then each sends a push without bytes that names the round.
- weights: some of them lack the newest weights; `source` sends them to all.
- upload: one of them sends weights and optimizer state to the servers, because a snapshot is due.

Two answers open no round: "none" (the worker has the newest weights) and "download" (it lacks them,
and the servers have them).

Events: a worker asks; a worker asks again, which ends its part; the round's pushes are applied; a
worker departs.

Invariants:

- At most one round is open.
- An update counts the pushes of one gradients round, all of them. So it is the update that each of
  these workers has computed, and each of them can make the step without another message.
- A gradients round is void once one of its workers departs or asks again without a decision. Its
  pushes are then stale: the sum may contain a gradient that does not count.
- A weights round is void once one of its workers departs, or asks again without having carried it
  out.
- A void round's process group is not used again.
- A worker reduces gradients only if it has the job's newest weights. A round of gradients has no
  worker that lacks them, so all its workers have equal weights after it.
- A late repetition of a request changes nothing: requests are numbered.
- No worker begins to compute while a round of gradients is open: it would have old weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

NO_WEIGHTS = -1
"""Version of a worker that has none of the job's weights."""

NUMBERS_PER_GENERATION = 1 << 40
"""Numbers of rounds, and of process groups, of one start of the servers."""

RoundKind = Literal["none", "download", "gradients", "weights", "upload"]


@dataclass(frozen=True, slots=True)
class ReduceRequest:
    """A worker's request for a reduce round.

    Attributes:
        worker: The worker.
        number: Number of the request, from 1 on; a repetition has the same one.
        version: Version of the weights and the optimizer state that it has; NO_WEIGHTS: none.
        samples: Weight of its gradient; 0: it has none, and only needs or offers weights.
        address: HOST:PORT at which it serves a store for a process group.
        groups_json: Hyper-parameters of its optimizer; those of the worker that joined first count.
        is_partial: Some of its tensors have no gradient.
        completed: Number of the round of weights that it has carried out last; 0: none.
    """

    worker: int
    number: int
    version: int
    samples: int
    address: str = ""
    groups_json: str = ""
    is_partial: bool = False
    completed: int = 0


class ReduceRound(NamedTuple):
    """The answer to a request.

    Attributes:
        number: Number of the round; 0: it is none.
        kind: What its workers do.
        group: Number of the process group. Rounds with one number have the same workers, and none
            of these rounds was void.
        requests: The requests of its workers, in worker order.
        source: The worker that has the newest weights, and sends or uploads them; 0: none.
    """

    number: int = 0
    kind: RoundKind = "none"
    group: int = 0
    requests: tuple[ReduceRequest, ...] = ()
    source: int = 0

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(request.worker for request in self.requests)

    def request_of(self, worker: int) -> ReduceRequest | None:
        """Return the request of a worker of this round."""
        return next((each for each in self.requests if each.worker == worker), None)


NOTHING, DOWNLOAD = ReduceRound(), ReduceRound(kind="download")


class Reduction:
    """The open round and the requests that wait for one.

    A restart of the servers begins without any: under this policy it is a rollback. It gives other
    numbers to rounds and groups, because workers may still use earlier process groups.

    Attributes:
        generation: Number of this start of the servers.
        open: The open round; NOTHING: none.
        waiting: The request of each worker that waits for a round.
        answers: Number of each worker's newest request that was answered, and the answer.
        versions: Newest version that each worker is known to have: the one of its requests, and
            that of each update that its push made.
        uploaded: Version of the weights that the servers have.
        is_cut_wanted: A snapshot is to follow the next upload, which comes before another update.
    """

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation
        self.open = NOTHING
        self.waiting: dict[int, ReduceRequest] = {}
        self.answers: dict[int, tuple[int, ReduceRound]] = {}
        self.versions: dict[int, int] = {}
        self.uploaded = 0
        self.is_cut_wanted = False
        self._newest_round = self._newest_group = generation * NUMBERS_PER_GENERATION
        self._group: tuple[int, ...] = ()  # workers of the newest group
        self._through: set[int] = set()  # workers of the open round that have asked again

    def begin(self, kind: RoundKind, requests: Sequence[ReduceRequest], source: int = 0) -> None:
        """Open a round of these requests."""
        workers = tuple(request.worker for request in requests)
        if kind != "upload" and workers != self._group:
            self._group, self._newest_group = workers, self._newest_group + 1
        self._newest_round += 1
        self.open = ReduceRound(
            self._newest_round, kind, self._newest_group, tuple(requests), source
        )
        for request in requests:
            self.answer(request, self.open)

    def answer(self, request: ReduceRequest, answer: ReduceRound) -> None:
        """Answer a request that waits; the answer is kept, because it may be lost."""
        del self.waiting[request.worker]
        self.answers[request.worker] = request.number, answer

    def applied(self, version: int) -> None:
        """End the open round: its pushes have made this version, which its workers can make."""
        self.versions |= dict.fromkeys(self.open.workers, version)
        self.close()

    def close(self, is_void: bool = False) -> None:
        """End the open round. is_void: Its process group may be stuck, so a new one follows."""
        self.open = NOTHING
        self._through.clear()
        if is_void:
            self._group = ()

    def leave_round(self, request: ReduceRequest) -> None:
        """Note that a worker of the open round asks again: it is through, or gives the round up."""
        self._through.add(request.worker)
        is_through = self.open.kind == "upload" or request.completed == self.open.number
        if not is_through:
            self.close(is_void=True)
        elif self._through.issuperset(self.open.workers):
            self.close()

    def drop(self, worker: int) -> None:
        """Drop a departed worker; an open round with it is void."""
        self.waiting.pop(worker, None)
        self.answers.pop(worker, None)
        self.versions.pop(worker, None)
        if worker in self.open.workers:
            self.close(is_void=True)

    def describe_loss(self, version: int) -> str:
        """Return that the weights of the job's version are lost, as text for people."""
        return (
            f"the weights of version {version} are lost with the workers that had them; the "
            f"servers have version {self.uploaded}"
        )

    def wants_weights(self, version: int) -> bool:
        """Return whether a worker waits for the weights of the job's version, and none that has
        them waits.
        """
        versions = [request.version for request in self.waiting.values()]
        return bool(versions) and version not in versions
