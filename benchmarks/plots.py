"""The pictures: time by transport and size, cost by workers, time by phase of a step."""

from collections.abc import Callable, Mapping
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.record import Result
from benchmarks.scale import FULL
from benchmarks.works import decisions, phases
from benchmarks.works.entrants import GLOO, RPC_TCP, STREAM, TCP, ours, team, with_workers
from benchmarks.works.sizes import HUGE, LARGE, SMALL
from psworker.session.step_stats import PHASES

mpl.use("Agg")  # a picture in a file; no display is needed

LANES = ("grpc", "stream", "shm")

Plot = Callable[[Mapping[str, Result], Path], str]


def times(results: Mapping[str, Result], folder: Path) -> str:
    """Time of a push and pull against the size of the model. Empty where it was not measured."""
    found = [results[work.name] for work in (SMALL, LARGE, HUGE) if work.name in results]
    if not found:
        return ""
    _, axes = plt.subplots(figsize=(7, 5), constrained_layout=True)
    for name in (*map(ours, LANES), STREAM, TCP, GLOO, RPC_TCP):
        points = [point for result in found for point in _points(result, name)]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="model, MB",
        ylabel="ms, there and back",
        title="push and pull by transport and size",
    )
    return _saved(axes, folder / "sizes.png")


def _points(result: Result, name: str) -> list[tuple[float, float]]:
    """(MB, ms): the median time."""
    found = []
    for contender in result.records:
        base, _, size = contender.rpartition(", ")
        if base == name and (seconds := result.find(contender, "seconds")):
            found.append((float(size.removesuffix(" MB")), seconds.median * 1e3))
    return found


def decided(results: Mapping[str, Result], folder: Path) -> str:
    """The coordinator's CPU for a decided push against the number of workers."""
    result = results.get("decisions")
    if result is None:
        return ""
    counts = [workers for workers, shards in decisions.SIZES if shards == 1]
    _, axes = plt.subplots(figsize=(7, 4), constrained_layout=True)
    for policy in decisions.POLICIES:
        names = [decisions.name(policy, count, 1) for count in counts]
        costs = [result.find(name, "decision") for name in names]
        known = [cost.median * 1e6 for cost in costs if cost]
        if len(known) == len(counts):
            label = names[0].partition(f", {counts[0]} ")[0]
            axes.plot(counts, known, marker="o", label=label)
    axes.set(
        xscale="log",
        xlabel="workers",
        ylabel="coordinator CPU, µs a push",
        title="one server, no network",
        ylim=(0, None),
    )
    return _saved(axes, folder / "decisions.png")


def workers(results: Mapping[str, Result], folder: Path) -> str:
    """The server's CPU a push against the number of workers, least to most as bars."""
    result = results.get("growth")
    if result is None:
        return ""
    _, axes = plt.subplots(figsize=(7, 4), constrained_layout=True)
    for name in (*map(ours, LANES), STREAM):
        counts = [count for count in FULL.growth if with_workers(name, count) in result.records]
        costs = [result.find(with_workers(name, count), "server_cpu") for count in counts]
        known = [cost for cost in costs if cost]
        if known:
            middle = [cost.median * 1e3 for cost in known]
            below = [(cost.median - cost.least) * 1e3 for cost in known]
            above = [(cost.greatest - cost.median) * 1e3 for cost in known]
            axes.errorbar(counts, middle, yerr=[below, above], marker="o", capsize=3, label=name)
    axes.set(
        xlabel="workers", ylabel="server CPU, ms a push", title="4 MB model, async", ylim=(0, None)
    )
    return _saved(axes, folder / "growth.png")


def step(results: Mapping[str, Result], folder: Path) -> str:
    """Phases of a training step, stacked: medians."""
    result = results.get("phases")
    if result is None:
        return ""
    names = [team(lane, count) for lane in LANES for count in phases.WORKERS]
    names = [name for name in names if name in result.records]
    _, axes = plt.subplots(figsize=(7, 1 + 0.6 * len(names)), constrained_layout=True)
    starts = [0.0] * len(names)
    for phase in PHASES:
        found = [result.find(name, f"phase.{phase}") for name in names]
        widths = [sample.median * 1e3 if sample else 0.0 for sample in found]
        axes.barh(names, widths, left=starts, label=phase)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set(xlabel="ms", title="a training step by phase")
    axes.invert_yaxis()
    return _saved(axes, folder / "phases.png")


def _saved(axes: Axes, path: Path) -> str:
    """Writes the picture; its name."""
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.3)
    assert axes.figure is not None
    axes.figure.savefig(path, dpi=120)  # type: ignore[union-attr]
    plt.close("all")
    return path.name


PLOTS: tuple[Plot, ...] = (times, workers, decided, step)
