"""ps-ctl trace and ps-ctl why: recording, files, output and errors."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pscommon.core.errors import PSError, UnreachableError
from pscommon.tracing.batch import encode_spans
from pscommon.tracing.clock_offset import ClockOffset
from pscommon.tracing.spans import ProcessSpans, Span
from psproto.v1 import coordinator_pb2 as pb
from psworker.core.trace_events import Trace, document, from_document
from psworker.ctl.cli import main
from psworker.ctl.tracing import Recording
from tests.support.ctl_servers import STATUS, Cluster, serving
from tests.support.simulated_trace import Delay, SimulatedJob

Output = pytest.CaptureFixture[str]

SPAN = Span("compute", 7.0, 0.5, ((3, 1),), thread="MainThread")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PS_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with serving(Cluster()) as cluster:
        yield cluster


def part(process: ProcessSpans) -> pb.TracePart:
    known = process.uncertainty_seconds
    offset = None if known is None else ClockOffset(process.offset_seconds, known)
    spans = encode_spans(process.spans, process.dropped_steps, offset)
    return pb.TracePart(role=process.role, number=process.number, spans=spans)


def batch(*spans: Span) -> pb.TracePart:
    return part(ProcessSpans("worker", 3, spans, 1.5, 0.002))


def answers_of(trace: Trace) -> list[pb.GetTraceResponse]:
    """Return what shard 0 answers to requests for this trace: no parts at first."""
    parts = [part(process) for process in trace.processes]
    return [pb.GetTraceResponse(next=4), pb.GetTraceResponse(next=4 + len(parts), parts=parts)]


class ScriptedJob:
    """Shard 0, whose answers and clock a test writes."""

    def __init__(self, *answers: pb.GetTraceResponse | PSError) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[float, int | None]] = []
        self.now = 100.0
        self.lines: list[str] = []
        self.recording = Recording(self, lambda: self.now, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def spans(self, after: int | None) -> pb.GetTraceResponse:
        self.asked.append((self.now - 100, after))
        answer = self.answers.pop(0) if self.answers else pb.GetTraceResponse(next=after or 0)
        if isinstance(answer, PSError):
            raise answer
        return answer

    def status(self) -> dict[str, Any]:
        return STATUS

    def record(self, seconds: float) -> Trace:
        return self.recording.run(seconds, self.lines.append)


def test_shard_0_is_asked_once_a_second_and_once_more_for_late_batches() -> None:
    job = ScriptedJob(
        pb.GetTraceResponse(next=5),
        pb.GetTraceResponse(next=6, parts=[batch(SPAN)]),
        pb.GetTraceResponse(next=7, parts=[batch(SPAN)], more=True),
        pb.GetTraceResponse(next=8, parts=[batch(SPAN)], lost=2),
        pb.GetTraceResponse(next=9, parts=[batch(SPAN)], lost=1),
    )
    trace = job.record(2.5)

    assert job.asked == [(0, None), (1, 5), (2, 6), (2, 7), (3, 8), (4, 9), (4.5, 9)]
    assert trace.processes == [ProcessSpans("worker", 3, [SPAN] * 4, 1.5, 0.002)]
    assert (trace.seconds, trace.lost_batches) == (2.5, 3)
    assert trace.release
    assert job.lines[0] == "recorded 1 of 2.5 s: 1 spans"
    assert job.lines[-1] == "recorded 2 of 2.5 s: 4 spans"
    assert not job.recording.problem


def test_a_job_that_ends_meanwhile_gives_what_was_recorded() -> None:
    job = ScriptedJob(
        pb.GetTraceResponse(next=5),
        pb.GetTraceResponse(next=6, parts=[batch(SPAN)]),
        UnreachableError("shard 0 does not answer", "UNREACHABLE"),
    )
    trace = job.record(30)

    assert (len(trace.processes), trace.seconds) == (1, 2.0)
    assert job.recording.problem == "shard 0 does not answer"
    assert len(job.asked) == 3


def test_a_job_that_ends_before_its_first_spans_is_refused() -> None:
    silence = UnreachableError("shard 0 does not answer", "UNREACHABLE")
    job = ScriptedJob(pb.GetTraceResponse(next=5), silence)

    with pytest.raises(UnreachableError, match="ended before its first spans: shard 0 does not"):
        job.record(30)


@pytest.mark.parametrize("spans", [(), (Span("log", 1.0, 0.1),)])
def test_a_job_without_steps_is_refused_with_its_state(spans: Sequence[Span]) -> None:
    """A journal's records are no steps."""
    job = ScriptedJob(
        pb.GetTraceResponse(next=5), pb.GetTraceResponse(next=6, parts=[batch(*spans)])
    )

    with pytest.raises(UnreachableError, match="no step in 3 s: it is running for worker 2"):
        job.record(3)


def test_times_that_are_not_finite_are_left_out() -> None:
    spans = [SPAN._replace(began=float("nan")), SPAN._replace(seconds=float("inf")), SPAN]
    spans.append(SPAN._replace(seconds=-1.0))
    job = ScriptedJob(pb.GetTraceResponse(next=5), pb.GetTraceResponse(parts=[batch(*spans)]))

    assert job.record(1).processes[0].spans == [SPAN]


# ---- the commands --------------------------------------------------------------------------------

SLOW_LOG = SimulatedJob(delay=Delay("log", 1)).trace()


