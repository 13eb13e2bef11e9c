"""`ps-ctl config`: the settings of a running job, or those that a command would get on this
machine.
"""

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
    help="Which command's.",
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS OF THAT COMMAND]...")
@click.option(
    "--output", type=click.Choice(["table", "json"]), help="Form of the result [default: table]."
)
@pass_settings
def config(
    settings: CommandContext, table: str, flags: tuple[str, ...], output: str | None
) -> None:
    """Show settings and their sources.

    With --ps before the command: the settings of that job, as its shard 0 knows them. Without:
    the settings that ps-server, or the command named by --for, would get on this machine.
    """
    rows = _of_job(settings, flags) if settings.is_ps_flag else _here(table, flags)
    cells = [
        (row["key"], "(unset)" if row["value"] is None else row["value"], row["source"])
        for row in rows
    ]
    show(output or settings.output, rows, lambda: [Table("", ("key", "value", "from"), cells)])


def _here(table: str, flags: tuple[str, ...]) -> list[Mapping[str, Any]]:
    if table == "server" and any(flag.partition("=")[0] == "--ps" for flag in flags):
        raise InvalidRequestError("--ps goes before the command: `ps-ctl --ps HOST:PORT config`")
    merged = options.merged(table, flags)
    return [{"key": key, "value": _plain(value), "source": source} for key, value, source in merged]


def _of_job(settings: CommandContext, flags: tuple[str, ...]) -> list[Mapping[str, Any]]:
    if flags:
        raise InvalidRequestError(
            f"--ps shows the settings of a running job, which {flags[0]} does not change: give "
            f"one of the two"
        )
    with settings.servers() as servers:
        rows = servers.status().get("settings")
    if rows is None:
        raise InvalidRequestError(
            f"{servers.address} runs an older version, which does not tell its settings"
        )
    return list(rows)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
