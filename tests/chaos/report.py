"""Tables of the soak test: faults and recoveries by kind, goodput, growth, broken rules."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

from tests.chaos.checker import duplicates
from tests.chaos.soak import Outcome

MIB = 1 << 20


def table(outcome: Outcome, undisturbed: float) -> str:
    """Return the table of a run. undisturbed: updates per second of the job without faults."""
    return "\n".join(
        [
            *_head(outcome, undisturbed),
            *_recoveries(outcome),
            *_growth(outcome),
            *_findings(outcome),
        ]
    )


def goodput(outcome: Outcome, undisturbed: float) -> float:
    """Return the rate of remaining updates relative to a run without faults."""
    return outcome.updates_per_second / undisturbed if undisturbed else 0.0


def _head(outcome: Outcome, undisturbed: float) -> Iterator[str]:
    pushes = outcome.evidence.applied
    yield (
        f"{outcome.soak_job.name}: {len(outcome.ended_faults)} faults in "
        f"{outcome.ended - outcome.began:.0f} s; {outcome.updates_per_second:.1f} "
        f"updates/s of {undisturbed:.1f} undisturbed, goodput "
        f"{goodput(outcome, undisturbed):.0%}"
    )
    yield (
        f"  {len(pushes)} pushes acknowledged, {len(outcome.evidence.in_doubt())} in doubt, "
        f"{len(outcome.evidence.rollbacks)} rollbacks, {duplicates(outcome.evidence)} batches "
        f"computed twice"
    )


def _recoveries(outcome: Outcome) -> Iterator[str]:
    """Yield seconds from a kill to readiness and from the end of a fault to the next counted
    push.
    """
    by_kind = defaultdict(list)
    for ended_fault in outcome.ended_faults:
        by_kind[ended_fault.kind].append(ended_fault)
    yield f"  {'fault':14} {'times':>5}   {'ready again (s)':>20}   {'pushing again (s)':>20}"
    for kind, ended_faults in sorted(by_kind.items()):
        ready = [ended_fault.ready for ended_fault in ended_faults if ended_fault.ready]
        seconds_to_push = [
            seconds
            for ended_fault in ended_faults
            if (seconds := outcome.seconds_to_next_push(ended_fault)) is not None
        ]
        times = len(ended_faults)
        yield f"  {kind:14} {times:5}   {_spread(ready):>20}   {_spread(seconds_to_push):>20}"


def _spread(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.2f} (max {max(seconds):.2f})" if seconds else "-"


def _growth(outcome: Outcome) -> Iterator[str]:
    for name, seconds, first, last in outcome.growth:
        yield (
            f"  {name}, {seconds:.0f} s: files {first.files} -> {last.files}, threads "
            f"{first.threads} -> "
            f"{last.threads}, RSS {first.rss / MIB:.0f} -> {last.rss / MIB:.0f} MiB"
        )


def _findings(outcome: Outcome) -> Iterator[str]:
    by_rule = defaultdict(list)
    for finding in outcome.findings:
        by_rule[finding.rule].append(finding.text)
    for rule, texts in by_rule.items():
        yield f"  FAILED {rule}: {len(texts)} times"
        yield from (f"    {text}" for text in texts[:5])
