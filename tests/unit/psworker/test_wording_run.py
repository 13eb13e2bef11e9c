"""The texts of ps-run: WHAT failed: WHY. Try: HOW; and its messages about a run.

Other tests assert exit codes, reasons and transcripts. A changed text changes this file.
"""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from pscommon.core.errors import PSError
from psworker.launch import script as script_module
from psworker.launch.events import (
    Action,
    Event,
    ProcessExited,
    ResultCollected,
    ServerBound,
    ShowMessage,
    SignalReceived,
    StopAnswered,
    Tick,
    WorkerHung,
)
from psworker.launch.log_file import LogFile
from psworker.launch.outcome import RunOutcome, describe
from psworker.launch.plan import RunPlan
from psworker.launch.script import Script
from psworker.launch.supervisor import BIND_SECONDS, COLLECT_SECONDS, STOP_SECONDS, Supervisor
from psworker.run import cli, job_poller
from psworker.run import summary as report
from psworker.run.job_poller import JobResult
from psworker.run.launcher import Launcher, RunEnd
from psworker.session.resume_notice import nothing_left
from tests.support.wording import check_form

SETTINGS: dict[str, Any] = {
    "policy": "sync",
    "staleness": None,
    "servers": 1,
    "workers": 1,
    "min_workers": 1,
    "metrics_bind": None,
    "optimizers": None,
    "summary": None,
    "history": None,
    "save": None,
}


def check(**changed: Any) -> None:
    """Check the settings of a run of `train.py`, which exists."""
    Path("train.py").touch()
    cli.check(SETTINGS | changed, Script("train.py"))


def check_locally() -> None:
    with patch.dict(os.environ, PS_LOCAL="1"):
        check()


def log_folder(name: str) -> object:
    Path("file").touch()
    Path("logs/w0.log").mkdir(parents=True)
    return cli.log_folder(SETTINGS | {"log_dir": Path(name)}, Path())


def empty_package() -> None:
    Path("package").mkdir()
    Path("package/__init__.py").touch()
    importlib.invalidate_caches()
    with patch.dict(sys.modules):
        Script("package", module=True).check()


def empty_folder() -> None:
    Path("folder").mkdir()
    Script("folder").check()


def no_code() -> None:
    with patch.dict(sys.modules), patch.object(sys, "argv", []):
        script_module._execute(Script("sys", module=True))


def supervised(
    *events: Event, after: float, settings: dict[str, Any]
) -> tuple[Supervisor, list[Action]]:
    """Return the supervisor, and its actions for the last event, `after` seconds later."""
    machine = Supervisor(1, 1, **{"max_restarts": 1, "durable": True, "grace": 5.0} | settings)
    machine.start(0.0)
    for event in events[:-1]:
        machine.step(event, 0.0)
    return machine, machine.step(events[-1], after)


def message(*events: Event, after: float = 0.0) -> Callable[[], str]:
    """Return a call that gives the message after these events."""

    def call() -> str:
        _, actions = supervised(*events, after=after, settings={})
        (text,) = [action.text for action in actions if isinstance(action, ShowMessage)]
        return text

    return call


def reason(*events: Event, after: float = 0.0) -> Callable[[], str]:
    """Return a call that gives the reason of a run that fails with these events."""

    def call() -> str:
        machine, _ = supervised(*events, after=after, settings={"max_restarts": 0})
        return machine.outcome.reason

    return call


def shown(show: Callable[[Mock], object]) -> str:
    """Return the message that a function shows."""
    display = Mock()
    show(display)
    return str(display.show_message.call_args.args[0])


def announced(**environ: str) -> str:
    settings = SETTINGS | {"servers": 2, "threads": None}
    plan = RunPlan(Script("x"), settings, frozenset(), 8, Path(), environ=environ)
    return shown(lambda display: cli.announce(display, plan))


def launcher_address(display: Mock) -> None:
    Launcher._show_address(Mock(_is_address_shown=False, _display=display), "127.0.0.1:5")


def log_problem() -> str:
    problems: list[str] = []
    log = LogFile(Path("missing/w0.log"), problems.append)
    log.write(b"x")
    return problems[0]


