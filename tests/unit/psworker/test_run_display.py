"""The display of ps-run, on a terminal and elsewhere, and the thread that polls the servers."""

import io
import queue
from pathlib import Path
from typing import Any, TextIO, cast

import pytest
from rich.console import Console

from pscommon.core.errors import UnreachableError
from pscommon.core.metric_row import MetricRow
from psworker.ctl.pass_text import pass_text
from psworker.run.display import (
    LINE_SECONDS,
    LiveDisplay,
    LogStream,
    PlainDisplay,
    open_display,
    panel,
    progress,
)
from psworker.run.job_poller import JobPoller, JobResult, Status
from psworker.run.output import Output

LIMIT = 30.0
STATUS: dict[str, Any] = {
    "state": "running",
    "version": 120,
    "samples": 7680,
    "waiting_for": "",
    "metrics": {"accuracy": 0.5, "loss": 0.4123},
    "workers": [
        {
            "rank": 0,
            "state": "active",
            "phase": "compute",
            "steps": 60,
            "step_seconds": 0.05,
            "samples_per_second": 640,
        },
        {
            "rank": 1,
            "state": "lost",
            "phase": "push",
            "steps": 9,
            "step_seconds": 0.05,
            "samples_per_second": 999,
        },
    ],
}


class FileOutput(Output):
    """Output that writes to a file. text() returns the written text."""

    def __init__(self, path: Path, terminal: bool = False) -> None:
        self._path = path
        self._terminal = terminal
        self._file = path.open("w", encoding="utf-8")
        super().__init__(self._file)

    def isatty(self) -> bool:
        return self._terminal

    def text(self) -> str:
        self.finish()
        return self._path.read_text(encoding="utf-8")


@pytest.fixture
def out(tmp_path: Path) -> FileOutput:
    return FileOutput(tmp_path / "out")


@pytest.fixture
def err(tmp_path: Path) -> FileOutput:
    return FileOutput(tmp_path / "err")


@pytest.fixture
def terminal(tmp_path: Path) -> FileOutput:
    return FileOutput(tmp_path / "terminal", terminal=True)


def test_progress_in_one_line() -> None:
    assert (
        progress(STATUS)
        == "running: version 120, loss 0.4123, 640 samples/s, accuracy 0.5, 7680 samples, workers 1"
    )
    assert progress({**STATUS, "waiting_for": "worker 3"}).endswith("waiting for worker 3")
    assert "loss not finite, 640 samples/s, accuracy 0.5" in progress(
        {**STATUS, "metrics": {"accuracy": 0.5, "loss": None}}
    )
    assert r"'a\nb' 0.5" in progress({**STATUS, "metrics": {"a\nb": 0.5}})
    assert progress({}) == ""


def test_the_current_pass_is_near_the_start_of_the_line() -> None:
    status = {
        **STATUS,
        "progress": {"pass": 2, "passes": 5, "percent": 43.2, "remaining_seconds": 12.4},
    }

    assert progress(status).startswith(
        "running: version 120, pass 2 of 5: 43 %, 12 s left, loss 0.4123, 640 samples/s"
    )


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((1, None, 0.0, None), "pass 1: 0 %"),
        ((1, 3, 99.6, 0.34), "pass 1 of 3: 100 %, 0.3 s left"),
        ((3, 3, 100.0, 0.0), "pass 3 of 3: 100 %"),
        ((2, None, 50.0, 7205.0), "pass 2: 50 %, 2 h 0 m left"),
        ((None, None, None, None), ""),
    ],
)
def test_a_pass_is_shown_with_percentage_and_remaining_time(
    values: tuple[Any, ...], text: str
) -> None:
    keys = ("pass", "passes", "percent", "remaining_seconds")

    assert pass_text(dict(zip(keys, values, strict=True))) == text


def test_a_status_without_progress_shows_none() -> None:
    assert pass_text(None) == pass_text({}) == ""


def test_lines_are_prefixed_with_their_process_on_their_stream(
    out: FileOutput, err: FileOutput
) -> None:
    with open_display(out, err) as display:
        display.line("w0", "stdout", "result")
        display.line("s0", "stderr", "event")
        display.show_message("hello")

    assert out.text() == "[w0] result\n"
    assert err.text() == "[s0] event\n[run] hello\n"


def test_log_lines_of_ps_run_are_prefixed(out: FileOutput, err: FileOutput) -> None:
    LogStream(PlainDisplay(out, err)).write("one\ntwo\n")

    assert err.text() == "[run] one\n[run] two\n"


