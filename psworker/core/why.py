"""Why a step takes its time: an explanation computed from a trace.

Theory of operation

- **Step.** A worker's step is the time between two step ends on the script's thread. A step ends
  with `scatter`, or, if that is not its last span, where the next step begins. Only steps count in
  the time that all processes have recorded, and without a gap in the push numbers (dropped ones).
- **Exposed.** `data`, `compute`, `gather` and `scatter` are the script's own time. The rest of the
  step is its wait. Exposed phases add up to the step.
- **Wait.** Each gap between the script's spans is divided backwards along the critical path, from
  the end of the last `receive` in it, until the gap is used up (psworker/core/critical_path.py):

  | station | phase | who |
  | --- | --- | --- |
  | answer: copy, send and what else the shard does after the apply | send | shard |
  | the shard's apply, and applies that it had to wait for | apply | shard |
  | push ready to apply, minus the coordinator's share | link | shard and shard 0 |
  | the coordinator's decision | decide | coordinator |
  | its record, and its standby | log, standby | shard 0 |
  | the report waits for the report that decides | see below | see below |
  | check, log, standby of the push | check, log, standby | shard |
  | round trip, minus the time at the shard, and the worker's send | link | worker and shard |

  Link times are differences of two durations, each of one process: offsets of clocks cancel.
- **The push that decides.** A report that waits for another push is late by what that push took
  longer than its own: in gather, compute, data, link, send and the shard's work, each since the
  answer before. Only this excess is attributed: what both pushes do alike delays neither.
- **Middle half.** Of each worker the half of its steps counts whose durations are nearest to its
  median, and then the mean over the workers: a slow worker counts as much as a fast one.
- **Avoidable.** Of a worker's own compute, the excess over the median of the other workers. Of all
  else, all of it. Time that cannot be attributed ("other") and hidden time are never blamed.
- **Bottleneck.** The phase with the most avoidable seconds. `who` is the one with more than 60 % of
  them; otherwise it is all of a worker's or a shard's links, or "all workers" and so on. Below 5 %
  of a step there is no single cause.
- **Hidden.** Send and receive beside the script's own spans.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple, TypeVar

from pscommon.core.errors import InvalidRequestError
from pscommon.tracing.spans import Span
from psworker.core.critical_path import CriticalPaths, by_cause, limited
from psworker.core.indexed_spans import SCRIPT_SPANS, UNKNOWN, WaitPart, Who, WorkerSpans
from psworker.core.trace_events import Trace, dropped_notes

DOMINANT_RATIO = 0.6
MIN_GAIN_RATIO = 0.05
MAX_EDGE_SECONDS = 3.0
"""A process that began later, or ended earlier, than others by more has joined or left."""

Causes = Mapping[tuple[str, Who], float]
K = TypeVar("K")


class Phase(NamedTuple):
    """Seconds per step: of the script itself, and of its wait for this phase elsewhere."""

    own: float
    waited: float


class Bottleneck(NamedTuple):
    """What would shorten a step most.

    Attributes:
        phase: Name of the phase.
        who: A worker, shard, link, the coordinator, or all of one kind.
        seconds: Avoidable seconds per step.
        gain: Their part of a step.
    """

    phase: str
    who: str
    seconds: float
    gain: float


class Explanation(NamedTuple):
    """Where a step spends its time.

    Attributes:
        step_seconds: Median of a worker's steps, mean over the workers.
        steps: Number of steps in the trace.
        workers: Number of workers that have made them.
        phases: Exposed time by phase.
        hidden: Seconds per step of `send` and `receive` beside the script's own work.
        bottleneck: None: no single cause.
        notes: What the trace lacks, one sentence each.
    """

    step_seconds: float
    steps: int
    workers: int
    phases: Mapping[str, Phase]
    hidden: Mapping[str, float]
    bottleneck: Bottleneck | None
    notes: Sequence[str]

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "step_seconds": self.step_seconds,
            "steps": self.steps,
            "workers": self.workers,
            "phases": {name: phase._asdict() for name, phase in self.phases.items()},
            "hidden": dict(self.hidden),
            "bottleneck": self.bottleneck and self.bottleneck._asdict(),
            "remedy": self.bottleneck and remedy(self.bottleneck),
            "notes": list(self.notes),
        }


class _Step(NamedTuple):
    """One step of a worker, whose clock `began` is of."""

    began: float
    seconds: float
    own: Causes
    waited: Causes
    hidden: Mapping[str, float]


def explain(trace: Trace) -> Explanation:
    """Explain the steps of a trace.

    Raises:
        InvalidRequestError: No worker has made a complete step in it.
    """
    paths = CriticalPaths(trace)
    complete = {number: _steps(paths, number) for number in sorted(paths.workers)}
    steps = _counted(trace, {number: found for number, found in complete.items() if found})
    if not steps:
        raise InvalidRequestError(
            "the trace has no complete step of a worker. Try: record while the job makes steps, "
            "and for longer than two of them: `--seconds`"
        )
    middles = {number: _middle_half(found) for number, found in steps.items()}
    own = {number: _mean([step.own for step in middle]) for number, middle in middles.items()}
    waited = [_mean([step.waited for step in middle]) for middle in middles.values()]
    hidden = [_mean([step.hidden for step in middle]) for middle in middles.values()]
    seconds = sum(map(_median_step, steps.values())) / len(steps)
    all_own, all_waited = _mean(list(own.values())), _mean(waited)
    return Explanation(
        seconds,
        sum(map(len, steps.values())),
        len(steps),
        _phases(all_own, all_waited),
        _mean(hidden),
        _bottleneck(_avoidable(own, all_waited), seconds),
        list(_notes(trace, paths)),
    )


def _phases(own: Causes, waited: Causes) -> dict[str, Phase]:
    sums: dict[str, list[float]] = {name: [0.0, 0.0] for name in SCRIPT_SPANS}
    for column, causes in enumerate((own, waited)):
        for (phase, _), seconds in causes.items():
            sums.setdefault(phase, [0.0, 0.0])[column] += seconds
    return {name: Phase(*pair) for name, pair in sums.items() if sum(pair)}


def _steps(paths: CriticalPaths, number: int) -> list[_Step]:
    """Return the complete steps of a worker."""
    worker = paths.workers[number]
    pushes = sorted(worker.script)
    strides = Counter(after - before for before, after in pairwise(pushes))
    stride = strides.most_common(1)[0][0] if strides else 0
    ends: dict[int, float] = {}
    for push, after in zip_longest(pushes, pushes[1:]):
        last = max(worker.script[push], key=lambda span: span.ended)
        if last.name == "scatter":
            ends[push] = last.ended
        elif after is not None and after - push == stride:
            ends[push] = worker.script[after][0].began
    return [
        _step(paths, number, push, ends[before], ends[push])
        for before, push in pairwise(pushes)
        if push - before == stride and before in ends and push in ends
    ]


def _step(paths: CriticalPaths, number: int, push: int, began: float, ended: float) -> _Step:
    worker, who = paths.workers[number], Who("worker", number)
    own: dict[tuple[str, Who], float] = defaultdict(float)
    parts: list[WaitPart] = []
    time = began
    for span in [*_without_leases(worker, push), Span("", ended, 0.0)]:
        if span.began > time:
            parts += paths.wait(number, time, min(span.began, ended))
        start, stop = max(time, span.began), min(span.ended, ended)
        if stop > start and span.name == "lease":
            parts += limited(stop - start, paths.lease(number, span))
        elif stop > start:
            own[span.name, who] += stop - start
        time = max(time, stop)
    return _Step(began, ended - began, own, by_cause(parts), _hidden(worker, push))


def _without_leases(worker: WorkerSpans, push: int) -> list[Span]:
    """Return the script's spans and the requests for batches of a step, none within another."""
    leases, spans = worker.leases(push), list[Span]()
    for span in worker.script[push]:
        began = span.began
        for lease in leases:
            if began <= lease.began and lease.ended <= span.ended:
                spans.append(span._replace(began=began, seconds=lease.began - began))
                began = lease.ended
        spans.append(span._replace(began=began, seconds=span.ended - began))
    return sorted([*spans, *leases], key=lambda each: each.began)


