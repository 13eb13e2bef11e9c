"""Numbers 14 and 15: what a decided push costs the coordinator as workers and servers come in."""

from contextlib import ExitStack

from benchmarks.rounds import Entry
from benchmarks.scale import Scale
from benchmarks.works.entrants import command
from benchmarks.works.work import Lineup, Work

POLICIES = ("sync", "async", "ssp", "blocked")
FEW_COUNT, SOME_COUNT, MANY_COUNT = 4, 64, 1024
SIZES = ((FEW_COUNT, 1), (SOME_COUNT, 1), (MANY_COUNT, 1), (SOME_COUNT, SOME_COUNT))
"""Numbers of workers and servers."""


def name(policy: str, workers: int, shards: int) -> str:
    """Return the name of a row: "async, 64 workers, 1 server"."""
    label = "ssp, all but one worker blocked" if policy == "blocked" else policy
    return f"{label}, {workers} workers, {shards} server" + "s" * (shards > 1)


def lineup(scale: Scale, resources: ExitStack) -> Lineup:
    entries = []
    for policy in POLICIES:
        for workers, shards in SIZES:
            pushes = scale.pushes * workers // shards
            arguments = tuple(map(str, (workers, shards, min(pushes, 4 * MANY_COUNT))))
            entries.append(
                Entry(name(policy, workers, shards), command("decisions", policy, *arguments))
            )
    return Lineup(entries)


WORK = Work(
    "decisions",
    "The coordinator alone, without servers or a network: its CPU seconds for each decided push. "
    "The shards' reports are made before. Each shard reports each push by itself.",
    lineup,
)
