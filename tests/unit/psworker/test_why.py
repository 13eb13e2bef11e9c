"""What explains a step: each place of a delay is named, under every policy."""

import random
from collections.abc import Iterator, Sequence

import pytest

from pscommon.core.errors import InvalidRequestError
from pscommon.tracing.spans import ProcessSpans, Span
from psworker.core.trace_events import Trace
from psworker.core.why import Explanation, explain, remedy
from tests.support.simulated_trace import PLACES, Delay, SimulatedJob

POLICIES = ("sync", "async", "ssp")
STRATEGIES = ("plain", "overlapped", "pipelined")
OF_WORKERS = ("data", "compute", "link")


def processes(place: str, workers: int, shards: int) -> Sequence[int | None]:
    """Return the processes where a place can be; None: all workers."""
    if place == "data":
        return [None, *range(workers)]
    if place in OF_WORKERS:
        return range(workers)
    return {"decide": range(1), "shard link": range(1, shards)}.get(place, range(shards))


def names(delay: Delay) -> tuple[str, set[str]]:
    """Return the phase that a delay should be found in, and the texts for its process."""
    number = delay.number
    match delay.place:
        case "data" | "compute":
            return delay.place, {"all workers" if number is None else f"worker {number}"}
        case "link":
            links = {f"link of worker {number} and shard {shard}" for shard in range(4)}
            return "link", {*links, f"links of worker {number}"}
        case "shard link":
            return "link", {f"link of shard {number} and shard 0"}
        case "decide":
            return "decide", {"coordinator"}
        case "answer":
            return "send", {f"shard {number}"}
    of = f"{delay.place} of " if delay.place in ("log", "standby") else ""
    return delay.place, {f"{of}shard {number}"}


def exposed(explanation: Explanation) -> float:
    return sum(phase.own + phase.waited for phase in explanation.phases.values())


def check(job: SimulatedJob) -> None:
    explanation = explain(job.trace())
    phase, who = names(job.delay)

    found = explanation.bottleneck
    assert found is not None
    assert (found.phase, found.who in who) == (phase, True), explanation
    assert found.gain == pytest.approx(found.seconds / explanation.step_seconds)
    assert exposed(explanation) == pytest.approx(explanation.step_seconds, rel=0.05)
    assert "other" not in explanation.phases or (
        explanation.phases["other"].waited < 0.05 * explanation.step_seconds
    )
    assert remedy(found)
    assert not explanation.notes


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("place", PLACES)
def test_the_place_of_a_delay_is_named(place: str, policy: str) -> None:
    """The delay is 50 ms; compute takes 5, 40 and 150 ms."""
    for number in processes(place, 3, 2):
        for compute in (0.005, 0.04, 0.15):
            check(SimulatedJob(policy=policy, delay=Delay(place, number), compute=compute))


@pytest.mark.parametrize("strategy", ["overlapped", "pipelined"])
@pytest.mark.parametrize("place", PLACES)
def test_the_place_is_named_beside_an_overlap(place: str, strategy: str) -> None:
    """A pipelined exchange is exposed where it takes longer than the compute."""
    for policy in POLICIES:
        for number in processes(place, 3, 2):
            delay = Delay(place, number)
            check(SimulatedJob(policy=policy, delay=delay, strategy=strategy, compute=0.01))


