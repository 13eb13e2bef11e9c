"""Performance limits, applied to invented results."""

import pytest

from benchmarks.bars import BARS, Verdict, judge
from benchmarks.record import Record, Result
from benchmarks.works import WORKS, overlap
from benchmarks.works.entrants import COPY, GLOO, RPC, RPC_TCP, STREAM, TCP, TENSORFLOW, ours, team
from tests.support.benchmark_results import result

GRPC, SHM = ours("grpc"), ours("shm")


def seconds(*values: float) -> Record:
    return {"seconds": list(values), "cpu": [value * 2 for value in values]}


def verdicts(found: Result, number: int) -> list[Verdict]:
    """Return the verdicts on one number for this result."""
    return [
        verdict
        for verdict in judge({found.work: found})
        if verdict.bar.number == number and verdict.bar.result == found.work
    ]


def values(found: Result, number: int) -> list[tuple[float | None, bool | None]]:
    return [
        (verdict.found.value if verdict.found else None, verdict.met)
        for verdict in verdicts(found, number)
    ]


def test_every_number_has_a_limit() -> None:
    """Each limit belongs to an existing work and differs from the others."""
    assert {bar.number for bar in BARS} == set(range(1, 21))
    assert {bar.result for bar in BARS} <= {work.name for work in WORKS}
    assert len({(bar.number, bar.result, bar.ours, bar.peer) for bar in BARS}) == len(BARS)


def test_limits_of_works_that_did_not_run_are_open() -> None:
    assert {(verdict.met, verdict.reason) for verdict in judge({})} == {(None, "not run")}


def test_push_pull_is_compared_to_each_peer() -> None:
    """Time and CPU seconds have separate limits."""
    records = {
        GRPC: seconds(1.2, 1.2),
        SHM: seconds(0.2, 0.2),
        STREAM: seconds(1.0, 1.0),
        GLOO: seconds(0.5, 0.5),
    }
    records |= {COPY: seconds(0.1, 0.1), RPC: seconds(2.0, 2.0), RPC_TCP: seconds(2.4, 2.4)}
    reason = {TENSORFLOW: "no TensorFlow here"}
    found = result("push_pull", records, skipped=reason)

    assert values(found, 1) == [(1.2, True), (None, None)]
    assert values(found, 2) == [(0.4, False), (2.0, False)]
    assert values(found, 6) == [(0.4, True), (None, None)]
    assert verdicts(found, 1)[1].reason == "no TensorFlow here"
    records[ours("stream")] = seconds(0.6, 0.6)
    found = result("push_pull", records | {TCP: seconds(0.5, 0.5)}, skipped=reason)
    assert values(found, 16) == [
        *[(1.2, True), (1.2, True), (0.5, True), (0.5, True), (None, None), (0.25, True)]
    ]


def test_a_value_equal_to_its_limit_is_accepted() -> None:
    found = result("push_pull", {GRPC: seconds(1.25), STREAM: seconds(1.0)})

    assert values(found, 1)[0] == (1.25, True)


def test_tail_latency_is_compared_by_p99() -> None:
    """Not by the median."""
    idle: Record = {"seconds": [1.0, 1.0], "p99": [2.0, 2.0]}
    busy: Record = {"seconds": [1.0, 1.0], "p99": [7.0, 7.0]}
    found = result("tail", {ours("grpc", "idle server"): idle, ours("grpc", "busy server"): busy})

    assert values(found, 9) == [(3.5, False), (None, None), (None, None)]


def test_growth_uses_the_most_expensive_number_of_workers() -> None:
    """Whichever number of workers that is."""
    costs = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.0, 16: 1.2}
    found = result(
        "growth", {team("shm", workers): {"server_cpu": [cost]} for workers, cost in costs.items()}
    )

    assert values(found, 10) == [(1.3, False), (None, None)]


def test_growth_needs_more_than_one_worker() -> None:
    found = result("growth", {team("shm", 1): {"server_cpu": [1.0]}})

    assert values(found, 10)[0] == (None, None)


def test_memory_is_compared_by_its_highest_peak() -> None:
    """Growth between rounds has its own limit."""
    found = result(
        "memory", {GRPC: {"server_memory": [100.0, 100.0, 120.0]}}, facts={"allowed": 100.0}
    )

    peak_ratio, growth = values(found, 7)[:2]

    assert peak_ratio == (1.2, False)
    assert growth == (1.2, False)


def test_constant_memory_is_accepted() -> None:
    found = result(
        "memory", {GRPC: {"server_memory": [100.0, 108.0, 100.0]}}, facts={"allowed": 100.0}
    )

    assert values(found, 7)[:2] == [(1.08, True), (1.0, True)]


@pytest.mark.parametrize(("compute", "transfer"), [(1.0, 0.5), (0.5, 1.0)])
def test_overlap_is_compared_to_the_longer_phase(compute: float, transfer: float) -> None:
    """Digests of every round must be equal."""
    records: dict[str, Record] = {
        overlap.COMPUTE: {"seconds": [compute] * 2},
        overlap.TRANSFER: {"seconds": [transfer] * 2},
        overlap.PLAIN: {"seconds": [1.5] * 2, "digest": [1.0, 2.0]},
        overlap.OVERLAPPED: {"seconds": [1.1] * 2, "digest": [1.0, 2.0]},
    }

    assert values(result("overlap", records), 8) == [(1.1, True), (0.0, True)]

    records[overlap.OVERLAPPED]["digest"] = [1.0, 3.0]

    assert values(result("overlap", records), 8)[1] == (0.5, False)