def _counted(trace: Trace, steps: Mapping[int, list[_Step]]) -> Mapping[int, list[_Step]]:
    """Return the steps in the time that all processes have recorded; all steps if there is none.

    The processes begin and end to record at different times, up to some seconds apart. Offsets of
    clocks only choose steps here.
    """
    times = {
        (each.role, each.number): (
            min(span.began for span in each.spans) + each.offset_seconds,
            max(span.ended for span in each.spans) + each.offset_seconds,
            each.offset_seconds,
        )
        for each in trace.processes
        if each.spans
    }
    first = min((begin for begin, _, _ in times.values()), default=0.0)
    last = max((end for _, end, _ in times.values()), default=0.0)
    began = max((b for b, _, _ in times.values() if b <= first + MAX_EDGE_SECONDS), default=0.0)
    ended = min((e for _, e, _ in times.values() if e >= last - MAX_EDGE_SECONDS), default=0.0)
    counted: dict[int, list[_Step]] = {}
    for number, found in steps.items():
        offset = times["worker", number][2]
        inside = [
            step
            for step in found
            if step.began + offset >= began and step.began + step.seconds + offset <= ended
        ]
        if inside:
            counted[number] = inside
    return counted or steps


def _hidden(worker: WorkerSpans, push: int) -> dict[str, float]:
    """Return the time of send and receive that lies beside the script's spans of a step."""
    seconds: dict[str, float] = {}
    for name in ("send", "receive"):
        for span in worker.script[push]:
            seconds[name] = seconds.get(name, 0.0) + _union(worker.beside(push, name, span))
    return seconds


