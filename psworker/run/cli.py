"""ps-run: a whole cluster on this machine in one command."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import click

from pscommon.core.errors import InvalidRequestError
from pscommon.core.exit_codes import ExitCode
from pscommon.core.limits import ALLREDUCE, check_allreduce, check_policy
from pscommon.entry import raise_on_ctrl_c
from pscommon.security.credentials import read_credentials, use_credentials
from pscommon.security.settings import check_exposure, security_settings
from pscommon.security.tokens import new_tokens, write_tokens
from pscommon.settings import options
from pscommon.settings.command import given, run_command
from pscommon.settings.environment import unread
from pscommon.settings.values import host_and_port
from pscommon.system.event_files import check_tensorboard
from pscommon.system.imports import check_module
from pscommon.system.small_files import is_special, why_no_file
from pscommon.system.thread_team import cores
from pscommon.telemetry import logs
from psworker.cli import ARGS, FLAGS_BEFORE_SCRIPT, MODULE, SCRIPT, words
from psworker.run import summary as report
from psworker.run.display import Display, LogWriter, open_display
from psworker.run.folders import log_folder, make_folder, remove_folder
from psworker.run.job_poller import Connect, JobObserver
from psworker.run.launcher import Launcher, RunEnd, Workers
from psworker.run.output import Output, outputs
from psworker.session.arguments import is_on
from psworker.session.resume_notice import nothing_left
from psworker.supervision import plan
from psworker.supervision.script import Script

HIGHEST_PORT = 65535
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

COMMAND = options.command(
    "run",
    "ps-run",
    arguments=(MODULE, SCRIPT, ARGS),
    context_settings=FLAGS_BEFORE_SCRIPT,
    help="Run a training script with servers and workers on this machine.",
    epilog="""\b
Examples:
  ps-run --servers 2 --workers 2 train.py --epochs 3
  ps-run --workers 4 --policy ssp --staleness 3 --data-dir ./snapshots -m my_package.train
  ps-run --workers 2 --summary result.json --log-dir ./logs train.py
  ps-run --workers 2 --history loss.csv train.py     values of job.report(loss=loss) over time

\b
Servers are called s0, s1, ...; workers w0, w1, ...
--threads applies to each process [default: an equal share of the cores].
--metrics-bind HOST:PORT gives PORT to s0, and the next ports to the other servers, then workers.
--log-format auto means text here.""",
)


def main(args: Sequence[str] | None = None) -> int:
    """Run ps-run; return 0, or the exit code of the process that failed first."""
    return run_command(COMMAND, start, words(COMMAND, args))


def start(
    ctx: click.Context,
    *,
    server: Sequence[str] = plan.SERVER,
    worker: Sequence[str] = plan.WORKER,
    spare: Sequence[str] = plan.SPARE,
    connect: Connect = JobObserver,
    workers: Workers | None = None,
) -> int:
    """Run the cluster and return the exit code.

    Tests replace the commands of the processes and the connection to the servers.

    workers: Processes that become the workers, without a command.
    """
    settings = ctx.params
    script = Script(settings["script"], settings["module"], tuple(settings["args"]))
    check(settings, script if workers is None else None)
    raise_on_ctrl_c()
    folder = make_folder("ps-run-")
    keep_logs = False
    with outputs(sys.stdout, sys.stderr) as (out, err):
        try:
            chosen = frozenset(given(ctx))
            if settings["token_file"] is None and settings["policy"] != ALLREDUCE:
                token_file, chosen = folder / "tokens", chosen | {"token_file"}
                write_tokens(token_file, new_tokens(), {})
                settings["token_file"] = token_file
            use_credentials(read_credentials(security_settings(settings)))
            cluster = plan.RunPlan(
                script,
                settings,
                chosen,
                cores(),
                folder,
                server,
                worker,
                spare,
                dict(os.environ),
                has_terminal(),
            )
            with closing(open_display(out, err)) as display:
                logs = log_folder(settings, folder)
                end = launch(cluster, logs, connect, display, workers)
            keep_logs = end.outcome.status == "failed" and settings["log_dir"] is None
        finally:
            remove_folder(folder, keep_logs)
        return conclude(end, settings, out, err)


def has_terminal() -> bool:
    """Return whether stdout is a terminal, and stdin one whose input goes to this command."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stdout and sys.stdout.isatty()):
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:  # the terminal of another session
        return False