def run(cluster: Cluster, capsys: Output, code: int, *args: object) -> tuple[str, str]:
    """Run a command and return its output and errors."""
    assert main(["--ps", cluster.address, *map(str, args)]) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_trace_writes_a_file_that_why_explains(
    cluster: Cluster, capsys: Output, tmp_path: Path
) -> None:
    file = tmp_path / "trace.json"
    cluster.traces = answers_of(SLOW_LOG)
    out, err = run(cluster, capsys, 0, "trace", "--seconds", "100ms", "-o", file)

    assert ["file", str(file)] in [line.split() for line in out.splitlines()]
    assert ["clocks", "apart", "0.2", "ms", "at", "most"] in [x.split() for x in out.splitlines()]
    assert not err
    assert cluster.traced[:2] == [None, 4]
    read = from_document(json.loads(file.read_bytes()))
    assert [len(each.spans) for each in read.processes] == [
        len(each.spans) for each in SLOW_LOG.processes
    ]
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]
    found, _ = run(cluster, capsys, 0, "why", file, "--output", "json")
    assert json.loads(found)["bottleneck"]["who"] == "log of shard 1"
    assert cluster.traced[-1] == 4 + len(SLOW_LOG.processes)


def test_why_records_and_explains(cluster: Cluster, capsys: Output) -> None:
    cluster.traces = answers_of(SLOW_LOG)
    out, _ = run(cluster, capsys, 0, "why", "--seconds", "0.1")

    assert [" ".join(line.split()) for line in out.splitlines()][-4:] == [
        "step 99.5 ms, median of 42 steps of 3 workers",
        "bottleneck log: log of shard 1",
        "avoidable 50.8 ms of a step, 51%",
        "remedy a faster disk, `--log-fsync everysec` or `no`, or a standby instead of the log",
    ]


def test_the_json_of_why_has_these_names(cluster: Cluster, capsys: Output) -> None:
    cluster.traces = answers_of(SLOW_LOG)
    out, _ = run(cluster, capsys, 0, "why", "--seconds", "0.1", "--output", "json")
    found = json.loads(out)

    assert list(found) == [
        *("step_seconds", "steps", "workers", "phases", "hidden", "bottleneck", "remedy", "notes")
    ]
    assert set(found["phases"]["log"]) == {"own", "waited"}
    assert set(found["bottleneck"]) == {"phase", "who", "seconds", "gain"}


def test_why_without_a_cause_says_so(cluster: Cluster, capsys: Output, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    calm = SimulatedJob(compute=0.3, strategy="pipelined").trace()
    processes = [each._replace(dropped_steps=3) for each in calm.processes]
    file.write_text(json.dumps(document(calm._replace(processes=processes))))
    out, _ = run(cluster, capsys, 0, "why", file)

    assert "no single cause" in out
    assert "remedy" not in out
    assert "Hidden beside the script" in out
    assert "worker 2 dropped the spans of 3 steps" in out


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("missing/trace.json", "does not exist. Try: another `--file`"),
        ("/dev/full", "it is not a regular file. Try: another `--file`"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_before_recording(
    cluster: Cluster, capsys: Output, tmp_path: Path, path: str, problem: str
) -> None:
    _, err = run(cluster, capsys, 2, "trace", "-o", tmp_path / path)

    assert problem in err
    assert not cluster.traced


def test_a_disk_that_fills_meanwhile_leaves_no_file(
    cluster: Cluster, capsys: Output, tmp_path: Path
) -> None:
    """The path was writable before the recording."""
    folder = tmp_path / "folder"
    folder.mkdir()
    cluster.traces = answers_of(SLOW_LOG)
    cluster.on_trace = lambda: folder.rmdir() if folder.exists() else None
    _, err = run(cluster, capsys, 2, "trace", "--seconds", "0.1", "-o", folder / "trace.json")

    assert "cannot write" in err
    assert "No such file or directory. Try: another `--file`" in err


def test_older_servers_are_refused(capsys: Output, tmp_path: Path) -> None:
    """Their service has no such method."""
    with serving(Cluster(has_traces=False)) as cluster:
        for command in (["trace", "-o", tmp_path / "trace.json"], ["why"]):
            _, err = run(cluster, capsys, 11, *command)

            assert "its release is older. Try: install this release on the servers" in err
    assert not list(tmp_path.iterdir())


def test_a_script_without_servers_has_no_trace(
    capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PS_LOCAL", "1")
    for command in ("trace", "why"):
        assert main([command]) == 2
        assert "a script under PS_LOCAL has no servers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file or directory"),
        ("{", "it is no JSON"),
        ("\xff", "it is no JSON"),
        ("[" * 100_000, "it is nested too deeply"),
        ("{}", "it is not a trace of `ps-ctl trace`"),
        ('{"traceEvents": [{"ph": "B"}]}', "it is not a trace of `ps-ctl trace`"),
        (json.dumps(document(SLOW_LOG)).replace('"dur": 0.', '"dur": NaN, "x": 0.'), "not finite"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(
    cluster: Cluster, capsys: Output, tmp_path: Path, content: str | None, problem: str
) -> None:
    file = tmp_path / "file.json"
    if content is not None:
        file.write_text(content, encoding="latin-1")
    _, err = run(cluster, capsys, 2, "why", file)

    assert f"cannot read {file}: " in err
    assert problem in err
    assert err.rstrip().count("\n") == 0
    assert "Try: a file of `ps-ctl trace`" in err


def test_a_trace_without_a_step_is_refused_by_why(cluster: Cluster, capsys: Output) -> None:
    cluster.traces = [pb.GetTraceResponse(next=1), pb.GetTraceResponse(parts=[batch(SPAN)])]
    _, err = run(cluster, capsys, 2, "why", "--seconds", "0.1")

    assert "the trace has no complete step of a worker. Try: " in err
