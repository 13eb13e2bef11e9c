"""The client of a job for each rank of a group."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

from pscommon.core.data_stream import Spec
from pscommon.core.errors import MismatchError
from pscommon.core.log_entries import BatchKey
from pscommon.core.partition import PartitionPlan
from pscommon.core.script_place import PassName, ScriptPlace
from psworker.connection.membership import LossTicket, report_loss
from psworker.core.clock import Clock
from psworker.core.group_place import GroupPlace
from psworker.core.protocols import JobClient
from psworker.core.results import CollectiveCall, CollectiveResult, Lease, StepProgress
from psworker.group.calls import GroupCalls
from psworker.group.link import GroupLink
from psworker.group.shared_model import GroupModel
from psworker.session.drain import Drain

SIGNAL_SECONDS = 0.5
"""Time in which a signal to all processes of a group reaches all of them."""


AFTER_LEASE_SECONDS = 2.0
"""A rank is stopped if it shows no sign of life for this time longer than the worker may."""


class GroupData:
    """Batches of the job's loops, the same on all ranks (psworker.core.protocols.JobData)."""

    def __init__(self, calls: GroupCalls) -> None:
        self._calls = calls

    def next_batches(
        self,
        loop: Spec,
        count: int = 1,
        idle: bool = False,
        first_open: ScriptPlace | int | None = None,
    ) -> Lease:
        found: dict[str, Any] = self._calls.together(
            "next_batches",
            lambda client: asdict(client.data.next_batches(loop, count, idle, first_open)),
        )
        found |= {name: tuple(found[name]) for name in ("numbers", "following")}
        return Lease(**found)

    def share(self, loop: Spec) -> int:
        return int(self._calls.together("len", lambda client: client.data.share(loop)))

    def has_ended(self, loop: PassName) -> bool:
        return bool(self._calls.together("iter", lambda client: client.data.has_ended(loop)))

    def return_batches(self, batches: Sequence[BatchKey], used: bool = False) -> None:
        self._calls.together(
            "return_batches", lambda client: client.data.return_batches(batches, used)
        )


