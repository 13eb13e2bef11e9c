"""`ps-ctl top`: the status of the job, live in a terminal."""

import textwrap
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from pscommon.core.errors import PSError
from pscommon.telemetry.worker_rows import slowest_first
from psworker.ctl import views
from psworker.ctl.context import CommandContext, pass_settings, shared
from psworker.ctl.output import plain, printable, show_text
from psworker.ctl.views import Json

if TYPE_CHECKING:
    from rich.console import Console

REFRESH_SECONDS = 2.0
COLUMNS_COUNT, ROWS_COUNT = 80, 50
"""Size of what is printed without a terminal."""

MIN_WORKERS_COUNT = 3
MAX_SERVERS_COUNT = 8
MAX_EVENTS_COUNT = 5

WORKERS = views.chosen(
    views.WORKERS,
    *("worker", "rank", "health", "own part", "step", "samples/s", "staleness", "phases"),
    "reason",
)
"""A narrow terminal cuts the last columns."""

SERVERS = views.chosen(
    views.SERVERS,
    *("shard", "up", "version", "weights", "received", "sent", "phases", "address", "standby"),
)


@click.command(epilog="\b\nExamples:\n  ps-ctl top\n  ps-ctl --ps host0:50051 top")
@shared
@pass_settings
def top(settings: CommandContext) -> int:
    """Show the state of the job, live until Ctrl-C.

    Without a terminal it prints the state once.
    """
    from rich.console import Console

    console = Console()
    if settings.output == "table" and console.is_terminal and not console.is_dumb_terminal:
        with suppress(KeyboardInterrupt):
            _follow(settings, console)
        return 0
    with settings.servers() as servers:
        document = servers.status()
    lines = screen(document, COLUMNS_COUNT, ROWS_COUNT)
    show_text(settings.output, document, lambda: "\n".join(lines))
    return 0


def _follow(settings: CommandContext, console: "Console") -> None:
    """Show the state until Ctrl-C. Raise PSError if the servers do not answer at the start."""
    from rich.live import Live
    from rich.text import Text

    with settings.servers() as servers:
        document: Json = servers.status()
    pause, lost_at, problem = threading.Event(), "", ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            notice = f"The server does not answer since {lost_at}: {problem}" if lost_at else ""
            head = textwrap.wrap(notice, console.width)
            lines = screen(document, console.width, console.height - len(head))
            text = Text.assemble(*((f"{line}\n", "bold red") for line in head), "\n".join(lines))
            text.highlight_words(("slow", "silent"), "yellow")
            text.highlight_words(("hanging", "lost"), "red")
            live.update(text, refresh=True)
            pause.wait(REFRESH_SECONDS)
            try:
                # finds shard 0 again after a failover
                with settings.servers() as servers:
                    document, lost_at = servers.status(), ""
            except PSError as error:
                lost_at, problem = lost_at or time.strftime("%H:%M:%S"), str(error)


def screen(document: Json, columns: int, rows: int) -> list[str]:
    """Return the lines of the state: at most `columns` wide, and as many workers as `rows` hold.

    The slowest workers come first.
    """
    named = [(name, value) for name, value in views.summary(document) if value not in (None, "")]
    # a no-break space keeps name and value on one line
    items = (f"{name}: {printable(value)}".replace(" ", "\xa0") for name, value in named)
    head = textwrap.wrap("   ".join(items), columns, break_on_hyphens=False)
    servers = _block("Servers", views.rows(document, "servers"), MAX_SERVERS_COUNT, SERVERS)
    newest = list(views.rows(document, "events"))[-MAX_EVENTS_COUNT:]
    events = ["", "Events", *map(_event, reversed(newest))] if newest else []
    workers = slowest_first(views.rows(document, "workers"))
    fixed = len(head) + len(servers) + len(events) + 3  # blank line, title and headings
    shown = _block("Workers", workers, max(MIN_WORKERS_COUNT, rows - fixed), WORKERS)
    lines = [*head, *shown, *servers, *events]
    return [line.replace("\xa0", " ")[:columns].rstrip() for line in lines]


def _block(title: str, listed: Sequence[Json], count: int, columns: views.Columns) -> list[str]:
    """Return a table of at most `count` lines, the last of which says how many rows are missing."""
    if not listed:
        return []
    shown = listed if len(listed) <= count else listed[: count - 1]
    more = [f"{len(listed) - len(shown)} more"] if len(listed) > len(shown) else []
    return ["", *plain(views.table_of(title, shown, columns), gap=1).splitlines(), *more]


def _event(event: Json) -> str:
    fields = " ".join(f"{name}={value}" for name, value in (event.get("fields") or {}).items())
    moment = str(event.get("time") or "")[11:19]
    return printable(f"{moment} {event.get('level')} {event.get('event')} {fields}")
