"""ps-run: a whole cluster on this machine in one command."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from pscommon.core.errors import InvalidRequestError
from pscommon.core.exit_codes import ExitCode
from pscommon.entry import raise_on_ctrl_c
from pscommon.settings import options
from pscommon.settings.command import given, run_command
from pscommon.settings.environment import unread
from pscommon.settings.values import check_policy, host_and_port
from pscommon.system.small_files import is_special, why_no_file
from pscommon.system.thread_team import cores
from pscommon.system.user_modules import check_module
from pscommon.telemetry import logs
from psworker.cli import ARGS, MODULE, SCRIPT, UP_TO_THE_SCRIPT, words
from psworker.launch import plan
from psworker.launch.events import SignalReceived
from psworker.launch.script import Script
from psworker.launch.temporary_folder import make_folder
from psworker.run import summary as report
from psworker.run.display import Display, LogStream, open_display
from psworker.run.history import write_csv
from psworker.run.job_poller import Connect, GrpcJobObserver
from psworker.run.launcher import Launcher, RunEnd
from psworker.run.output import Output, outputs
from psworker.session.environment import is_on
from psworker.session.resume_notice import nothing_left

HIGHEST_PORT = 65535
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

COMMAND = options.command(
    "run",
    "ps-run",
    arguments=(MODULE, SCRIPT, ARGS),
    context_settings=UP_TO_THE_SCRIPT,
    help="Trains with servers and workers that all run on this machine, and leaves nothing behind.",
    epilog="""\b
Examples:
  ps-run --servers 2 --workers 2 train.py --epochs 3
  ps-run --workers 4 --policy ssp --staleness 3 --data-dir ./snapshots -m my_package.train
  ps-run --workers 2 --summary result.json --log-dir ./logs train.py
  ps-run --workers 2 --history loss.csv train.py     what job.report(loss=loss) was given, over time