class GroupClient:
    """A client for one rank of a group (psworker.core.protocols.JobClient).

    Rank 0 has the worker's client. All ranks make the same calls in the same order, and get the
    same results and errors. Only `report_soon`, `newest`, `status` and `progress` are calls of one
    rank.

    Args:
        connect: Returns the worker's client; called on rank 0.
        facts: What must be equal on all ranks, by name.
        clock: The source of all times.
        observe: Returns a client of the job that only reads, for another rank than 0. None: there
            are no servers.

    Attributes:
        model: The job's model.
        data: The job's batches.
    """

    def __init__(
        self,
        link: GroupLink,
        connect: Callable[[], JobClient],
        facts: Mapping[str, str],
        clock: Clock,
        observe: Callable[[], JobClient] | None,
    ) -> None:
        self.clock = clock
        self._link, self._observe = link, observe
        self._drain = Drain(clock, self._ask_to_leave)
        self._calls = GroupCalls(link, connect, facts)
        self._inner = self._calls.inner
        if self._inner is None:  # a signal to this process asks the worker to leave
            self._drain.opens()
        self.model = GroupModel(self._calls, facts["device"] == "cuda")
        self.data = GroupData(self._calls)
        if (ticket := self._calls.facts.ticket) is not None:
            link.silent_seconds = LossTicket(*ticket).lease_seconds + AFTER_LEASE_SECONDS
        link.listener = self

    @property
    def job(self) -> str:
        return self._calls.facts.job

    @property
    def place(self) -> GroupPlace:
        return self.model.division.place

    @property
    def training(self) -> str:
        return self._calls.facts.training

    @property
    def worker(self) -> int:
        return self._calls.facts.worker

    @property
    def workers(self) -> int:
        return self._calls.facts.workers

    @property
    def is_first(self) -> bool:
        return self._calls.facts.is_first and not self._link.rank

    @property
    def policy(self) -> str:
        return self._calls.facts.policy

    @property
    def bad_gradients(self) -> str:
        return self._calls.facts.bad_gradients

    @property
    def version(self) -> int:
        return self._calls.facts.version

    @property
    def draining(self) -> bool:
        return self._calls.facts.draining

    @property
    def stopping(self) -> bool:
        return self._calls.facts.stopping

    @property
    def seed(self) -> int:
        return self._calls.facts.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        if self._inner is not None:
            self._inner.seed = seed

    def collective(
        self, number: int, call: CollectiveCall, first_open: ScriptPlace | int
    ) -> CollectiveResult:
        def combine(client: JobClient, found: Sequence[Any]) -> dict[str, Any]:
            calls = [CollectiveCall(**each) for each, _ in found]
            data_ranks = [data_rank for _, data_rank in found]
            return asdict(client.collective(number, combined(calls, data_ranks), first_open))

        own = [asdict(call), self.place.rank]
        return CollectiveResult(**self._calls.gathered(call.kind, own, combine))

    def status(self) -> Mapping[str, Any]:
        return self._inner.status() if self._inner is not None else {}

    def newest(self) -> tuple[PartitionPlan, memoryview, int]:
        if self._inner is not None:
            return self._inner.newest()
        if self._observe is None:
            return self.model.newest()
        with closing(self._observe()) as observer:
            return observer.newest()

    def report_soon(self, values: Mapping[str, Any]) -> None:
        """Report values; a name that a lower rank reports too has that rank's value."""
        self._calls.report(values)

    def send_reports(self) -> None:
        self._calls.gathered("send_reports", None, lambda client, _: client.send_reports())

    def show_progress(self, progress: StepProgress) -> None:
        if self._inner is not None:
            samples_per_second = progress.samples_per_second * self.place.size
            self._inner.show_progress(progress._replace(samples_per_second=samples_per_second))

    def rejoin(self) -> None:
        self._calls.gathered("rejoin", None, lambda client, _: client.rejoin())

    def retire(self, reason: str = "") -> None:
        self._calls.gathered("retire", None, lambda client, _: client.retire(reason))

    def leave(self, reason: str = "") -> None:
        """Leave the job. Without a reason all ranks meet here, and none ends before the others."""
        if not reason:
            self._calls.gathered("close", None, lambda client, _: client.leave())
            return
        self._link.settle()  # if another rank has ended, this process ends here
        if self._inner is not None:
            self._inner.leave(reason)

    def close(self) -> None:
        self._drain.closes()
        self._link.listener = None
        if self._inner is not None:
            self._inner.close()

    # ---- other threads ---------------------------------------------------------------------------

    def _ask_to_leave(self) -> None:
        """Tell rank 0 that this process was asked to leave; runs in a thread of its own.

        A launcher sends a signal to all ranks: for rank 0 it must not be the second one.
        """
        time.sleep(SIGNAL_SECONDS)
        self._link.notify("drain")

    def take(self, message: Any) -> None:
        """Take a message of another rank; in the watching thread."""
        drain = getattr(self._inner, "drain", None)
        if message == "drain" and drain is not None:
            drain()

    def report_loss(self, reason: str) -> None:
        """Tell the servers that the worker is lost; in the watching thread."""
        if (ticket := self._calls.facts.ticket) is not None:
            report_loss(LossTicket(*ticket), reason)


def combined(calls: Sequence[CollectiveCall], data_ranks: Sequence[int]) -> CollectiveCall:
    """Return the call of a worker from those of its ranks, by rank.

    data_ranks: Which part of a batch each rank computes. Of ranks with the same data the lowest
        with samples counts.
    """
    first = calls[0]
    if first.kind == "broadcast":
        return next((call for call in calls if call.text != "null"), first)
    if first.kind == "barrier":
        return first
    for rank, call in enumerate(calls):
        if call.values.keys() != first.values.keys():
            raise MismatchError(
                f"the ranks of this group pass other names to job.all_reduce: rank 0 "
                f"{sorted(first.values)}, rank {rank} {sorted(call.values)}. Try: the same names",
                "COLLECTIVE_MISMATCH",
            )
    with_samples = [rank for rank, call in enumerate(calls) if call.samples]
    lowest = {data_ranks[rank]: calls[rank] for rank in reversed(with_samples)}
    counted = [lowest[data_rank] for data_rank in sorted(lowest)]
    total = sum(call.samples for call in counted)
    means = {
        name: sum(call.values[name] * call.samples for call in counted) / total
        for name in (first.values if total else ())
    }
    return CollectiveCall("all_reduce", means or first.values, total)
