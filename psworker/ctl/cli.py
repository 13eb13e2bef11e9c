"""ps-ctl: the commands."""

import os
import sys
from collections.abc import Sequence

import click

from pscommon.entry import raise_on_ctrl_c
from pscommon.settings.command import run_command
from pscommon.settings.environment import unread
from pscommon.settings.option_types import COUNT, SECONDS
from psworker.ctl import explain as explaining
from psworker.ctl import views
from psworker.ctl.config import config
from psworker.ctl.context import CommandContext, pass_settings, shared, with_environment
from psworker.ctl.doctor import doctor
from psworker.ctl.output import Table, show, size
from psworker.ctl.policy import policy
from psworker.ctl.promote import promote
from psworker.ctl.snapshot import snapshot
from psworker.ctl.stop import CommandGroup, stop


def main(args: Sequence[str] | None = None) -> int:
    """Entry point of ps-ctl; returns the exit code."""
    return run_command(ps_ctl, lambda ctx: 0, args)


@click.group(
    "ps-ctl",
    cls=CommandGroup,
    epilog="""\b
Examples:
  ps-ctl status                                 the only job of this user on this machine
  ps-ctl --ps host0:50051 status
  ps-ctl --ps host0:50051 workers --output json
  ps-ctl --ps host0:50051 drain 3
  ps-ctl --ps host0:50051 policy set ssp --staleness 3
  ps-ctl promote host1:50061
  ps-ctl --ps host0:50051 reshard --servers 3
  ps-ctl snapshot verify /data/job
  ps-ctl doctor
  ps-ctl explain 12

The environment has PS_SERVERS (or PS_PS), PS_OUTPUT and PS_TIMEOUT for the options.""",
)
@with_environment
@click.version_option(package_name="paramserver", message="%(prog)s %(version)s")
def ps_ctl() -> None:
    """Look at a job, its servers, workers and snapshots, steer it and end it."""
    raise_on_ctrl_c()
    for sentence in unread(os.environ):
        click.echo(f"ps-ctl: {sentence}", err=True)


@ps_ctl.command(epilog="\b\nExample:\n  ps-ctl --ps host0:50051 status --output json")
@shared
@pass_settings
def status(settings: CommandContext) -> None:
    """Show everything about the job at a glance."""
    with settings.servers() as servers:
        document = servers.status()
    show(settings.output, document, lambda: views.status(document))


@ps_ctl.command(epilog="\b\nExample:\n  ps-ctl --ps host0:50051 workers")
@shared
@pass_settings
def workers(settings: CommandContext) -> None:
    """Show all workers that ever joined."""
    with settings.servers() as servers:
        document = servers.status()
    show(settings.output, views.rows(document, "workers"), lambda: [views.workers(document)])


@ps_ctl.command(epilog="\b\nExample:\n  ps-ctl --ps host0:50051 plan")
@shared
@pass_settings
def plan(settings: CommandContext) -> None:
    """Show which tensor lies on which shard."""
    with settings.servers() as servers:
        placed = servers.plan()
        addresses = [
            server.get("address") or "" for server in views.rows(servers.status(), "servers")
        ]
    document = views.plan_document(placed, addresses)
    show(settings.output, document, lambda: views.plan(document))


@ps_ctl.command(epilog="\b\nExample:\n  ps-ctl --ps host0:50051 drain 3")
@click.argument("worker", metavar="WORKER", type=COUNT)
@shared
@pass_settings
def drain(settings: CommandContext, worker: int) -> None:
    """Ask a worker to leave, with nothing lost.

    WORKER is its number in `ps-ctl workers`. It ends its step, hands back what data it has not
    used, leaves the job and exits with 0; the others go on without it.
    """
    with settings.servers() as servers:
        servers.drain(worker)
    document = {"job": servers.described.job, "worker": worker, "state": "draining"}
    show(settings.output, document, lambda: [Table("", (), list(document.items()))])


@ps_ctl.command(epilog="\b\nExample:\n  ps-ctl --ps host0:50051 reshard --servers 3")
@click.option("--servers", "count", type=COUNT, required=True, help="How many there are to be.")
@click.option(
    "--wait", type=SECONDS, default="300", show_default=True, help="Give up after this long."
)
@shared
@pass_settings
def reshard(settings: CommandContext, count: int, wait: float) -> None:
    """Move the model to another number of servers.

    Workers go on after a pause, and no push is lost or repeated. For more servers start these
    first, with `ps-server --shard I/N --join HOST:PORT` of shard 0; they wait for this command.
    With fewer servers the last ones end, with 0. Shard 0 always stays.
    """
    with settings.servers() as servers:
        seconds, nbytes = servers.reshard(count, wait)
    document = {
        "job": servers.described.job,
        "servers": count,
        "pause_seconds": round(seconds, 3),
        "nbytes": nbytes,
    }
    rows = [
        ("job", document["job"]),
        ("servers", count),
        ("pause", f"{seconds:.2f} s"),
        ("moved", size(nbytes)),
    ]
    show(settings.output, document, lambda: [Table("", (), rows)])


@ps_ctl.command(epilog="\b\nExamples:\n  ps-ctl explain 20\n  ps-ctl explain NON_FINITE")
@click.argument("code", metavar="CODE|REASON")
@shared
@pass_settings
def explain(settings: CommandContext, code: str) -> None:
    """Say what an exit code or error reason means."""
    document = explaining.explanation(code)
    show(settings.output, document, lambda: [explaining.table(document)])


ps_ctl.add_command(config)
ps_ctl.add_command(doctor)
ps_ctl.add_command(policy)
ps_ctl.add_command(promote)
ps_ctl.add_command(snapshot)
ps_ctl.add_command(stop)


if __name__ == "__main__":
    sys.exit(main())