def _union(times: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of times."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(times):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _median_step(steps: Sequence[_Step]) -> float:
    """Return the lower median: the duration of one of the steps, also if they have two modes."""
    return sorted(step.seconds for step in steps)[(len(steps) - 1) // 2]


def _middle_half(steps: Sequence[_Step]) -> list[_Step]:
    middle = _median_step(steps)
    ordered = sorted(steps, key=lambda step: abs(step.seconds - middle))
    return ordered[: max(2, (len(steps) + 1) // 2)]


def _mean(values: Sequence[Mapping[K, float]]) -> dict[K, float]:
    """Return the mean of each key; a missing one is 0."""
    sums: dict[K, float] = {}
    for each in values:
        for key, value in each.items():
            sums[key] = sums.get(key, 0.0) + value / len(values)
    return sums


def median(values: Iterable[float]) -> float:
    """Return the median, 0 without values."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2 if ordered else 0.0


def _avoidable(own: Mapping[int, Causes], waited: Causes) -> dict[tuple[str, Who], float]:
    """Return the avoidable seconds per step by phase and who."""
    causes = {cause: seconds for cause, seconds in waited.items() if cause[1] != UNKNOWN}
    for number, phases in own.items():
        for (phase, who), seconds in phases.items():
            if phase == "compute":
                others = [each for n, each in own.items() if n != number]
                usual = median([_compute(n, own[n]) for n in own if n != number])
                seconds = max(0.0, seconds - usual) if others else 0.0
            causes[phase, who] = causes.get((phase, who), 0.0) + seconds / len(own)
    return causes


def _compute(number: int, phases: Causes) -> float:
    return phases.get(("compute", Who("worker", number)), 0.0)


def _bottleneck(causes: Causes, step_seconds: float) -> Bottleneck | None:
    phases: dict[str, dict[Who, float]] = defaultdict(dict)
    for (name, cause), value in causes.items():
        phases[name][cause] = value
    found = [(*_dominant(sums), name) for name, sums in phases.items()]
    seconds, who, phase = max(found, default=(0.0, "", ""))
    if phase in ("log", "standby"):
        who = f"{phase} of {who}"
    gain = seconds / step_seconds if step_seconds else 0.0
    return Bottleneck(phase, who, seconds, gain) if gain >= MIN_GAIN_RATIO else None


def _dominant(sums: Mapping[Who, float]) -> tuple[float, str]:
    """Return who has most of these seconds, and how many; or all of them."""
    total = sum(sums.values())
    who = max(sums, key=lambda each: sums[each])
    if sums[who] > DOMINANT_RATIO * total or len(sums) == 1:
        return sums[who], described(who)
    ends: dict[str, list[float]] = defaultdict(list)
    for each, seconds in sums.items():
        if each.kind == "link":
            ends[f"links of worker {each.worker}"].append(seconds)
        if each.kind in ("link", "shard link"):
            ends[f"links of shard {each.shard}"].append(seconds)
    for name, links in ends.items():
        if len(links) < len(sums) and sum(links) > DOMINANT_RATIO * total:
            return sum(links), name
    return total, f"all {who.kind.removeprefix('shard ')}s"


def described(who: Who) -> str:
    """Return the text for what a part is spent in."""
    match who.kind:
        case "worker":
            return f"worker {who.worker}"
        case "shard":
            return f"shard {who.shard}"
        case "link":
            return f"link of worker {who.worker} and shard {who.shard}"
        case "shard link":
            return f"link of shard {who.shard} and shard 0"
    return who.kind


REMEDIES = {
    "data": "more processes that load data: DataLoader(num_workers=...), or cheaper transforms",
    "gather": "fewer and larger parameters, or `--overlap on`, which gathers during backward",
    "scatter": "fewer and larger parameters",
    "send": "more shards, or more CPU for the servers",
    "apply": "more shards, or more CPU for the servers: `--threads`",
    "link": "a faster network, `--overlap on`, or under ssp and async `pipeline=True`",
    "check": "more CPU for the servers: `--threads`",
    "log": "a faster disk, `--log-fsync everysec` or `no`, or a standby instead of the log",
    "standby": "a faster disk or network for the standby",
    "lease": "more CPU for shard 0, which hands out the batches; or larger batches",
    "decide": "more CPU for shard 0; nothing else on its machine",
}


def remedy(bottleneck: Bottleneck) -> str:
    """Return what to do about it."""
    if bottleneck.phase != "compute":
        return REMEDIES[bottleneck.phase]
    if bottleneck.who == "all workers":
        return "steps of different length: `--backup-workers`, or policy ssp or async"
    number = bottleneck.who.removeprefix("worker ")
    return (
        f"another machine for this worker, `ps-ctl drain {number}`, policy ssp or async, "
        "or `--backup-workers`"
    )


def _notes(trace: Trace, paths: CriticalPaths) -> Iterable[str]:
    yield from dropped_notes(trace)
    reached = {shard for each in paths.workers.values() for _, shard in each.sent}
    for shard in sorted(reached - paths.shards.keys()):
        yield f"shard {shard} sent no spans: its release is older, or it has just started"
    known = {push[0] for each in paths.shards.values() for push in each.apply}
    for number in sorted(known - paths.workers.keys()):
        yield f"worker {number} sent no spans: its release is older, or it has ended"
