"""The results for people: one Markdown page with the bars first, then every contender of every
work.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.bars import Verdict, judge
from benchmarks.plots import PLOTS
from benchmarks.record import Result
from benchmarks.sample import Sample
from benchmarks.works import WORKS

HEAD = """# Benchmarks

Written by `make bench`. Contenders of a work are all warm and take turns, so other load of the
machine affects all of them alike. Figures are medians over the rounds (minimum to maximum). CPU is
user and system time of all processes of a contender, servers included. A ratio is that of two
medians; in brackets the quartiles of the ratios of single rounds.
"""

COLUMNS = {
    "seconds": ("ms", 1e3),
    "p99": ("p99, ms", 1e3),
    "cpu": ("CPU, ms", 1e3),
    "loopback": ("over loopback, MB", 1e-6),
    "server_cpu": ("server CPU a push, ms", 1e3),
    "server_memory": ("server's peak, MB", 1e-6),
    "server_shared": ("shared with workers, MB", 1e-6),
    "decision": ("CPU per decided push, us", 1e6),
    "pushes_per_second": ("pushes/s meanwhile", 1.0),
}
"""Metrics that a table shows: heading and factor. Phases have a plot of their own."""

SHOWN = {
    "push_pull": ("seconds", "cpu", "loopback"),
    "two_workers": ("seconds", "cpu", "loopback"),
    "smallest": ("seconds", "cpu"),
    "many_tensors": ("seconds", "cpu"),
    "tail": ("seconds", "p99", "pushes_per_second"),
    "growth": ("server_cpu", "seconds"),
    "decisions": ("decision",),
    "memory": ("server_memory", "server_shared", "seconds"),
    "memory_crowd": ("server_memory", "seconds"),
}
"""Columns by work; other works show "seconds" and "cpu"."""


def write(results: Mapping[str, Result], folder: Path) -> Path:
    """The page and its plots into `folder`; returns the page."""
    pictures = [plot(results, folder) for plot in PLOTS]
    page = folder / "README.md"
    page.write_text(text(results, [picture for picture in pictures if picture]))
    return page


def text(results: Mapping[str, Result], pictures: Sequence[str]) -> str:
    parts = [HEAD, "## Bars", bars_table(judge(results))]
    parts += [f"![{Path(picture).stem}]({picture})" for picture in pictures]
    parts += [section(results[work.name]) for work in WORKS if work.name in results]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def bars_table(verdicts: Iterable[Verdict]) -> str:
    word = {True: "yes", False: "**no**", None: "–"}
    rows = [
        (str(v.bar.number), v.bar.ours, v.bar.peer, f"{v.bar.limit:g}", measured(v), word[v.met])
        for v in verdicts
    ]
    return table(("#", "ours", "peer", "at most", "measured", "met"), rows)


def measured(verdict: Verdict) -> str:
    found = verdict.found
    return f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})" if found else verdict.reason


def section(result: Result) -> str:
    """One work: what was done, on what, and a row for each contender, the fastest wherever it
    stands.
    """
    metrics = SHOWN.get(result.work, ("seconds", "cpu"))
    rows = [
        (name, *(cell(result.find(name, metric), COLUMNS[metric][1]) for metric in metrics))
        for name in result.records
    ]
    rows += [
        (name, f"not measured: {reason}", *[""] * (len(metrics) - 1))
        for name, reason in result.skipped.items()
    ]
    body = table(("contender", *(COLUMNS[metric][0] for metric in metrics)), rows)
    return f"## {result.work.replace('_', ' ')}\n\n{result.about}\n\n{body}\n\n{origin(result)}"


def origin(result: Result) -> str:
    """When, and on what."""
    where = ", ".join(
        f"{key} {value}" for key, value in {**result.machine, **result.versions}.items()
    )
    return f"{result.rounds} rounds, {result.when}; {where}."


def cell(found: Sample | None, factor: float) -> str:
    if found is None:
        return "–"
    middle, low, high = (
        number(value * factor) for value in (found.median, found.least, found.greatest)
    )
    return f"{middle} ({low} to {high})"


def number(value: float) -> str:
    """Three digits, and no exponent."""
    return (
        f"{value:.0f}"
        if abs(value) >= 100
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.2f}"
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
