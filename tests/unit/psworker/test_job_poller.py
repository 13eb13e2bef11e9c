"""The thread of ps-run that polls the servers: result, history, rollbacks and idle runs."""

import queue
from typing import Any

import pytest

from pscommon.core.errors import UnreachableError
from pscommon.core.metric_row import MetricRow
from psworker.run.job_poller import JobPoller, JobResult, Status

STATUS: dict[str, Any] = {"state": "running", "version": 120, "samples": 7680}

LIMIT = 30.0


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
