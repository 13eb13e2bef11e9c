"""`ps-ctl trace` and `ps-ctl why`: record the spans of a job, write them, explain a step."""

import json
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import click

from pscommon.core.errors import InvalidRequestError, PSError, UnreachableError
from pscommon.settings.values import FILE, SECONDS
from pscommon.system.imports import installed
from pscommon.system.small_files import replace_file, why_no_file
from pscommon.tracing.batch import decode_spans
from pscommon.tracing.spans import ProcessSpans, Span
from psproto.v1 import coordinator_pb2 as pb
from psworker.core.trace_events import Trace, document, dropped_notes, from_document, merged
from psworker.core.why import Explanation, explain, remedy
from psworker.ctl.context import CommandContext, pass_settings, shared
from psworker.ctl.output import Table, duration, show
from psworker.session.arguments import is_on

INTERVAL_SECONDS = 1.0
"""Between two requests. The processes send their spans once a second."""

LATE_SECONDS = 2.0
"""How long batches are fetched after the recording: a process sends its spans once a second, and
shard 0 is asked once a second.
"""


class SpanSource(Protocol):
    """Where spans come from: CoordinatorClient."""

    def spans(self, after: int | None) -> pb.GetTraceResponse: ...

    def status(self) -> dict[str, Any]: ...