def written(error: bool = False, **changed: Any) -> str:
    """Return what ps-run writes to stderr at its end."""
    end = RunEnd(RunOutcome("done"), JobResult({}, "f" * 64, **changed), 1.0, 0, None, "")
    settings = SETTINGS | {"summary": Path("missing/summary.json") if error else None}
    out, err = Mock(problem="", isatty=lambda: False), Mock()
    cli.conclude(end, settings, out, err)
    return str(err.write.call_args.args[0]).replace(str(os.getpid()), "PID").rstrip()


def closed_stdout() -> str:
    err = Mock()
    out = Mock(problem="No space left on device", isatty=lambda: False)
    cli.conclude(RunEnd(RunOutcome("done"), JobResult({}), 1.0, 0, None, ""), SETTINGS, out, err)
    return str(err.write.call_args.args[0]).rstrip()


FINISHED = {
    "job": "job",
    "version": 6,
    "resumed": {"version": 6, "steps": 12, "samples": 96},
    "data": [{"ended": True}],
}
ALL_DONE = (ServerBound("s0"), ProcessExited("w0", 0))
FAILURES: dict[str, Callable[[], object]] = {
    # settings
    "min workers": lambda: check(min_workers=2),
    "metrics port": lambda: check(metrics_bind="h:65535"),
    "summary": lambda: check(summary=Path("missing/summary.json")),
    "save": lambda: check(save=Path("missing/model.safetensors")),
    "PS_LOCAL": check_locally,
    "log folder": lambda: log_folder("file/logs"),
    "log file": lambda: log_folder("logs"),
    # the script
    "script": lambda: Script("missing.py").check(),
    "folder": empty_folder,
    "module": lambda: Script("no_such_module", module=True).check(),
    "package": empty_package,
    "code": no_code,
}
MESSAGES: dict[str, Callable[[], str]] = {
    # the course of a run
    "processes": announced,
    "processes with OMP_NUM_THREADS": lambda: announced(OMP_NUM_THREADS="3"),
    "address": lambda: shown(launcher_address),
    "restart": message(ServerBound("s0"), ProcessExited("w0", -9)),
    "failover": message(ServerBound("s0"), ProcessExited("s0", -9, "b:1")),
    "hung worker": message(ServerBound("s0"), WorkerHung("w0")),
    "signal": message(ServerBound("s0"), SignalReceived(15)),
    "job ended": message(ServerBound("s0"), ProcessExited("s0", 0)),
    "no result": message(*ALL_DONE, Tick(), after=COLLECT_SECONDS),
    "no stop": message(*ALL_DONE, ResultCollected(), StopAnswered("s0 does not answer")),
    "log problem": log_problem,
    "leaving": lambda: script_module.LEAVING_MESSAGE.decode().strip(),
    # why a run failed
    "killed": reason(ServerBound("s0"), ProcessExited("w0", -9)),
    "failed": reason(ServerBound("s0"), ProcessExited("w0", 1)),
    "as if killed": lambda: f"w0 {describe(137)}",
    "unknown exit code": lambda: f"w0 {describe(99)}",
    "unknown signal": lambda: f"w0 {describe(-99)}",
    "late server": reason(Tick(), after=BIND_SECONDS),
    "late end": reason(*ALL_DONE, ResultCollected(), Tick(), after=STOP_SECONDS),
    "interrupted": reason(SignalReceived(2)),
    "lost training": lambda: job_poller._describe_lost_training({"version": 3}, 5),
    "idle": lambda: job_poller._why_idle({"model": None}),
    "idle with data": lambda: job_poller._why_idle({"data": [{"ended": False}]}),
    "weights not sent": lambda: job_poller._why_no_weights({"state": "waiting for a model"}),
    # the end of a run
    "summary not written": lambda: written(error=True),
    "no digest": lambda: written(problem="a:1 does not answer"),
    "nothing left": lambda: nothing_left(FINISHED),
    "closed stdout": closed_stdout,
    "not saved": lambda: report.NOT_SAVED,
    "box": lambda: report.box(
        RunOutcome("failed", 20, "w0", 20, "w0 exited with 20", ("s0 was restarted",)),
        Path("w0.log"),
        ["last line"],
        [],
    ).replace("─", ""),
}
TEXTS: dict[str, str] = {
    "min workers": (
        "`--min-workers 2` is more than `--workers 1`: training would never start. Try: a "
        "smaller number"
    ),
    "metrics port": (
        "`--metrics-bind h:65535` is not valid: the last process would use port 65536. Try: a "
        "lower port"
    ),
    "summary": (
        "`--summary missing/summary.json` is not valid: its folder does not exist or is not "
        "writable"
    ),
    "save": (
        "`--save missing/model.safetensors` is not valid: the folder DIR/missing does not exist"
    ),
    "PS_LOCAL": (
        "PS_LOCAL excludes ps-run: each worker would train alone. Try: unset it, or start the "
        "script with python"
    ),
    "log folder": "`--log-dir file/logs` is not valid: Not a directory",
    "log file": (
        "`--log-dir logs` is not valid: w0.log is a folder, but a log file needs this name. "
        "Try: another folder"
    ),
    "script": "cannot run missing.py: there is no such script",
    "folder": "cannot run folder: it has no __main__.py",
    "module": "cannot run no_such_module: there is no such module",
    "package": "cannot run package: the package has no __main__ module",
    "code": "cannot run sys: it contains no Python code",
    "processes": "2 servers, 1 worker on 8 cores; threads: 4 per server, 8 per worker",
    "processes with OMP_NUM_THREADS": "2 servers, 1 worker on 8 cores; threads: OMP_NUM_THREADS",
    "address": "inspect this job with: ps-ctl --ps 127.0.0.1:5 status",
    "restart": "w0 was killed by SIGKILL; restart 1 of at most 1",
    "failover": "s0 was killed by SIGKILL; its standby at b:1 has taken over",
    "hung worker": "w0 is killed: its script hangs (--progress-timeout)",
    "signal": ("interrupted by SIGTERM; ending 2 processes (a second signal kills them)"),
    "job ended": "s0 is done; waiting for the workers to finish",
    "no result": "the servers did not return the result in time; continuing without it",
    "no stop": ("the servers could not be asked to stop (s0 does not answer); ending them"),
    "log problem": (
        "missing/w0.log cannot be written: No such file or directory; the process continues "
        "without its log"
    ),
    "leaving": ("ps-worker: leaving after this step; Ctrl-C again ends the script at once"),
    "killed": "w0 was killed by SIGKILL",
    "failed": "w0 exited with 1: a bug in this system or in the training script",
    "as if killed": "w0 exited with 137: as if killed by SIGKILL",
    "unknown exit code": "w0 exited with 99",
    "unknown signal": "w0 was killed by signal 99",
    "late server": "s0 did not open its port within 120 s",
    "late end": "s0 did not stop within 120 s",
    "interrupted": "interrupted by SIGINT",
    "lost training": (
        "the servers rolled back to version 3 after the workers were done: later updates are lost"
    ),
    "idle": (
        "nothing was trained: no worker has registered a model. Try: call psworker.connect() "
        "and job.optimizer(...) in the script"
    ),
    "idle with data": (
        "nothing was trained: no step was counted, and data is left. Try: call step() of the "
        "optimizer that job.optimizer(...) returned"
    ),
    "weights not sent": "the worker that registered the model has not sent its weights",
    "summary not written": (
        "[run] --summary missing/summary.json could not be written: [Errno 2] No such file or "
        "directory: 'DIR/missing/.summary.json.PID'"
    ),
    "no digest": "[run] the weights cannot be read: a:1 does not answer",
    "nothing left": (
        "nothing is left to train: job job was finished before, at version 6 (12 steps, 96 "
        "samples). Try: more epochs in the script; to start over: `--resume never` or another "
        "`--data-dir`"
    ),
    "closed stdout": "[run] stdout could not be written: No space left on device",
    "not saved": "NO: the final weights were not saved; see the lines of s0",
    "box": (
        "╭ first failure: w0 \n│ w0 exited with 20\n│ earlier: s0 was restarted\n│ remedy: start "
        "the servers or correct --ps; then run again\n│ log: w0.log\n│\n│ last line\n╰"
    ),
}


def text_of(name: str) -> str:
    if name in MESSAGES:
        return MESSAGES[name]()
    with pytest.raises(PSError) as caught:
        FAILURES[name]()
    return str(caught.value)


@pytest.mark.parametrize("name", [*FAILURES, *MESSAGES])
def test_text(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("PS_LOCAL", raising=False)

    assert text_of(name).replace(str(tmp_path), "DIR") == TEXTS[name]


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_has_at_most_one_remedy_and_is_short(name: str) -> None:
    check_form(TEXTS[name])
