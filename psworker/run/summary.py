"""Result of a run: the summary (JSON, table), the history (CSV), and the box about a failure."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pscommon.core.exit_codes import EXPLANATIONS, ExitCode
from pscommon.core.metric_row import MetricRow
from pscommon.system.small_files import replace_file
from pscommon.telemetry import strict_json
from psworker.ctl.output import goodput_text
from psworker.run.job_poller import JobResult
from psworker.supervision.decisions import RunOutcome

MAX_TRACEBACK_LINES = 60
NOT_SAVED = "NO: the final weights were not saved; see the lines of s0"
RED, PLAIN = "\x1b[31m", "\x1b[0m"
BOX_COLUMNS = 100
COLUMNS = ("time", "seconds", "version", "worker", "rank", "name", "value")


def summary(
    outcome: RunOutcome,
    result: JobResult,
    settings: Mapping[str, Any],
    seconds: float,
    restarts: int,
    not_saved: str | None = None,
) -> dict[str, Any]:
    """Return the content of --summary.

    Keys whose meaning is not obvious (unknown values are 0 or null):
        training, trainings_finished: the training that the job is in, and those before it.
        steps, samples: totals of the training.
        goodput: share of the computed samples that counted, and of the time that was not lost.
        this_run: steps and samples added by this run, and the resumed version (null for a new
            job).
        policy, staleness: the last ones in force, which `ps-ctl policy set` may have changed.
        problem: why there are no weights.
        saved: whether --data-dir and --save have the final weights; null without either.
        not_saved: why the final weights are not saved.
        metrics: last values; null if not finite.
        history: digest of each reported name.
    """
    in_force = result.status if "policy" in result.status else settings
    content = {
        "status": outcome.status,
        "seconds": round(seconds, 3),
        "training": result.status.get("training", ""),
        "trainings_finished": result.status.get("trainings_finished", []),
        "steps": result.status.get("steps", 0),
        "samples": result.status.get("samples", 0),
        "goodput": result.status.get("goodput"),
        "this_run": this_run(result),
        "policy": in_force["policy"],
        "staleness": in_force.get("staleness"),
        "servers": settings["servers"],
        "workers": settings["workers"],
        "restarts": restarts,
        "weights_sha256": result.sha256,
        "metrics": dict(result.status.get("metrics", {})),
        "history": digest(result.history),
    }
    content["saved"] = saved(outcome, settings, not_saved)
    if not_saved:
        content["not_saved"] = not_saved
    if result.problem:
        content["problem"] = result.problem
    if outcome.status != "done":
        content["error"] = {
            "process": outcome.culprit or None,
            "exit_code": outcome.code,
            "reason": outcome.reason,
        }
    return content


def saved(outcome: RunOutcome, settings: Mapping[str, Any], not_saved: str | None) -> bool | None:
    """Return `saved` of the summary; `not_saved` is shard 0's report, None without one."""
    if not_saved or outcome.code == ExitCode.NOT_SAVED:
        return False
    asked = settings.get("data_dir") is not None or settings.get("save") is not None
    return True if asked and (not_saved is not None or outcome.status == "done") else None


def this_run(result: JobResult) -> dict[str, Any]:
    """Return the steps and samples of this run; 0 if a rollback went back beyond its start."""
    before = result.resumed or {}
    added = {
        key: max(0, result.status.get(key, 0) - before.get(key, 0)) for key in ("steps", "samples")
    }
    return {**added, "resumed_version": before.get("version")}


def write_summary(path: Path, content: Mapping[str, Any]) -> None:
    """Replace the file atomically; write directly to a special file (a pipe, /dev/null)."""
    replace_file(path, strict_json.dumps(content, indent=2) + "\n")


