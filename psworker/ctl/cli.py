"""ps-ctl: entry point and the commands that only read."""

import inspect
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from pscommon.core.errors import REASONS, InvalidRequestError, ReasonRow
from pscommon.core.exit_codes import EXPLANATIONS, ExitCode
from pscommon.entry import raise_on_ctrl_c
from pscommon.settings import options
from pscommon.settings.command import run_command
from pscommon.settings.environment import unread
from psworker.ctl import views
from psworker.ctl.checks import doctor
from psworker.ctl.context import CommandContext, pass_settings, shared, with_environment
from psworker.ctl.credentials import tls, token
from psworker.ctl.job_actions import CommandGroup, drain, policy, promote, reshard, scale, stop
from psworker.ctl.output import Table, show
from psworker.ctl.snapshot import snapshot
from psworker.ctl.suggest import suggest
from psworker.ctl.top import top
from psworker.ctl.tracing import trace, why
from psworker.session.drain import DrainedError
from psworker.supervision.decisions import signal_name

# REASONS plus the one reason that is never transmitted
ERRORS = REASONS | {
    "DRAINED": ReasonRow(
        DrainedError, "the worker was asked to leave, or the job has ended", "CANCELLED"
    )
}

# reasons of a PushResult that are not errors: meaning and remedy
OUTCOMES = {
    "STALE": (
        "a push was too old: older than --max-staleness versions, or its round was closed",
        "nothing, training continues; if frequent, raise --max-staleness or find out why this "
        "worker is slow",
    )
}

SIGNAL_REMEDY = (
    "find the sender of the signal: `dmesg` reports SIGKILL after memory exhaustion; "
    "SIGSEGV, SIGBUS and SIGABRT are crashes of native code, see the log"
)


def main(args: Sequence[str] | None = None) -> int:
    """Run ps-ctl and return its exit code."""
    return run_command(ps_ctl, lambda ctx: 0, args)


@click.group(
    "ps-ctl",
    cls=CommandGroup,
    epilog="""\b
Examples:
  ps-ctl status                                 your only job on this machine
  ps-ctl --ps host0:50051 status
  ps-ctl --ps host0:50051 workers --output json
  ps-ctl --ps host0:50051 top
  ps-ctl --ps host0:50051 drain 3
  ps-ctl --ps host0:50051 policy set ssp --staleness 3
  ps-ctl promote host1:50061
  ps-ctl --ps host0:50051 reshard --servers 3
  ps-ctl --ps host0:50051 scale workers 4
  ps-ctl snapshot verify /data/job
  ps-ctl tls init security
  ps-ctl token init security
  ps-ctl doctor
  ps-ctl suggest batch train.py
  ps-ctl why
  ps-ctl trace -o trace.json
  ps-ctl explain 12

Servers on other machines need TLS files and a token file.

Environment variables of the options: PS_SERVERS or PS_PS, PS_OUTPUT, PS_TIMEOUT, PS_TLS_CA,
PS_TLS_CERT, PS_TLS_KEY, PS_TOKEN_FILE, PS_INSECURE.""",
)
@with_environment
@click.version_option(package_name="paramserver", message="%(prog)s %(version)s")
def ps_ctl() -> None:
    """Inspect and control a job, its servers, workers and snapshots."""
    raise_on_ctrl_c()
    for warning in unread(os.environ):
        click.echo(f"ps-ctl: {warning}", err=True)


@ps_ctl.command(epilog="\b\nExample:\n  ps-ctl --ps host0:50051 status --output json")
@shared
@pass_settings
def status(settings: CommandContext) -> None:
    """Show the state of the job."""
    with settings.servers() as servers:
        document = servers.status()
    show(settings.output, document, lambda: views.status(document))


@ps_ctl.command(epilog="\b\nExample:\n  ps-ctl --ps host0:50051 workers")
@shared
@pass_settings
def workers(settings: CommandContext) -> None:
    """Show all workers, past and present."""
    with settings.servers() as servers:
        document = servers.status()
    show(settings.output, views.rows(document, "workers"), lambda: [views.workers(document)])


@ps_ctl.command(epilog="\b\nExample:\n  ps-ctl --ps host0:50051 plan")
@shared
@pass_settings
def plan(settings: CommandContext) -> None:
    """Show the placement of tensors on shards."""
    with settings.servers() as servers:
        placed = servers.plan()
        addresses = [
            server.get("address") or "" for server in views.rows(servers.status(), "servers")
        ]
    document = views.plan_document(placed, addresses)
    show(settings.output, document, lambda: views.plan(document))