class Recording:
    """Spans that have been fetched from a job."""

    def __init__(
        self,
        servers: SpanSource,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._servers, self._clock, self._sleep = servers, clock, sleep
        self._batches: list[ProcessSpans] = []
        self._next: int | None = None
        self._lost = 0
        self.problem = ""

    def run(self, seconds: float, progress: Callable[[str], None]) -> Trace:
        """Record for some seconds; less if the job ends.

        Args:
            progress: Shows a line, in the place of the last one.

        Raises:
            UnreachableError: The job has made no step, or has ended before its first spans.
            FormatError: The servers' release records no spans.
        """
        self._fetch()
        began = self._clock()
        ends = began + seconds + LATE_SECONDS
        while (left := ends - self._clock()) > 0 and not self.problem:
            self._sleep(min(INTERVAL_SECONDS, left))
            try:
                self._fetch()
            except UnreachableError as error:
                self.problem = str(error)
            passed = min(seconds, self._clock() - began)
            count = sum(len(batch.spans) for batch in self._batches)
            progress(f"recorded {passed:.0f} of {duration(seconds)}: {count} spans")
        if not any(map(_is_of_step, chain.from_iterable(each.spans for each in self._batches))):
            raise UnreachableError(self._why_empty(seconds), "NOT_READY")
        recorded = min(seconds, self._clock() - began)
        return Trace(merged(self._batches), recorded, installed("paramserver"), self._lost)

    def _fetch(self) -> None:
        """Fetch all batches since the last request."""
        has_more = True
        while has_more:
            answer = self._servers.spans(self._next)
            for part in answer.parts:
                self._batches.append(decode_spans(part.role, part.number, part.spans))
            self._next, self._lost = answer.next, self._lost + answer.lost
            has_more = answer.more

    def _why_empty(self, seconds: float) -> str:
        if self.problem:
            return f"the job ended before its first spans: {self.problem}. Try: while it trains"
        state = self._servers.status()
        waits = f" for {state['waiting_for']}" if state.get("waiting_for") else ""
        return (
            f"the job made no step in {duration(seconds)}: it is {state.get('state')}{waits}. "
            "Try: once it trains, or longer: `--seconds`"
        )


def _is_of_step(span: Span) -> bool:
    """Return whether a span belongs to a step; a worker that waits for its first batch has none."""
    return span.name != "lease" and any(push for _, push in span.pushes)


def record(settings: CommandContext, seconds: float) -> Trace:
    """Record the spans of a job, with its progress on a terminal's stderr."""
    if not settings.ps and is_on("PS_LOCAL"):
        raise InvalidRequestError(
            "a script under PS_LOCAL has no servers, which collect the spans. Try: start it with "
            "ps-run"
        )
    is_terminal = sys.stderr.isatty()

    def progress(line: str) -> None:
        if is_terminal:
            click.echo(f"\r{line}\033[K", nl=False, err=True)

    try:
        with settings.servers() as servers:
            recording = Recording(servers)
            trace = recording.run(seconds, progress)
    finally:
        if is_terminal:
            click.echo(err=True)
    if recording.problem:
        lasted = duration(round(trace.seconds, 1))
        click.echo(f"ps-ctl: the job ended after {lasted}: {recording.problem}", err=True)
    return trace


def _seconds(default: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        "--seconds", type=SECONDS, default=default, show_default=True, help="Time to record."
    )


@click.command(
    epilog="""\b
Examples:
  ps-ctl trace
  ps-ctl --ps host0:50051 trace --seconds 10 -o trace.json"""
)
@_seconds("10")
@click.option(
    "-o",
    "--file",
    type=FILE,
    default="trace.json",
    show_default=True,
    help="File to write, which is replaced.",
)
@shared
@pass_settings
def trace(settings: CommandContext, seconds: float, file: Path) -> None:
    """Record where all processes of a job spend their time.

    The file is in the Trace Event Format: open it on https://ui.perfetto.dev or in
    chrome://tracing. `ps-ctl why FILE` explains it.
    """
    if problem := why_no_file(file):
        raise InvalidRequestError(f"cannot write {file}: {problem}. Try: another `--file`")
    found = record(settings, seconds)
    try:
        replace_file(file, json.dumps(document(found), separators=(",", ":"), allow_nan=False))
    except OSError as error:
        problem = f"cannot write {file}: {error.strerror or error}. Try: another `--file`"
        raise InvalidRequestError(problem) from error
    uncertain = [each.uncertainty_seconds for each in found.processes]
    known = [each for each in uncertain if each is not None]
    summary = {
        "file": str(file),
        "seconds": found.seconds,
        "processes": len(found.processes),
        "spans": sum(len(each.spans) for each in found.processes),
        "clock_uncertainty_seconds": max(known, default=None) if None not in uncertain else None,
        "notes": dropped_notes(found),
    }
    show(settings.output, summary, lambda: [Table("", (), _summary_rows(summary))])


def _summary_rows(summary: dict[str, Any]) -> list[tuple[str, object]]:
    uncertainty = summary["clock_uncertainty_seconds"]
    clocks = "unknown" if uncertainty is None else f"{milliseconds(uncertainty)} at most"
    return [
        *((name, summary[name]) for name in ("file", "processes", "spans")),
        ("recorded", duration(round(summary["seconds"], 1))),
        ("clocks apart", clocks),
        *(("note", note) for note in summary["notes"]),
    ]


@click.command(
    epilog="""\b
Examples:
  ps-ctl why
  ps-ctl --ps host0:50051 why --seconds 20
  ps-ctl why trace.json"""
)
@click.argument("file", required=False, type=FILE)
@_seconds("5")
@shared
@pass_settings
def why(settings: CommandContext, file: Path | None, seconds: float) -> None:
    """Explain where a step of the job spends its time.

    Without FILE, the job is recorded first. FILE is one of `ps-ctl trace`.
    """
    found = explain(record(settings, seconds) if file is None else _read(file))
    show(settings.output, found.document(), lambda: tables(found))


def _read(file: Path) -> Trace:
    try:
        return from_document(json.loads(file.read_bytes()))
    except OSError as error:
        problem = error.strerror or str(error)
    except ValueError:
        problem = "it is no JSON"
    except RecursionError:
        problem = "it is nested too deeply"
    except PSError as error:
        problem = str(error)
    raise InvalidRequestError(f"cannot read {file}: {problem}. Try: a file of `ps-ctl trace`")


def tables(found: Explanation) -> list[Table]:
    """Return the text of an explanation."""
    step = found.step_seconds
    rows = [
        (name, _time(phase.own), _time(phase.waited), _share((phase.own + phase.waited) / step))
        for name, phase in found.phases.items()
        if phase.own + phase.waited >= step / 1000
    ]
    hidden = [(name, _time(value)) for name, value in found.hidden.items() if value >= step / 1000]
    counted = f"median of {found.steps} steps of {found.workers} workers"
    answer: list[tuple[str, object]] = [("note", note) for note in found.notes]
    answer.append(("step", f"{milliseconds(step)}, {counted}"))
    if found.bottleneck is None:
        answer.append(("bottleneck", "no single cause"))
    else:
        phase, who, seconds, gain = found.bottleneck
        answer += [
            ("bottleneck", f"{phase}: {who}"),
            ("avoidable", f"{milliseconds(seconds)} of a step, {_share(gain)}"),
            ("remedy", remedy(found.bottleneck)),
        ]
    return [
        Table("Exposed time of a step", ("phase", "script", "wait", "share"), rows),
        Table("Hidden beside the script", ("phase", "time"), hidden),
        Table("", (), answer),
    ]


def milliseconds(seconds: float) -> str:
    """Format a short time: "48.2 ms"."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else duration(seconds)


def _time(seconds: float) -> str:
    return milliseconds(seconds) if seconds >= 1e-6 else ""


def _share(ratio: float) -> str:
    return f"{ratio:.0%}"