def write_csv(path: Path, rows: Sequence[MetricRow]) -> None:
    """Write one line per value, ordered by time; the file is replaced atomically.

    Columns:
        time: UTC, ISO 8601.
        seconds: time since the first line.
        version: version of the worker's weights.
        worker, rank: the reporting worker.
        name: name of the value.
        value: Python notation of a float; includes nan, inf and -inf.

    Raises:
        OSError: the file cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        moment = (
            datetime.fromtimestamp(row.time, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z")
        )
        since = f"{row.time - rows[0].time:.3f}"
        writer.writerow(
            (moment, since, row.version, row.worker, row.rank, row.name, repr(row.value))
        )
    replace_file(path, text.getvalue())


def digest(rows: Iterable[MetricRow]) -> dict[str, dict[str, Any]]:
    """Return a digest of each name: rows, first, last, least and greatest value.

    A digest covers the lowest rank that reported the name. `least` and `greatest` ignore values
    that are not finite; they are None without a finite value.
    """
    series: dict[str, list[MetricRow]] = {}
    for row in rows:
        rows_of_name = series.setdefault(row.name, [])
        if rows_of_name and row.rank < rows_of_name[0].rank:
            rows_of_name.clear()
        if not rows_of_name or row.rank == rows_of_name[0].rank:
            rows_of_name.append(row)
    return {name: _digest([row.value for row in series[name]]) for name in sorted(series)}


def _digest(values: Sequence[float]) -> dict[str, Any]:
    finite = [value for value in values if math.isfinite(value)]
    least, greatest = (min(finite), max(finite)) if finite else (None, None)
    return {
        "rows": len(values),
        "first": values[0],
        "last": values[-1],
        "least": least,
        "greatest": greatest,
    }


def table(content: Mapping[str, Any], coloured: bool = False) -> str:
    """Return the summary of a successful run as a table, for stdout.

    coloured: show in red that the final weights are not saved.
    """
    rows = {label(name): _metric(content, name) for name in sorted(content["metrics"])}
    if earlier := len(content.get("trainings_finished", ())):
        rows["training"] = f"{content['training']}  (training {earlier + 1} of this job)"
    rows["steps"] = f"{content['steps']}  ({content['samples']} samples)"
    if (run := content["this_run"])["resumed_version"] is not None:
        rows["this run"] = f"{run['steps']}  ({run['samples']} samples)"
    if goodput := goodput_text(content["goodput"]):
        rows["goodput"] = goodput
    rows["seconds"] = f"{content['seconds']:.1f}"
    rows["policy"] = content["policy"] + (
        f" {content['staleness']}" if content["staleness"] is not None else ""
    )
    if content["restarts"]:
        rows["restarts"] = str(content["restarts"])
    rows["weights sha256"] = (
        content["weights_sha256"] or f"unknown: {content.get('problem', 'not requested')}"
    )
    if content.get("saved") is False:
        rows["saved"] = NOT_SAVED
    width = max(map(len, rows))
    lines = [f"  {name:<{width}}  {value}" for name, value in rows.items()]
    if coloured and "saved" in rows:
        lines[-1] = f"{RED}{lines[-1]}{PLAIN}"
    return "\n".join(lines)


def _metric(content: Mapping[str, Any], name: str) -> str:
    """Format the last value; with several values also the first, least and greatest."""
    value, past = content["metrics"][name], content["history"].get(name, {"rows": 0})
    last = "not finite" if value is None else f"{value:.6g}"
    if past["rows"] < 2 or past["least"] is None:
        return last
    first, least, greatest = (f"{past[key]:.4g}" for key in ("first", "least", "greatest"))
    return f"{last}  (first {first}, least {least}, greatest {greatest})"


def label(name: str) -> str:
    """Return the name of a metric for display, quoted if it is empty or not printable."""
    return name if name.strip() and name.isprintable() else repr(name)


def box(
    outcome: RunOutcome, log: Path | None, tail: Sequence[str], traceback: Sequence[str]
) -> str:
    """Return a box about the first failure: process, reason, remedy, log file and its end."""
    lines = [outcome.reason]
    lines += [f"earlier: {sentence}" for sentence in outcome.earlier]
    explained = outcome.culprit_code is not None or not outcome.culprit
    if explained and outcome.code in set(ExitCode) and outcome.code != ExitCode.BUG:
        lines.append(f"remedy: {EXPLANATIONS[ExitCode(outcome.code)][1]}")
    if log is not None:
        lines.append(f"log: {log}")
    lines += ["", *(traceback[-MAX_TRACEBACK_LINES:] if traceback else tail)]
    title = (
        f"─ first failure: {outcome.culprit} "
        if outcome.culprit
        else f"─ exit code {outcome.code} "
    )
    return "\n".join(
        [
            f"╭{title:─<{BOX_COLUMNS}}",
            *(f"│ {line}".rstrip() for line in lines),
            f"╰{'':─<{BOX_COLUMNS}}",
        ]
    )