@pytest.mark.parametrize("seed", range(30))
def test_the_place_is_named_in_drawn_jobs(seed: int) -> None:
    """Sizes, policy, strategy, place and attempts are drawn."""
    draw = random.Random(seed)
    workers, shards = draw.choice([2, 3, 5]), draw.choice([2, 3])
    place = draw.choice(PLACES)
    check(
        SimulatedJob(
            workers,
            shards,
            draw.choice(POLICIES),
            Delay(place, draw.choice(processes(place, workers, shards))),
            draw.choice(STRATEGIES),
            steps=30,
            compute=draw.choice([0.005, 0.01]),
            jitter=draw.choice([0.0, 0.02, 0.05]),
            asks_again_seconds=draw.choice([1e9, 0.03]),
            seed=seed,
        )
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_without_a_delay_has_no_single_cause(policy: str) -> None:
    explanation = explain(SimulatedJob(policy=policy, compute=0.2).trace())

    assert explanation.bottleneck is None
    assert explanation.document()["bottleneck"] is None
    assert exposed(explanation) == pytest.approx(explanation.step_seconds, rel=0.05)


@pytest.mark.parametrize("place", ["link", "apply", "log", "standby", "answer", "decide"])
def test_hidden_time_is_listed_and_not_blamed(place: str) -> None:
    """The pipelined exchange takes 50 ms longer, and still ends before the compute."""
    job = SimulatedJob(strategy="pipelined", compute=0.15, delay=Delay(place, 0))
    explanation = explain(job.trace())

    assert explanation.bottleneck is None
    assert explanation.hidden["receive"] > 0.03
    assert exposed(explanation) == pytest.approx(explanation.step_seconds, rel=0.05)


def test_a_plain_step_hides_nothing() -> None:
    explanation = explain(SimulatedJob().trace())

    assert explanation.hidden == pytest.approx({"send": 0.0, "receive": 0.0}, abs=1e-6)


def test_steps_of_uneven_length_are_the_workers_compute() -> None:
    """Another worker is the last one in each step, so that none is the cause."""
    explanation = explain(SimulatedJob(workers=4, jitter=1.0, steps=60, compute=0.1).trace())

    assert explanation.bottleneck is not None
    assert explanation.bottleneck[:2] == ("compute", "all workers")


def test_the_only_worker_has_no_avoidable_compute() -> None:
    explanation = explain(SimulatedJob(workers=1, compute=0.3).trace())

    assert (explanation.workers, explanation.bottleneck) == (1, None)


@pytest.mark.parametrize("recording", [(0.0, 1.0), (0.5, 0.9), (0.41, 0.87), (0.8, 1.0)])
def test_traces_may_be_cut_anywhere(recording: tuple[float, float]) -> None:
    for place, number in (("compute", 1), ("log", 1), ("link", 0)):
        check(SimulatedJob(steps=40, recording=recording, delay=Delay(place, number)))


@pytest.mark.parametrize("which", [0, 1, 3])
def test_steps_count_only_while_all_processes_record(which: int) -> None:
    """One process begins late, and its last batch does not come."""
    trace = SimulatedJob(steps=60, delay=Delay("apply", 1)).trace()
    processes = list(trace.processes)
    cut, length = processes[which], len(processes[which].spans)
    processes[which] = cut._replace(spans=cut.spans[length // 4 : length * 3 // 4])
    explanation = explain(trace._replace(processes=processes))

    assert explanation.bottleneck is not None
    assert explanation.bottleneck[:2] == ("apply", "shard 1")
    assert explanation.phases["other"].waited < 0.02 * explanation.step_seconds
    assert explanation.steps == pytest.approx(0.5 * explain(trace).steps, rel=0.1)


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_beside_a_killed_worker_count(policy: str) -> None:
    """The wait for its lease is one long step, which does not count."""
    job = SimulatedJob(policy=policy, killed=1, recording=(0.0, 1.0), delay=Delay("log", 1))

    check(job)


def test_dropped_steps_do_not_count_and_are_noted() -> None:
    trace = SimulatedJob(delay=Delay("log", 1)).trace()
    processes = [
        each._replace(
            spans=[s for s in each.spans if not (s.pushes and s.pushes[0][1] % 6 == 0)],
            dropped_steps=2,
        )
        for each in trace.processes
    ]
    explanation = explain(trace._replace(processes=processes, lost_batches=3))

    assert explanation.bottleneck is not None
    assert explanation.bottleneck[:2] == ("log", "log of shard 1")
    assert "worker 0 dropped the spans of 2 steps" in explanation.notes
    assert "shard 0 dropped 3 batches of spans before they were fetched" in explanation.notes
    assert exposed(explanation) == pytest.approx(explanation.step_seconds, rel=0.05)


def without(trace: Trace, role: str, number: int) -> Trace:
    left = [each for each in trace.processes if (each.role, each.number) != (role, number)]
    return trace._replace(processes=left)


@pytest.mark.parametrize(
    ("role", "number", "note"),
    [
        ("shard", 1, "shard 1 sent no spans: its release is older, or it has just started"),
        ("shard", 0, "shard 0 sent no spans: its release is older, or it has just started"),
        ("worker", 1, "worker 1 sent no spans: its release is older, or it has ended"),
    ],
)
def test_a_process_without_spans_is_noted(role: str, number: int, note: str) -> None:
    """What only its spans could tell is other time, and never blamed on another process."""
    trace = SimulatedJob(delay=Delay("standby", 1), compute=0.2).trace()
    explanation = explain(without(trace, role, number))

    assert note in explanation.notes
    assert exposed(explanation) == pytest.approx(explanation.step_seconds, rel=0.05)
    found = explanation.bottleneck
    assert found is None or found[:2] == ("standby", "standby of shard 1")


def test_processes_with_another_clock_and_no_spans_are_accepted() -> None:
    trace = SimulatedJob(delay=Delay("apply", 1)).trace()
    empty = [ProcessSpans("worker", 9, []), ProcessSpans("shard", 9, [])]
    moved = [each._replace(spans=list(later(each.spans))) for each in trace.processes]

    found, usual = explain(Trace([*moved, *empty])), explain(trace)

    assert found.bottleneck is not None
    assert usual.bottleneck is not None
    assert found.bottleneck[:2] == usual.bottleneck[:2]
    assert found.bottleneck.gain == pytest.approx(usual.bottleneck.gain)


def later(spans: Sequence[Span]) -> Iterator[Span]:
    """Yield the spans on a clock that a binary fraction is added to."""
    return (span._replace(began=span.began + 4096.0) for span in spans)


@pytest.mark.parametrize(
    "trace",
    [
        Trace([]),
        Trace([ProcessSpans("worker", 0, [])]),
        SimulatedJob(steps=1, recording=(0.0, 1.0)).trace(),
        Trace([ProcessSpans("worker", 0, [Span("compute", 1.0, 2.0, ((0, 1),))])]),
    ],
    ids=["nothing", "no spans", "one step", "no end"],
)
def test_a_trace_without_a_complete_step_is_refused(trace: Trace) -> None:
    with pytest.raises(InvalidRequestError, match="no complete step"):
        explain(trace)
