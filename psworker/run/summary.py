"""What a run came to, for people and programs: the summary as JSON and as a table, and the box
about a failure.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pscommon.core.exit_codes import EXPLANATIONS, ExitCode
from pscommon.system.small_files import write_whole
from pscommon.telemetry import strict_json
from psworker.launch.outcome import RunOutcome
from psworker.run.history import digest
from psworker.run.job_poller import JobResult

LONGEST_TRACEBACK = 60
NOT_SAVED = "NO: the final weights are not on the disk; the lines of s0 say why"
RED, PLAIN = "\x1b[31m", "\x1b[0m"
BAR = 100


def summary(
    outcome: RunOutcome,
    result: JobResult,
    settings: Mapping[str, Any],
    seconds: float,
    restarts: int,
    not_saved: str | None = None,
) -> dict[str, Any]:
    """What --summary writes. Values that the servers never told are 0 or null, metrics that are
    not finite null. `problem`: why there are no weights. The policy is the last one in force,
    which `ps-ctl policy set` may have chosen. saved: whether --data-dir and --save have the
    final weights; null without either, and where that is not known. not_saved: why they have
    not. steps and samples are the job's; this_run: what this run added to them, and the version
    that it resumed (null for a new job). history: for each reported name how many values there
    are, the first, last, least and greatest one.
    """
    in_force = result.status if "policy" in result.status else settings
    content = {
        "status": outcome.status,
        "seconds": round(seconds, 3),
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
    """As in the summary. not_saved: as shard 0 has said; None: it has said nothing."""
    if not_saved or outcome.code == ExitCode.NOT_SAVED:
        return False
    asked = settings.get("data_dir") is not None or settings.get("save") is not None
    return True if asked and (not_saved is not None or outcome.status == "done") else None


def this_run(result: JobResult) -> dict[str, Any]:
    """What the run itself has done. It is less than nothing where the servers went back to
    before it; then 0.
    """
    before = result.resumed or {}
    added = {
        key: max(0, result.status.get(key, 0) - before.get(key, 0)) for key in ("steps", "samples")
    }
    return {**added, "resumed_version": before.get("version")}


def write_summary(path: Path, content: Mapping[str, Any]) -> None:
    """A file whole or not at all, whatever happens meanwhile; what is none (a pipe, /dev/null)
    is written to.
    """
    write_whole(path, strict_json.dumps(content, indent=2) + "\n")


def table(content: Mapping[str, Any], coloured: bool = False) -> str:
    """The end of a run that went well, for stdout: what the script reported, then what it took.

    coloured: in red that the final weights are not saved.
    """
    rows = {label(name): _metric(content, name) for name in sorted(content["metrics"])}
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
        content["weights_sha256"] or f"unknown: {content.get('problem', 'nobody asked for them')}"
    )
    if content.get("saved") is False:
        rows["saved"] = NOT_SAVED
    width = max(map(len, rows))
    lines = [f"  {name:<{width}}  {value}" for name, value in rows.items()]
    if coloured and "saved" in rows:
        lines[-1] = f"{RED}{lines[-1]}{PLAIN}"
    return "\n".join(lines)


def _metric(content: Mapping[str, Any], name: str) -> str:
    """The last value, and what it was at first and at least where there are several."""
    value, past = content["metrics"][name], content["history"].get(name, {"rows": 0})
    last = "not finite" if value is None else f"{value:.6g}"
    if past["rows"] < 2 or past["least"] is None:
        return last
    return f"{last}  (first {past['first']:.4g}, least {past['least']:.4g}, greatest {past['greatest']:.4g})"


def label(name: str) -> str:
    """A metric's name as it fits into a line: in quotes and escaped if it is empty or breaks
    lines.
    """
    return name if name.strip() and name.isprintable() else repr(name)


def box(
    outcome: RunOutcome, log: Path | None, tail: Sequence[str], traceback: Sequence[str]
) -> str:
    """The failure in a box: which process was the first, how it ended, where its log is and how
    that ends.
    """
    lines = [outcome.reason]
    lines += [f"before that, {sentence}" for sentence in outcome.earlier]
    explained = outcome.culprit_code is not None or not outcome.culprit
    if explained and outcome.code in set(ExitCode) and outcome.code != ExitCode.BUG:
        lines.append(f"what to do: {EXPLANATIONS[ExitCode(outcome.code)][1]}")
    if log is not None:
        lines.append(f"log: {log}")
    lines += ["", *(traceback[-LONGEST_TRACEBACK:] if traceback else tail)]
    title = (
        f"─ first failure: {outcome.culprit} "
        if outcome.culprit
        else f"─ exit code {outcome.code} "
    )
    return "\n".join(
        [f"╭{title:─<{BAR}}", *(f"│ {line}".rstrip() for line in lines), f"╰{'':─<{BAR}}"]
    )