def check(settings: dict[str, Any], script: Script | None) -> None:
    """Check settings that would fail in every process, or only after the training.

    script: None if the workers run a function.

    Raises:
        InvalidRequestError: a setting is invalid.
    """
    security = security_settings(settings)
    if settings["metrics_bind"] is not None:
        check_exposure("--metrics-bind", settings["metrics_bind"], security)
    if settings["policy"] == ALLREDUCE:
        check_allreduce(**settings)
    else:
        check_policy(settings["policy"], settings["staleness"])
    if settings["min_workers"] > settings["workers"]:
        raise InvalidRequestError(
            f"`--min-workers {settings['min_workers']}` is more than `--workers "
            f"{settings['workers']}`: training would never start. Try: a smaller number"
        )
    if settings["metrics_bind"]:
        first = host_and_port(settings["metrics_bind"])[1]
        last = first + settings["servers"] + settings["workers"] - 1
        if last > HIGHEST_PORT:
            raise InvalidRequestError(
                f"`--metrics-bind {settings['metrics_bind']}` is not valid: the last process would "
                f"use port {last}. Try: a lower port"
            )
    if is_on("PS_LOCAL"):
        raise InvalidRequestError(
            "PS_LOCAL excludes ps-run: each worker would train alone. Try: unset it, or start the "
            "script with python"
        )
    if script is not None and not script.module:
        script.spec()
    if settings["optimizers"]:
        check_module("--optimizers", settings["optimizers"])
    if settings["tensorboard"] is not None:
        check_tensorboard(settings["tensorboard"])
    for flag in ("summary", "history"):
        if settings[flag]:
            check_output(f"--{flag}", settings[flag])
    if settings["save"] is not None and (problem := why_no_file(settings["save"])):
        raise InvalidRequestError(f"`--save {settings['save']}` is not valid: {problem}")


def check_output(flag: str, path: Path) -> None:
    """Raise InvalidRequestError if the file cannot be written."""
    folder = path.resolve().parent
    if is_special(path):
        if not os.access(path, os.W_OK):
            raise InvalidRequestError(f"`{flag} {path}` is not valid: the file cannot be written")
    elif not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InvalidRequestError(
            f"`{flag} {path}` is not valid: its folder does not exist or is not writable"
        )


def launch(
    cluster: plan.RunPlan,
    folder: Path,
    connect: Connect,
    display: Display,
    workers: Workers | None,
) -> RunEnd:
    """Run the cluster with signal handlers installed; log files go to `folder`."""
    # the servers' own logs are shown; ps-run itself logs only problems
    level = "debug" if cluster.settings["log_level"] == "debug" else "warning"
    logs.set_up(level, "text", stream=LogWriter(display))
    for warning in unread(cluster.environ):
        display.show_message(warning)
    announce(display, cluster)
    run = Launcher(cluster, folder, connect, display, workers)
    with signals_to(run):
        return run.run()


def announce(display: Display, cluster: plan.RunPlan) -> None:
    """Show the number of processes, cores and threads."""
    shares = cluster.threads("s0"), cluster.threads("w0")
    threads = (
        "threads: OMP_NUM_THREADS"
        if None in shares
        else "threads: {} per server, {} per worker".format(*shares)
    )
    numbers = {"server": cluster.servers, "worker": cluster.workers, "core": cluster.cores}
    servers, workers, on = (
        f"{number} {word}{'s' * (number != 1)}" for word, number in numbers.items()
    )
    display.show_message(f"{servers}, {workers} on {on}; {threads}")


@contextmanager
def signals_to(run: Launcher) -> Iterator[None]:
    """Turn termination signals into events of the run; ignored ones (nohup) stay ignored."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, lambda received, _: run.interrupt(received))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def conclude(end: RunEnd, settings: dict[str, Any], out: Output, err: Output) -> int:
    """Write the files of the run, and its table or the box about its failure.

    Waits until the output is read, unless a signal ended the run.

    Returns:
        The exit code of ps-run.
    """
    content = report.summary(
        end.outcome, end.result, settings, end.seconds, end.restarts, end.not_saved
    )
    code = end.outcome.code
    files: dict[str, Callable[[Path], None]] = {
        "summary": lambda path: report.write_summary(path, content),
        "history": lambda path: report.write_csv(path, end.result.history),
    }
    for flag, write in files.items():
        if settings[flag]:
            try:
                write(settings[flag])
            except OSError as error:
                err.write(f"[run] --{flag} {settings[flag]} could not be written: {error}\n")
                code = code or ExitCode.BUG
    if end.outcome.status == "done":
        if line := nothing_left(end.result.status):
            err.write(f"[run] {line}\n")
        if end.result.problem:
            err.write(f"[run] the weights cannot be read: {end.result.problem}\n")
        out.write(
            report.table(content, coloured=out.isatty() and not os.environ.get("NO_COLOR")) + "\n"
        )
    elif end.outcome.status == "failed":
        err.write(end.box + "\n")
    if end.outcome.status != "interrupted":
        out.finish()
        if out.problem:
            err.write(f"[run] stdout could not be written: {out.problem}\n")
        err.finish()
    return code