def test_without_a_terminal_progress_is_printed_at_intervals(
    out: FileOutput, err: FileOutput
) -> None:
    display = PlainDisplay(out, err)
    later = 1e9
    looks: list[tuple[Status, float]] = [
        ({}, 0),
        (STATUS, LINE_SECONDS),
        ({**STATUS, "version": 121}, LINE_SECONDS + 0.1),
        (STATUS, 2 * LINE_SECONDS),
        ({**STATUS, "version": 122}, 3 * LINE_SECONDS),
    ]

    for status, after in looks:
        display.tick(status, later + after)
        err.finish()

    assert [line.split(",")[0] for line in err.text().splitlines()] == [
        "[run] running: version 120",
        "[run] running: version 122",
    ]


def test_progress_is_skipped_while_the_reader_is_behind(
    out: FileOutput, err: FileOutput, terminal: FileOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Output, "is_behind", True)

    PlainDisplay(out, err).tick(STATUS, 1e9)
    with LiveDisplay(
        Console(file=cast(TextIO, terminal), force_terminal=True), out, terminal
    ) as display:
        before = terminal.text()
        display.tick(STATUS, 1.0)
        assert terminal.text() == before

    assert err.text() == ""


def test_a_terminal_shows_a_live_panel_below_the_lines(
    out: FileOutput, terminal: FileOutput
) -> None:
    console = Console(file=cast(TextIO, terminal), force_terminal=True, width=200)

    with LiveDisplay(console, out, terminal) as display:
        display.tick(STATUS, 1.0)
        display.line("w0", "stderr", "[not] markup " + "x" * 300)
        display.line("w0", "stdout", "result")

    assert "[not] markup " + "x" * 300 in terminal.text().replace("\x1b[0m", "")
    assert "running: version 120" in terminal.text()
    assert out.text() == "[w0] result\n"


@pytest.mark.parametrize(("kind", "display"), [("xterm", LiveDisplay), ("dumb", PlainDisplay)])
def test_open_display_chooses_by_the_terminal(
    out: FileOutput, terminal: FileOutput, monkeypatch: pytest.MonkeyPatch, kind: str, display: type
) -> None:
    monkeypatch.setenv("TERM", kind)

    assert isinstance(open_display(out, terminal), display)
    assert isinstance(open_display(terminal, out), PlainDisplay)


def test_the_panel_has_a_row_for_each_active_worker() -> None:
    console = Console(file=io.StringIO(), width=120, record=True)

    console.print(panel(STATUS))

    text = console.export_text()
    assert text.splitlines()[0].startswith("running: version 120")
    assert "w0" in text
    assert "640 samples/s" in text
    assert "w1" not in text
    assert "compute" in text


def test_the_panel_before_the_first_answer_shows_starting() -> None:
    console = Console(file=io.StringIO(), width=80, record=True)

    console.print(panel({}))

    assert console.export_text().strip() == "starting"


class Observer:
    """Fake observer with fixed answers; an answer that is an exception is raised."""

    def __init__(self, status: Any = STATUS, sha: Any = "f" * 64, stop: Any = None) -> None:
        self.answers = {"status": status, "sha": sha, "stop": stop}
        self.closed = False

    def _answer(self, name: str) -> Any:
        if isinstance(self.answers[name], Exception):
            raise self.answers[name]
        return self.answers[name]

    def status(self) -> Any:
        return self._answer("status")

    def weights_sha256(self) -> Any:
        return self._answer("sha")

    def stop(self) -> None:
        self._answer("stop")

    def report_exit(self, process: str, reason: str) -> None:
        raise AssertionError("no process has ended")

    def close(self) -> None:
        self.closed = True


def ask(observer: Observer, before: Status | None = None) -> tuple[JobResult, str]:
    """Return the collected result and the problem of the stop. before: an earlier status."""
    results: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
    stops: queue.SimpleQueue[str] = queue.SimpleQueue()
    watch = JobPoller(lambda address: observer, results.put, stops.put)
    watch.status = before or {}
    watch.start("127.0.0.1:1")
    watch.collect()
    watch.stop_job()
    answers = results.get(timeout=LIMIT), stops.get(timeout=LIMIT)
    watch.close()
    assert observer.closed
    return answers


def test_the_poller_returns_the_result_and_stops_the_job() -> None:
    assert ask(Observer()) == (JobResult(STATUS, "f" * 64, ""), "")


def test_the_poller_returns_the_last_received_history() -> None:
    """The servers end before the second request."""
    row = MetricRow(1.0, 2, 1, 0, "loss", 0.5)

    class Reporting(Observer):
        asked = 0

        def history(self) -> list[MetricRow]:
            self.asked += 1
            if self.asked > 1:
                raise UnreachableError("gone")
            return [row]

    result, _ = ask(Reporting())
    assert result.history == [row]


def rolled_back(version: int, ended: bool, state: str = "past") -> dict[str, Any]:
    """Return a status with this version, this state of a worker, and one loop."""
    return {
        "version": version,
        "workers": [{"state": state}, {"state": "past"}],
        "data": [{"ended": ended}],
    }


