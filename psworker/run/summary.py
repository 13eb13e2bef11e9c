"""Result of a run: the summary as JSON and as a table, and the box about a failure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pscommon.core.exit_codes import EXPLANATIONS, ExitCode
from pscommon.system.small_files import replace_file
from pscommon.telemetry import strict_json
from psworker.launch.outcome import RunOutcome
from psworker.run.history import digest
from psworker.run.job_poller import JobResult

MAX_TRACEBACK_LINES = 60
NOT_SAVED = "NO: the final weights were not saved; see the lines of s0"
RED, PLAIN = "\x1b[31m", "\x1b[0m"
BOX_COLUMNS = 100


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


def table(content: Mapping[str, Any], coloured: bool = False) -> str:
    """Return the table about a successful run, for stdout.

    Args:
        content: the summary.
        coloured: show in red that the final weights are not saved.
    """
    rows = {label(name): _metric(content, name) for name in sorted(content["metrics"])}
    if earlier := len(content.get("trainings_finished", ())):
        rows["training"] = f"{content['training']}  (training {earlier + 1} of this job)"
    rows["steps"] = f"{content['steps']}  ({content['samples']} samples)"
    if (run := content["this_run"])["resumed_version"] is not None:
        rows["this run"] = f"{run['steps']}  ({run['samples']} samples)"
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