\b
Processes are called s0, s1, ... and w0, w1, ...; the option --threads is for each of them [default: their share
of the cores]. With --metrics-bind HOST:PORT s0 takes that port and the others, servers first, the next ones.
Server and worker logs are text here unless --log-format json is given.""",
)


def main(args: Sequence[str] | None = None) -> int:
    """Entry point of ps-run; returns the exit code: that of the process that failed first, or 0."""
    return run_command(COMMAND, start, words(COMMAND, args))


def start(
    ctx: click.Context,
    *,
    server: Sequence[str] = plan.SERVER,
    worker: Sequence[str] = plan.WORKER,
    spare: Sequence[str] = plan.SPARE,
    connect: Connect = GrpcJobObserver,
) -> int:
    """Runs the cluster; returns the exit code. The commands and the way to the servers can be
    replaced, for tests.
    """
    settings = ctx.params
    script = Script(settings["script"], settings["module"], tuple(settings["args"]))
    check(settings, script)
    raise_on_ctrl_c()
    folder = make_folder("ps-run-")
    keep = False
    with outputs(sys.stdout, sys.stderr) as (out, err):
        try:
            cluster = plan.RunPlan(
                script,
                settings,
                frozenset(given(ctx)),
                cores(),
                folder,
                server,
                worker,
                spare,
                dict(os.environ),
            )
            with open_display(out, err) as display:
                ended = launch(cluster, log_folder(settings, folder), connect, display)
            keep = ended.outcome.status == "failed" and settings["log_dir"] is None
        finally:
            tidy(folder, keep)
        return conclude(ended, settings, out, err)


def check(settings: dict[str, Any], script: Script) -> None:
    """Refuses now what would fail only after the training, or in every process at once
    (InvalidRequestError).
    """
    try:
        check_policy(settings["policy"], settings["staleness"])
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error
    if settings["min_workers"] > settings["workers"]:
        raise InvalidRequestError(
            f"--min-workers {settings['min_workers']} would wait for ever: --workers "
            f"{settings['workers']}"
        )
    if settings["metrics_bind"]:
        last = (
            host_and_port(settings["metrics_bind"])[1]
            + settings["servers"]
            + settings["workers"]
            - 1
        )
        if last > HIGHEST_PORT:
            raise InvalidRequestError(
                f"--metrics-bind {settings['metrics_bind']}: the last process would need {last}"
            )
    if is_on("PS_LOCAL"):
        raise InvalidRequestError(
            "PS_LOCAL is set: each worker would train alone; unset it, or start the script with "
            "python"
        )
    if not script.module:
        script.check()
    if settings["optimizers"]:
        check_module("--optimizers", settings["optimizers"])
    for flag in ("summary", "history"):
        if settings[flag]:
            check_output(f"--{flag}", settings[flag])
    if settings["save"] is not None and (problem := why_no_file(settings["save"])):
        raise InvalidRequestError(f"--save {settings['save']}: {problem}")


def check_output(flag: str, path: Path) -> None:
    """InvalidRequestError where it could not be written."""
    folder = path.resolve().parent
    if is_special(path):
        if not os.access(path, os.W_OK):
            raise InvalidRequestError(f"{flag} {path}: it cannot be written to")
    elif not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InvalidRequestError(
            f"{flag} {path}: its folder does not exist or cannot be written to"
        )


def log_folder(settings: dict[str, Any], folder: Path) -> Path:
    """Where the log files go: --log-dir, which is made if need be, or else this run's own
    folder.
    """
    wanted: Path | None = settings["log_dir"]
    if wanted is None:
        return folder
    try:
        wanted.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequestError(f"--log-dir {wanted}: {error.strerror}") from error
    counts = {"s": settings["servers"], "w": settings["workers"]}
    for name in (
        f"{kind}{number}.log" for kind, count in counts.items() for number in range(count)
    ):
        if (wanted / name).is_dir():
            raise InvalidRequestError(
                f"--log-dir {wanted}: {name} is a folder, where a log file is to go"
            )
    return wanted


def launch(cluster: plan.RunPlan, folder: Path, connect: Connect, display: Display) -> RunEnd:
    """Runs the cluster with our signals in place; log files go to `folder`."""
    # what the servers say is passed on as it is; our own view of them is only worth a line when it
    # is in trouble
    level = "debug" if cluster.settings["log_level"] == "debug" else "warning"
    logs.set_up(level, "text", stream=LogStream(display))
    for sentence in unread(cluster.environ):
        display.say(sentence)
    announce(display, cluster)
    run = Launcher(cluster, folder, connect, display)
    with signals_to(run):
        return run.run()


def announce(display: Display, cluster: plan.RunPlan) -> None:
    """One line about what is about to start, and how the cores are shared out."""
    shares = cluster.threads("s0"), cluster.threads("w0")
    threads = (
        "threads as OMP_NUM_THREADS says"
        if None in shares
        else "threads: {} a server, {} a worker".format(*shares)
    )
    numbers = {"server": cluster.servers, "worker": cluster.workers, "core": cluster.cores}
    servers, workers, on = (
        f"{number} {word}{'s' * (number != 1)}" for word, number in numbers.items()
    )
    display.say(f"{servers}, {workers} on {on}; {threads}")


@contextmanager
def signals_to(run: Launcher) -> Iterator[None]:
    """While this lasts, Ctrl-C and its kin are events of the run; one that was ignored (nohup)
    stays ignored.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, lambda received, _: run.post(SignalReceived(received)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tidy(folder: Path, keep_logs: bool) -> None:
    """Removes this run's folder, but for the logs if somebody will want to read them."""
    if not keep_logs:
        shutil.rmtree(folder)
        return
    for path in folder.iterdir():
        if path.suffix != ".log":
            path.unlink()


def conclude(ended: RunEnd, settings: dict[str, Any], out: Output, err: Output) -> int:
    """Tells how it went: the table on stdout, or the box on stderr, and the summary file in any
    case; the exit code.

    Waits until that is read, unless a signal said that ps-run is to end.
    """
    content = report.summary(
        ended.outcome, ended.result, settings, ended.seconds, ended.restarts, ended.not_saved
    )
    code = ended.outcome.code
    files: dict[str, Callable[[Path], None]] = {
        "summary": lambda path: report.write_summary(path, content),
        "history": lambda path: write_csv(path, ended.result.history),
    }
    for flag, write in files.items():
        if settings[flag]:
            try:
                write(settings[flag])
            except OSError as error:
                err.write(f"[run] --{flag} {settings[flag]} could not be written: {error}\n")
                code = code or ExitCode.BUG
    if ended.outcome.status == "done":
        if line := nothing_left(ended.result.status):
            err.write(f"[run] {line}\n")
        if ended.result.problem:
            err.write(f"[run] there are no weights to show: {ended.result.problem}\n")
        out.write(
            report.table(content, coloured=out.isatty() and not os.environ.get("NO_COLOR")) + "\n"
        )
    elif ended.outcome.status == "failed":
        err.write(ended.box + "\n")
    if ended.outcome.status != "interrupted":
        out.finish()
        if out.problem:
            err.write(f"[run] stdout could not be written to: {out.problem}\n")
        err.finish()
    return code