@pytest.mark.parametrize(
    ("status", "undone"),
    [
        (
            rolled_back(40, ended=False),
            "the servers rolled back to version 40 after the workers were done",
        ),
        (rolled_back(40, ended=True), ""),  # the version at which the training ended
        # a worker that was restarted manually, or left before the end of its data
        (rolled_back(40, ended=False, state="left"), ""),
        ({"version": 40, "workers": []}, ""),
    ],
)
def test_a_rollback_after_the_last_worker_left_is_detected(
    status: dict[str, Any], undone: str
) -> None:
    result, _ = ask(Observer(status=status))

    assert result.undone.startswith(undone)
    assert bool(result.undone) is bool(undone)


@pytest.mark.parametrize(
    "now", [rolled_back(40, ended=True), {"version": 40, "workers": [], "data": []}]
)
def test_a_version_below_an_earlier_one_is_a_rollback(now: dict[str, Any]) -> None:
    observer, results = Observer(status={"version": 50}), list[JobResult]()
    watch = JobPoller(lambda address: observer, results.append, lambda problem: None)
    watch._poll()
    observer.answers["status"] = now

    watch._collect()

    assert "rolled back to version 40" in results[0].undone


def test_the_poller_stops_polling_before_the_servers_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request to servers that have ended would block until its timeout."""
    monkeypatch.setattr("psworker.run.job_poller.POLL_SECONDS", 0.01)
    looks: queue.SimpleQueue[str] = queue.SimpleQueue()

    class Counting(Observer):
        def status(self) -> Any:
            looks.put("look")
            return STATUS

    watch = JobPoller(
        lambda address: Counting(), lambda result: None, lambda problem: looks.put("stopped")
    )
    watch.start("127.0.0.1:1")
    assert [looks.get(timeout=LIMIT) for _ in range(3)] == ["look"] * 3

    watch.stop_polling()
    watch.stop_job()
    while looks.get(timeout=LIMIT) != "stopped":
        pass
    watch.close()

    assert looks.empty()


def idle(first: Status, *later: Status) -> str:
    """Return the reason why a run with these successive statuses is idle."""
    observer, results = Observer(status=first), list[JobResult]()
    watch = JobPoller(lambda address: observer, results.append, lambda problem: None)
    for status in (first, *later):
        observer.answers["status"] = status
        watch._poll()
    watch._collect()
    return results[0].idle


MODEL = {"tensors": 2}
LEFT, ENDED = [{"ended": True}, {"ended": False}], [{"ended": True}]


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({"steps": 0, "model": None, "data": []}, "no worker has registered a model"),
        ({"steps": 0, "model": MODEL, "data": LEFT}, "no step was counted, and data is left"),
        # the steps are those of an earlier run
        ({"steps": 9, "model": MODEL, "data": LEFT}, "no step was counted, and data is left"),
        ({"steps": 9, "model": MODEL, "data": ENDED}, ""),
        ({"steps": 0, "model": MODEL, "data": []}, ""),
    ],
)
def test_a_run_without_a_counted_step_is_idle(status: dict[str, Any], why: str) -> None:
    assert why in idle(status)
    assert bool(why) is bool(idle(status))
    assert idle(status, status | {"steps": 10}, status) == ""


def test_a_run_is_not_idle_if_its_servers_do_not_answer_at_the_end() -> None:
    observer, results = Observer(status={"steps": 0, "model": None, "data": []}), list[JobResult]()
    watch = JobPoller(lambda address: observer, results.append, lambda problem: None)
    watch._poll()
    observer.answers["status"] = UnreachableError("gone")

    watch._collect()

    assert results[0].idle == ""


def test_the_reason_for_missing_weights_is_reported() -> None:
    result, _ = ask(Observer(sha=UnreachableError("no model")))

    assert result == JobResult(STATUS, None, "no model")


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({"state": "waiting for servers", "model": None}, "no worker has registered a model"),
        ({"state": "waiting for a model", "model": {"tensors": 2}}, "has not sent its weights"),
    ],
)
def test_weights_are_not_requested_before_the_upload(status: dict[str, Any], why: str) -> None:
    result, _ = ask(Observer(status=status))

    assert result.sha256 is None
    assert why in result.problem


def test_an_outdated_status_does_not_prevent_the_request_for_weights() -> None:
    """A worker may have registered the model since."""
    result, _ = ask(Observer(status=UnreachableError("busy")), before={"model": None})

    assert result.sha256 == "f" * 64


def test_the_poller_tolerates_servers_that_do_not_answer() -> None:
    result, problem = ask(
        Observer(status=UnreachableError("starting"), stop=UnreachableError("refused"))
    )

    assert result == JobResult({}, "f" * 64, "")
    assert problem == "refused"
