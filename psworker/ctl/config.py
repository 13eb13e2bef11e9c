"""`ps-ctl config`: settings of a running job, or of a command on this machine."""

from collections.abc import Mapping
from typing import Any

import click

from pscommon.core.errors import InvalidRequestError
from pscommon.settings import options
from psworker.ctl.context import CommandContext, pass_settings
from psworker.ctl.output import Table, show


@click.command(
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
