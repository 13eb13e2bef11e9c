"""The soak's tables: faults and recoveries by kind, goodput, what grew, what is wrong."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

from tests.chaos.act import Outcome
from tests.chaos.checker import duplicates

MIB = 1 << 20


def table(outcome: Outcome, undisturbed: float) -> str:
    """undisturbed: updates a second of the same job without faults."""
    return "\n".join(
        [
            *_head(outcome, undisturbed),
            *_recoveries(outcome),
            *_growth(outcome),
            *_findings(outcome),
        ]
    )


def goodput(outcome: Outcome, undisturbed: float) -> float:
    """Updates that stayed, beside those of an undisturbed run of the same length."""
    return outcome.updates_per_second / undisturbed if undisturbed else 0.0


def _head(outcome: Outcome, undisturbed: float) -> Iterator[str]:
    pushes = outcome.evidence.applied
    yield (
        f"{outcome.act.name}: {len(outcome.mended)} faults in {outcome.ended - outcome.began:.0f} "
        f"s; {outcome.updates_per_second:.1f} updates/s of {undisturbed:.1f} undisturbed, goodput "
        f"{goodput(outcome, undisturbed):.0%}"
    )
    yield (
        f"  {len(pushes)} pushes acknowledged, {len(outcome.evidence.in_doubt())} in doubt, "
        f"{len(outcome.evidence.rollbacks)} rollbacks, {duplicates(outcome.evidence)} batches "
        f"computed twice"
    )


def _recoveries(outcome: Outcome) -> Iterator[str]:
    """Seconds: a server that was killed until it is ready; from a fault's end until a push
    counts again.
    """
    by_kind = defaultdict(list)
    for mending in outcome.mended:
        by_kind[mending.kind].append(mending)
    yield f"  {'fault':14} {'times':>5}   {'ready again (s)':>20}   {'pushing again (s)':>20}"
    for kind, mended in sorted(by_kind.items()):
        ready = [mending.ready for mending in mended if mending.ready]
        again = [
            seconds for mending in mended if (seconds := outcome.pushing_again(mending)) is not None
        ]
        yield f"  {kind:14} {len(mended):5}   {_spread(ready):>20}   {_spread(again):>20}"


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
