"""ps-ctl: entry point and the commands that only read."""

import os
import sys
from collections.abc import Sequence

import click

from pscommon.entry import raise_on_ctrl_c
from pscommon.settings.command import run_command
from pscommon.settings.environment import unread
from psworker.ctl import explain as explaining
from psworker.ctl import views
from psworker.ctl.checks import doctor
from psworker.ctl.config import config
from psworker.ctl.context import CommandContext, pass_settings, shared, with_environment
from psworker.ctl.credentials import tls, token
from psworker.ctl.job_actions import CommandGroup, drain, policy, promote, reshard, stop
from psworker.ctl.output import show
from psworker.ctl.snapshot import snapshot
from psworker.ctl.suggest import suggest


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
  ps-ctl --ps host0:50051 drain 3
  ps-ctl --ps host0:50051 policy set ssp --staleness 3
  ps-ctl promote host1:50061
  ps-ctl --ps host0:50051 reshard --servers 3
  ps-ctl snapshot verify /data/job
  ps-ctl tls init security
  ps-ctl token init security
  ps-ctl doctor
  ps-ctl suggest batch train.py
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


@ps_ctl.command(epilog="\b\nExamples:\n  ps-ctl explain 20\n  ps-ctl explain NON_FINITE")
@click.argument("code", metavar="CODE|REASON")
@shared
@pass_settings
def explain(settings: CommandContext, code: str) -> None:
    """Explain an exit code or an error reason."""
    document = explaining.explanation(code)
    show(settings.output, document, lambda: [explaining.table(document)])


for _command in (
    config,
    doctor,
    drain,
    policy,
    promote,
    reshard,
    snapshot,
    stop,
    suggest,
    tls,
    token,
):
    ps_ctl.add_command(_command)


if __name__ == "__main__":
    sys.exit(main())
