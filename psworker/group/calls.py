"""Calls that all ranks of a group make together: rank 0 carries them out, all get the result."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from pscommon.core.errors import MismatchError, PSError, TooFewWorkersError, error_for
from psworker.core.protocols import JobClient
from psworker.group.link import JSON, GroupLink
from psworker.session.drain import DrainedError
from psworker.session.reports import number_soon

REPORT_SECONDS = 1.0
"""Reported values travel at most this often."""

LAST_CALLS = ("send_reports", "close")


class GroupFacts(NamedTuple):
    """What all ranks know of the job, as of the last call that they made together.

    No rank looks at anything newer, so all ranks decide alike.
    """

    job: str
    training: str
    worker: int
    workers: int
    is_first: bool
    policy: str
    bad_gradients: str
    version: int
    draining: bool
    stopping: bool
    seed: int
    update_counts: Mapping[str, int]
    ticket: Sequence[Any] | None  # with which any rank can report the loss of the worker


def facts_of(client: JobClient) -> GroupFacts:
    """Return what rank 0's client knows now."""
    return GroupFacts(
        client.job,
        client.training,
        client.worker,
        client.workers,
        client.is_first,
        client.policy,
        client.bad_gradients,
        client.version,
        client.draining,
        client.stopping,
        client.seed,
        dict(getattr(client.model, "update_counts", {})),
        getattr(client, "loss_ticket", None),
    )


NOTHING_KNOWN = GroupFacts("", "", 0, 1, False, "", "", 0, False, False, 0, {}, None)


class GroupCalls:
    """Makes the calls of one rank.

    Attributes:
        link: The connections to the other ranks.
        inner: The worker's client on rank 0; None on other ranks.
        facts: What the ranks know of the job.
    """

    def __init__(
        self, link: GroupLink, connect: Callable[[], JobClient], own: Mapping[str, str]
    ) -> None:
        """Connect the worker on rank 0, and raise its error on all ranks.

        Args:
            connect: Returns the worker's client.
            own: What must be equal on all ranks, by name.
        """
        self.link = link
        self.inner: JobClient | None = None
        self.facts = NOTHING_KNOWN
        self._values: dict[str, Any] = {}
        self._sent_at = -math.inf
        self._reporters: dict[str, int] = {}
        found = link.gather("connect", dict(own))
        if not link.rank:
            try:
                check_equal(found)
                self.inner = connect()
            except BaseException as error:
                self._spread_error("connect", error)
                raise
        self.together("connect", lambda client: None)

    def report(self, values: Mapping[str, Any]) -> None:
        """Report values with one of the next calls; a GPU's value is read only then."""
        self._values |= {name: number_soon(name, value) for name, value in values.items()}

    def _take_values(self, at_once: bool) -> dict[str, float]:
        now = time.monotonic()
        if not self._values or (now - self._sent_at < REPORT_SECONDS and not at_once):
            return {}
        values, self._values, self._sent_at = self._values, {}, now
        return {name: float(value) for name, value in values.items()}

    def gathered(
        self, name: str, own: JSON, perform: Callable[[JobClient, Sequence[JSON]], JSON]
    ) -> JSON:
        """Return the result of `perform`, which runs on rank 0 with what all ranks pass, by rank.

        Raises what it raises, on all ranks.
        """
        values = self._take_values(at_once=name in LAST_CALLS)
        if self.inner is None:
            self.link.gather(name, [own, values])
            return self.together(name, lambda client: None)

        def with_all(client: JobClient) -> JSON:
            found = self.link.gather(name, [own, values])
            for rank, (_, reported) in enumerate(found):
                self._report(client, rank, reported)
            return perform(client, [each for each, _ in found])

        return self.together(name, with_all)

    def together(
        self,
        name: str,
        perform: Callable[[JobClient], JSON],
        share: Callable[[], int] | None = None,
    ) -> JSON:
        """Return the result of `perform`, which runs on rank 0 without waiting for the others.

        Raises what it raises, on all ranks.

        name: Names the call, the same on all ranks.
        share: On rank 0, returns an open file for the others, which receive it next.
        """
        self.link.check()
        if self.inner is None:
            call, result, error, facts = self.link.receive()
            self.facts = GroupFacts(*facts)
            if error:
                raise _error(*error)
            if call != name:
                self.link.refuse(call, {self.link.rank: name})
            return result
        try:
            result = perform(self.inner)
            descriptor = None if share is None else share()
        except BaseException as error:
            self.facts = facts_of(self.inner)
            self._spread_error(name, error)
            raise
        self.facts = facts_of(self.inner)
        self.link.spread([name, result, None, self.facts], descriptor)
        return result

    def _spread_error(self, name: str, error: BaseException) -> None:
        reason = error.reason if isinstance(error, PSError) else "INTERNAL"
        text = str(error) if isinstance(error, PSError) else f"rank 0 failed: {error!r}"
        with suppress(TooFewWorkersError):  # this error counts
            self.link.spread([name, None, [reason, text], self.facts])

    def _report(self, client: JobClient, rank: int, values: Mapping[str, float]) -> None:
        """Report values of a rank, unless a lower rank reports these names."""
        own = {
            name: value
            for name, value in values.items()
            if self._reporters.setdefault(name, rank) >= rank
        }
        self._reporters.update(dict.fromkeys(own, rank))
        if own:
            client.report_soon(own)


def _error(reason: str, text: str) -> PSError:
    return DrainedError(text) if reason == "DRAINED" else error_for(reason, text)


def check_equal(found: Sequence[Mapping[str, str]]) -> None:
    """Raise MismatchError if ranks differ in something that must be equal."""
    for rank, each in enumerate(found):
        for name, value in each.items():
            if value != found[0][name]:
                raise MismatchError(
                    f"the ranks of this group differ in {name}: rank 0 has {found[0][name]!r}, "
                    f"rank {rank} {value!r}. Try: the same script, release and settings on all "
                    "ranks",
                    "COLLECTIVE_MISMATCH",
                )
