"""The numbers that the system has to reach, each as a ratio to something measured in the same
run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.record import Result
from benchmarks.sample import Ratio, ratio, sample
from benchmarks.scale import FULL
from benchmarks.works import decisions, many_tensors, memory, overlap, small_step, snapshots, tls
from benchmarks.works.entrants import (
    CALL,
    COPY,
    GLOO,
    GLOO_ADAM,
    RPC_TCP,
    STREAM,
    TCP,
    TENSORFLOW,
    TLS,
    ours,
    team,
)

MINUTE_SECONDS = 60.0

Measure = Callable[[Result], Ratio | None]

GRPC, LANE, SHM = ours("grpc"), ours("stream"), ours("shm")


@dataclass(frozen=True)
class Bar:
    """number: as in the list of what has to be reached. ours, peer: what is divided by what, in
    words.

    result: the work's name. needs: the contenders whose absence explains that nothing was
    measured.
    """

    number: int
    result: str
    ours: str
    peer: str
    limit: float
    measure: Measure
    needs: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """A bar and what was measured; None where it was not, and then `reason` says why."""

    bar: Bar
    found: Ratio | None
    reason: str = ""

    @property
    def met(self) -> bool | None:
        return None if self.found is None else self.found.value <= self.bar.limit


def versus(
    number: int, result: str, mine: str, peer: str, limit: float, metric: str = "seconds"
) -> Bar:
    """One contender's metric over another's."""

    def measure(found: Result) -> Ratio | None:
        a, b = found.find(mine, metric), found.find(peer, metric)
        return ratio(a, b) if a and b else None

    what = {"seconds": "", "decision": "", "cpu": ": CPU", "p99": ": p99"}[metric]
    return Bar(number, result, mine + what, peer + what, limit, measure, (mine, peer))


def grown(number: int, lane: str, limit: float) -> Bar:
    """The dearest number of workers over one worker."""

    def measure(found: Result) -> Ratio | None:
        costs = {
            workers: cost
            for workers in FULL.growth
            if (cost := found.find(team(lane, workers), "server_cpu"))
        }
        if 1 not in costs or len(costs) < 2:
            return None
        return max(
            (ratio(cost, costs[1]) for workers, cost in costs.items() if workers > 1),
            key=lambda r: r.value,
        )

    name = ours(lane)
    needs = (team(lane, 1), team(lane, 2))
    return Bar(
        number,
        "growth",
        f"{name}: server CPU a push, most of 2 to 16 workers",
        "1 worker",
        limit,
        measure,
        needs,
    )


def memory_bar(result: str, contender: str) -> Bar:
    """Peak memory over what is allowed."""

    def measure(found: Result) -> Ratio | None:
        peaks = found.find(contender, "server_memory")
        if peaks is None:
            return None
        allowed = found.facts["allowed"]
        # the highest peak of all rounds counts, not the median
        return Ratio(peaks.greatest / allowed, peaks.least / allowed, peaks.greatest / allowed)

    return Bar(
        7,
        result,
        f"{contender}: most memory",
        "weights + optimizer state + budget",
        1.1,
        measure,
        (contender,),
    )


def flat(result: str, contender: str) -> Bar:
    """Peak memory in the last third of the rounds over that in the first third."""

    def measure(found: Result) -> Ratio | None:
        peaks = found.find(contender, "server_memory")
        if peaks is None:
            return None
        third = max(1, len(peaks.values) // 3)
        return ratio(sample(peaks.values[-third:]), sample(peaks.values[:third]))

    return Bar(
        7,
        result,
        f"{contender}: memory at the end",
        "at the beginning",
        1.05,
        measure,
        (contender,),
    )


def snapshot_share(lane: str) -> Bar:
    """What snapshots cost where one is taken every minute."""
    name = ours(lane, snapshots.SAVING)
    return absolute(11, "snapshots", name, "lost", f"{MINUTE_SECONDS:g} s", MINUTE_SECONDS, 0.035)


def snapshot_pause(lane: str) -> Bar:
    """The longest step while one is written."""
    return absolute(
        12, "snapshots", ours(lane, snapshots.SAVING), "pause", "50 ms per 100 MB", 0.05, 1.0
    )


def absolute(
    number: int, result: str, mine: str, metric: str, unit: str, size: float, limit: float
) -> Bar:
    """A metric over a fixed size, in words `unit`."""

    def measure(found: Result) -> Ratio | None:
        a = found.find(mine, metric)
        return Ratio(a.median / size, a.least / size, a.greatest / size) if a else None

    return Bar(number, result, f"{mine}: {metric}", unit, limit, measure, (mine,))


def hidden() -> Bar:
    """A step with overlap over the longer one of its two halves."""

    def measure(found: Result) -> Ratio | None:
        step, *halves = (
            found.find(name, "seconds")
            for name in (overlap.OVERLAPPED, overlap.COMPUTE, overlap.TRANSFER)
        )
        known = [half for half in halves if half]
        return (
            ratio(step, max(known, key=lambda half: half.median))
            if step and len(known) == 2
            else None
        )

    needs = (overlap.OVERLAPPED, overlap.COMPUTE, overlap.TRANSFER)
    return Bar(
        8, "overlap", overlap.OVERLAPPED, "the longer of compute and transfer", 1.2, measure, needs
    )


def same_weights() -> Bar:
    """Rounds after which the weights with and without overlap differ, as a share of all: none
    may.
    """

    def measure(found: Result) -> Ratio | None:
        a, b = (found.find(name, "digest") for name in (overlap.OVERLAPPED, overlap.PLAIN))
        if not (a and b):
            return None
        share = sum(x != y for x, y in zip(a.values, b.values, strict=True)) / len(a.values)
        return Ratio(share, share, share)

    needs = (overlap.OVERLAPPED, overlap.PLAIN)
    return Bar(
        8,
        "overlap",
        "rounds with other weights than without overlap",
        "all rounds",
        0.0,
        measure,
        needs,
    )


def _many(lane: str) -> list[Bar]:
    """torch alone exceeds the limit for shared memory in `optimizer.step()`."""
    levels = [*many_tensors.LEVELS.values()]
    if lane == "shm":
        levels.remove(many_tensors.LEVELS["modules"])
    return [
        versus(5, "many_tensors", ours(lane, f"{level}, many"), ours(lane, f"{level}, one"), 1.3)
        for level in levels
    ]


def _each_lane(lane: str) -> list[Bar]:
    return [
        versus(4, "smallest", ours(lane), CALL, 2.5),
        versus(4, "smallest", ours(lane), TENSORFLOW, 0.6),
        *_many(lane),
        memory_bar("memory", ours(lane)),
        flat("memory", ours(lane)),
        versus(9, "tail", ours(lane, "busy server"), ours(lane, "idle server"), 3.0, "p99"),
        snapshot_share(lane),
        snapshot_pause(lane),
        versus(
            13, "snapshots", ours(lane, snapshots.SAVING), ours(lane, snapshots.QUIET), 2.0, "p99"
        ),
    ]


def _small_step(lane: str) -> list[Bar]:
    one, two = (small_step.name(lane, servers) for servers in (1, 2))
    return [
        versus(17, "small_step", one, CALL, 0.8),
        versus(17, "small_step", one, TENSORFLOW, 0.3),
        versus(17, "small_step", two, one, 2.5),
    ]


def _arrays(lane: str, limit: float) -> Bar:
    return versus(19, "small_step", ours(lane, "arrays"), CALL, limit)


def _decisions(policy: str) -> list[Bar]:
    few, some, many, servers = (decisions.name(policy, *size) for size in decisions.SIZES)
    return [
        versus(14, "decisions", many, few, 1.5, "decision"),
        versus(15, "decisions", servers, some, 15.0, "decision"),
    ]


BARS: tuple[Bar, ...] = tuple(
    sorted(
        [
            versus(1, "push_pull", GRPC, STREAM, 1.25),
            versus(1, "push_pull", GRPC, TENSORFLOW, 0.8),
            versus(2, "push_pull", SHM, GLOO, 0.3),
            versus(2, "push_pull", SHM, COPY, 1.5),
            versus(3, "two_workers", SHM, GLOO_ADAM, 0.6),
            versus(6, "push_pull", SHM, GLOO, 1.0, "cpu"),
            versus(6, "push_pull", GRPC, TENSORFLOW, 1.0, "cpu"),
            *(bar for lane in ("grpc", "stream", "shm") for bar in _each_lane(lane)),
            grown(10, "shm", 1.15),
            grown(10, "stream", 1.2),
            versus(16, "push_pull", LANE, TCP, 1.25),
            versus(16, "push_pull", LANE, GLOO, 1.4),
            versus(16, "push_pull", LANE, GRPC, 0.9),
            versus(16, "push_pull", LANE, GRPC, 0.6, "cpu"),
            versus(16, "push_pull", LANE, TENSORFLOW, 0.78),
            versus(16, "push_pull", LANE, RPC_TCP, 0.95),
            *(
                versus(18, "push_pull", ours(lane, "arrays"), ours(lane), limit)
                for lane, limit in (("grpc", 1.15), ("stream", 1.15), ("shm", 1.5))
            ),
            *_small_step("stream"),
            *_small_step("shm"),
            _arrays("stream", 1.0),
            _arrays("shm", 0.9),
            versus(20, "tls", tls.secured("stream"), TLS, 1.25),
            versus(20, "tls", tls.secured("stream"), LANE, 2.6),
            versus(20, "tls", tls.secured("grpc"), GRPC, 2.2),
            versus(20, "tls", tls.secured("shm"), SHM, 1.05),
            memory_bar("memory_crowd", memory.MANY),
            hidden(),
            same_weights(),
            *(bar for policy in decisions.POLICIES for bar in _decisions(policy)),
        ],
        key=lambda bar: bar.number,
    )
)


def judge(results: Mapping[str, Result]) -> list[Verdict]:
    """All bars, in order, by what was measured."""
    return [_judged(bar, results.get(bar.result)) for bar in BARS]


def _judged(bar: Bar, result: Result | None) -> Verdict:
    if result is None:
        return Verdict(bar, None, "not run")
    found = bar.measure(result)
    if found is not None:
        return Verdict(bar, found)
    reasons = dict.fromkeys(result.skipped[name] for name in bar.needs if name in result.skipped)
    return Verdict(bar, None, "; ".join(reasons) or "not measured")
