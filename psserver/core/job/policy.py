"""Synchronization policies: when staged pushes become an update.

    policy  bound  barrier
    sync    0      yes: a round averages one push of every active worker, in worker order
    ssp S   S      no:  a push counts at once unless its worker would be over S clocks ahead
    async   none   no:  a push counts at once

A worker's clock counts its finished steps. With a bound, at every version, the clock of any active
worker minus the smallest clock of an active worker is at most the bound. A push that would break
this waits, staged, and its worker waits with it; nothing is dropped. The check is made on the
clock *after* the push. Ho et al. ("More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server", NIPS 2013) bound the clock at the read. A bound at the write is stricter by one
step and needs no second rule for reads. With bound 0 all workers step together, which is the
barrier: ssp 0 is sync.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pscommon.core.log_entries import PushKey


@dataclass(frozen=True, slots=True)
class Policy:
    """A row of the table.

    name: sync, ssp or async.
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


def policy(
    name: str, staleness: int | None = None, max_staleness: int | None = None, backup: int = 0
) -> Policy:
    """Return the policy for the operator's settings.

    Args:
        name: sync, ssp or async.
        staleness: The bound of ssp, in clocks; None for the other policies.
        max_staleness: Maximum age of a push, in versions; None: any age.
        backup: Workers that a sync round does not wait for.

    Raises:
        ValueError: The settings do not fit together.
    """
    if (name == "ssp") != (staleness is not None):
        raise ValueError(
            f"policy {name} and staleness {staleness} do not fit: ssp requires a staleness, other "
            "policies exclude it. Try: `--policy ssp --staleness S`"
        )
    if staleness is not None and staleness < 0:
        raise ValueError(f"--staleness {staleness} is not valid. Try: at least 0 (0 acts as sync)")
    if name not in ("sync", "ssp", "async"):
        raise ValueError(f"policy {name!r} is not valid. Try: one of sync, ssp, async")
    bound = 0 if name == "sync" else staleness
    if backup and bound != 0:
        raise ValueError(
            f"policy {name} excludes `--backup-workers {backup}`: only a sync round waits for all "
            "workers. Try: policy sync"
        )
    return Policy(name, bound, barrier=bound == 0, max_staleness=max_staleness, backup=backup)


def choose(
    row: Policy, clocks: Mapping[int, int], ready: Mapping[int, PushKey]
) -> Sequence[PushKey]:
    """Return the pushes that make the next update, in the order in which they are summed.

    An empty result means that the coordinator waits for more pushes.

    Args:
        row: The policy.
        clocks: Clock of every active worker, in worker order.
        ready: Oldest ready push of each active worker that has one, in order of arrival.
    """
    if row.barrier:
        enough = max(1, len(clocks) - row.backup)
        return (
            [ready[worker] for worker in clocks if worker in ready] if len(ready) >= enough else []
        )
    for worker, key in ready.items():
        if within_bound(row, clocks, worker):
            return [key]
    return []


def within_bound(row: Policy, clocks: Mapping[int, int], worker: int) -> bool:
    """Return whether this worker may finish one more step now."""
    if row.bound is None:
        return True
    after = clocks[worker] + 1
    return (
        after - min([after, *(clock for other, clock in clocks.items() if other != worker)])
        <= row.bound
    )