@ps_ctl.command(
    context_settings={"ignore_unknown_options": True},
    epilog="""\b
Examples:
  ps-ctl --ps host0:50051 config
  ps-ctl config
  ps-ctl config --config cluster.toml --shard 1/2 --policy async
  PS_LEASE=10s ps-ctl config --for run --output json""",
)
@click.option(
    "--for",
    "table",
    type=click.Choice(list(options.TABLES)),
    default="server",
    show_default=True,
    help="Command whose settings are shown.",
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS OF THAT COMMAND]...")
@click.option(
    "--output", type=click.Choice(["table", "json"]), help="Output format [default: table]."
)
@pass_settings
def config(
    settings: CommandContext, table: str, flags: tuple[str, ...], output: str | None
) -> None:
    """Show settings and their sources.

    With --ps before the command: settings of that job, from its shard 0. Without --ps: settings
    that ps-server, or the command of --for, would use on this machine.
    """
    rows = _job_settings(settings, flags) if settings.is_ps_flag else _local_settings(table, flags)
    cells = [
        (row["key"], "(unset)" if row["value"] is None else row["value"], row["source"])
        for row in rows
    ]
    show(output or settings.output, rows, lambda: [Table("", ("key", "value", "from"), cells)])


def _local_settings(table: str, flags: tuple[str, ...]) -> list[Mapping[str, Any]]:
    if table == "server" and any(flag.partition("=")[0] == "--ps" for flag in flags):
        raise InvalidRequestError(
            "`--ps` after the command is not valid. Try: `ps-ctl --ps HOST:PORT config`"
        )
    merged = options.merged(table, flags)
    return [{"key": key, "value": _plain(value), "source": source} for key, value, source in merged]


def _job_settings(settings: CommandContext, flags: tuple[str, ...]) -> list[Mapping[str, Any]]:
    if flags:
        raise InvalidRequestError(
            f"`--ps` excludes `{flags[0]}`: it shows the settings of a running job. Try: leave out "
            "one of them"
        )
    with settings.servers() as servers:
        rows = servers.status().get("settings")
    if rows is None:
        raise InvalidRequestError(
            f"cannot show settings: {servers.address} runs an older release, which does not report "
            "them"
        )
    return list(rows)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


@ps_ctl.command(epilog="\b\nExamples:\n  ps-ctl explain 20\n  ps-ctl explain NON_FINITE")
@click.argument("code", metavar="CODE|REASON")
@shared
@pass_settings
def explain(settings: CommandContext, code: str) -> None:
    """Explain an exit code or an error reason."""
    document = explanation(code)
    show(settings.output, document, lambda: [_explanation_table(document)])


def explanation(word: str) -> dict[str, Any]:
    """Explain an exit code ("12") or a reason ("NO_SNAPSHOT", in any case).

    Raises:
        click.BadParameter: the word is neither.
    """
    word = word.strip()
    if word.isdecimal():
        return _of_code(int(word))
    return _of_reason(word.upper().replace("-", "_"))


def _explanation_table(document: dict[str, Any]) -> Table:
    rows = [
        (name.replace("_", " "), ", ".join(value) if isinstance(value, list) else value)
        for name, value in document.items()
        if value != []
    ]
    return Table("", (), rows)


def _of_code(code: int) -> dict[str, Any]:
    if code in EXPLANATIONS:
        meaning, remedy = EXPLANATIONS[ExitCode(code)]
    elif code - 128 in signal.valid_signals():
        meaning, remedy = f"ended by {signal_name(code - 128)} (128 + {code - 128})", SIGNAL_REMEDY
    else:
        known = ", ".join(str(int(exit)) for exit in ExitCode)
        raise click.BadParameter(
            f"unknown exit code {code}: they are {known}, and 128 + n for signal n"
        )
    reasons = [reason for reason, row in ERRORS.items() if row.error.exit_code == code]
    return {"exit_code": code, "meaning": meaning, "what_to_do": remedy, "reasons": reasons}


def _of_reason(reason: str) -> dict[str, Any]:
    if reason in OUTCOMES:
        meaning, remedy = OUTCOMES[reason]
        return {"reason": reason, "meaning": meaning, "what_to_do": remedy}
    if reason not in ERRORS:
        known = ", ".join([*ERRORS, *OUTCOMES])
        raise click.BadParameter(f"unknown exit code or reason {reason}: reasons are {known}")
    row = ERRORS[reason]
    code = ExitCode(row.error.exit_code)
    return {
        "reason": reason,
        "meaning": row.meaning,
        "error": f"{row.error.__name__}: {' '.join((inspect.getdoc(row.error) or '').split())}",
        "exit_code": int(code),
        "what_to_do": EXPLANATIONS[code][1],
        "may_succeed_if_repeated": row.retryable,
    }


for _command in (
    doctor,
    drain,
    policy,
    promote,
    reshard,
    scale,
    snapshot,
    stop,
    suggest,
    tls,
    token,
    trace,
    why,
    top,
):
    ps_ctl.add_command(_command)


if __name__ == "__main__":
    sys.exit(main())
