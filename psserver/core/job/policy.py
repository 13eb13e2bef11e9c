"""When staged pushes become an update: three rows of one table.

    policy     bound       barrier
    sync       0           yes: a round takes one push of every active worker, averaged, in worker order
    ssp S      S           no:  a push counts at once unless it would put its worker more than S clocks ahead
    async      none        no:  a push counts at once

A worker's clock counts its finished steps. The bound is kept on clocks *after* a push counts:
with S the bound, clock of any active worker - smallest clock of an active worker <= S at every
version. A push that would break it waits, staged, and so does its worker; nothing is dropped.
(Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
NIPS 2013, bound the clock at the read; bounding it at the write is stricter by one step and
needs no second rule for reads.) With S = 0 every worker must step together, which is the
barrier: ssp 0 is sync.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pscommon.core.log_entries import PushKey


@dataclass(frozen=True, slots=True)
class Policy:
    """A row of the table. max_staleness: pushes computed more versions ago are answered `stale`
    (None: any age).

    backup: with a barrier, so many workers need not be waited for: a round closes without the
    slowest, and what they push for it later is `stale` (Chen et al., "Revisiting Distributed
    Synchronous SGD", 2016: backup workers).
    """

    name: str
    bound: int | None
    barrier: bool
    max_staleness: int | None = None
    backup: int = 0


def policy(
    name: str, staleness: int | None = None, max_staleness: int | None = None, backup: int = 0
) -> Policy:
    """The row for what the operator asked for; `staleness` is the S of ssp and meant for it
    alone.
    """
    if (name == "ssp") != (staleness is not None):
        raise ValueError("--staleness S goes with --policy ssp, and ssp needs it")
    if staleness is not None and staleness < 0:
        raise ValueError(f"a staleness of {staleness} makes no sense; 0 is sync, larger is looser")
    if name not in ("sync", "ssp", "async"):
        raise ValueError(f"policy {name!r} is not one of sync, ssp, async")
    bound = 0 if name == "sync" else staleness
    if backup and bound != 0:
        raise ValueError(
            f"--backup-workers {backup} is for sync, where a round waits for everybody"
        )
    return Policy(name, bound, barrier=bound == 0, max_staleness=max_staleness, backup=backup)


def choose(
    row: Policy, clocks: Mapping[int, int], ready: Mapping[int, PushKey]
) -> Sequence[PushKey]:
    """The pushes that make the next update, in the order in which they are summed; empty: wait.

    clocks: of every active worker, in worker order. ready: the oldest push of each worker that
    all shards hold, in order of arrival; only of active workers.
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
    """May this worker finish one more step now?"""
    if row.bound is None:
        return True
    after = clocks[worker] + 1
    return (
        after - min([after, *(clock for other, clock in clocks.items() if other != worker)])
        <= row.bound
    )
