"""`ps-ctl stop`, and the group that never suggests it for a mistyped command."""

import sys
from typing import TYPE_CHECKING

import click

from pscommon.settings.option_types import TEXT
from psworker.ctl.context import CommandContext, pass_settings, shared
from psworker.ctl.output import Table, show

if TYPE_CHECKING:
    from psworker.ctl.job_client import CoordinatorClient


class CommandGroup(click.Group):
    """A group of commands. An unknown one is answered with a suggestion, but not with a command
    that ends the job.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, with the name `stop` left out of what may be suggested."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            possibilities = getattr(error, "possibilities", None)
            if possibilities and stop.name in possibilities:
                error.possibilities = [name for name in possibilities if name != stop.name]  # type: ignore[attr-defined]
            raise


@click.command(
    epilog="""\b
Examples:
  ps-ctl --ps host0:50051 stop --reason 'accurate enough'
  ps-ctl --ps host0:50051 stop --yes"""
)
@click.option(
    "--reason",
    type=TEXT,
    default="ps-ctl stop",
    show_default=True,
    help="For the logs of the servers.",
)
@click.option(
    "--yes",
    is_flag=True,
    help="Do not ask for confirmation; without a terminal it is not asked for.",
)
@shared
@pass_settings
def stop(settings: CommandContext, reason: str, yes: bool) -> None:
    """End the job.

    Workers end their steps and leave, with exit code 0; where there is a data directory a last
    snapshot is taken; then every server exits.
    """
    with settings.servers() as servers:
        if not yes and sys.stdin is not None and sys.stdin.isatty():
            _confirm(servers)
        servers.stop(reason)
    document = {"job": servers.described.job, "state": "stopping"}
    show(settings.output, document, lambda: [Table("", (), list(document.items()))])


def _confirm(servers: "CoordinatorClient") -> None:
    """click.Abort unless the user types y."""
    status = servers.status()
    here = [
        row for row in status.get("workers", ()) if row.get("state") in ("joined", "active", "idle")
    ]
    workers = f"{len(here)} worker{'s' * (len(here) != 1)}"
    question = f"End job {servers.described.job} (version {status.get('version', 0)}, {workers})?"
    if not click.confirm(question, err=True):
        click.echo("ps-ctl: the job was not stopped", err=True)
        raise click.Abort
