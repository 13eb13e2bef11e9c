"""Synchronization policies: when staged pushes become an update.

    policy  bound  barrier
    sync    0      yes: a round averages one push of every active worker, in worker order
    ssp S   S      no:  a push counts at once unless its worker would be over S clocks ahead
    async   none   no:  a push counts at once
    allreduce  0   yes: as sync, but workers sum the gradients and step; their pushes have no bytes

A worker's clock counts its finished steps. With a bound, at every version, the clock of any active
worker minus the smallest clock of an active worker is at most the bound. A push that would break
this waits, staged, and its worker waits with it; nothing is dropped. The check is made on the
clock *after* the push. Ho et al. ("More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server", NIPS 2013) bound the clock at the read. A bound at the write is stricter by one
step and needs no second rule for reads. With bound 0 all workers step together, which is the
barrier: ssp 0 is sync.
"""

from dataclasses import dataclass

from pscommon.core.limits import check_allreduce, check_policy


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy of the table, with its settings.

    name: sync, ssp, async or allreduce.
    bound: clocks that a worker may be ahead of the slowest one; None: any number.
    barrier: whether an update needs a push of every active worker.
    max_staleness: pushes computed more versions ago are rejected as `stale`; None: never.
    backup: with a barrier, workers that a round does not wait for. A push that arrives after its
        round has closed is `stale` (Chen et al., "Revisiting Distributed Synchronous SGD", 2016).
    """

    name: str
    bound: int | None
    barrier: bool
    max_staleness: int | None = None
    backup: int = 0

    @property
    def age_limit(self) -> int | None:
        """Largest age of a push in versions; None: any age."""
        return 0 if self.backup else self.max_staleness


def policy(
    name: str, staleness: int | None = None, max_staleness: int | None = None, backup: int = 0
) -> Policy:
    """Return the policy for the operator's settings.

    Args:
        name: sync, ssp, async or allreduce.
        staleness: The bound of ssp, in clocks; None for the other policies.
        max_staleness: Maximum age of a push, in versions; None: any age.
        backup: Workers that a sync round does not wait for.

    Raises:
        InvalidRequestError: The settings do not fit together.
    """
    if name == "allreduce":
        check_allreduce(staleness=staleness, max_staleness=max_staleness, backup_workers=backup)
    else:
        check_policy(name, staleness, backup)
    bound = 0 if name in ("sync", "allreduce") else staleness
    return Policy(name, bound, barrier=bound == 0, max_staleness=max_staleness, backup=backup)


def is_bounded(policy: Policy) -> bool:
    """Return whether a push may have to wait because its worker is too far ahead.

    A worker may make a step if its clock is at most the smallest clock of an active worker plus
    the bound, minus one.
    """
    return policy.bound is not None and not policy.barrier
