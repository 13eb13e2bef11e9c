"""Output of ps-ctl: tables (drawn on a terminal, plain text in a pipe) or one JSON document."""

import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pscommon.core.errors import InvalidRequestError
from pscommon.telemetry import strict_json

if TYPE_CHECKING:
    from rich.table import Table as Drawing

UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under headings; without headings, rows of name and value."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[Sequence[object]]


def show(form: str, document: object, tables: Callable[[], Sequence[Table]]) -> None:
    """Print tables without their empty columns, or the document if `form` is "json".

    Raises InvalidRequestError if stdout cannot be written.
    """
    _show(
        form,
        document,
        lambda: _print_tables([_without_empty_columns(table) for table in tables() if table.rows]),
    )


def show_text(form: str, document: object, text: Callable[[], str]) -> None:
    """Print a text. The rest is as of `show`."""
    _show(form, document, lambda: print(text(), flush=True))


def _show(form: str, document: object, print_document: Callable[[], None]) -> None:
    if sys.stdout is None:
        raise InvalidRequestError("cannot print the result: stdout is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):  # the locale may lack a character
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if form == "json":
            print(strict_json.dumps(document, indent=2, default=str), flush=True)
        else:
            print_document()
    except OSError as error:
        # Python would write again at exit and fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # `ps-ctl status | head` is no error
            raise InvalidRequestError(
                f"cannot print the result: {error.strerror or error}"
            ) from error


def show_fields(form: str, document: Mapping[str, object]) -> None:
    """Print a document; the table omits fields without a value. The rest is as of `show`."""
    rows = [row for row in document.items() if row[1] not in (None, "")]
    show(form, document, lambda: [Table("", (), rows)])


def size(nbytes: float | None) -> str:
    """Format a number of bytes: "12.3 MB"."""
    if nbytes is None:
        return ""
    step = 0
    while nbytes >= 999.5 and step < len(UNITS) - 1:
        nbytes, step = nbytes / 1000, step + 1
    return f"{nbytes:.0f} {UNITS[step]}" if step == 0 else f"{nbytes:.3g} {UNITS[step]}"


def goodput_text(goodput: Mapping[str, float | None] | None) -> str:
    """Return which part of the work counted, as "98.5% of samples, 93.2% of time"."""
    names = {"samples": "samples", "seconds": "time"}
    shares = {names[key]: share for key, share in (goodput or {}).items() if share is not None}
    return ", ".join(f"{share:.1%} of {name}" for name, share in shares.items())


def duration(seconds: float | None) -> str:
    """Format a time in seconds: "0.25 s", "3 m 20 s", "2 h 5 m"."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} m {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} m"


def number(value: float | None) -> str:
    """Format a float with four significant digits, an integer with all."""
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def pass_text(progress: Mapping[str, Any] | None) -> str:
    """Format `progress` of the status: "pass 2 of 5: 43 %, 12 s left".

    The text is empty if the progress is unknown, as for a stream.
    """
    if not progress or progress.get("percent") is None or progress.get("pass") is None:
        return ""
    passes = f" of {progress['passes']}" if progress.get("passes") else ""
    text = f"pass {progress['pass']}{passes}: {progress['percent']:.0f} %"
    left = progress.get("remaining_seconds")
    if left is None or progress["percent"] >= 100:
        return text
    return f"{text}, {duration(round(left) if left >= 10 else round(left, 1))} left"


def _without_empty_columns(table: Table) -> Table:
    rows = [[printable(cell) for cell in row] for row in table.rows]
    columns = [index for index, column in enumerate(zip(*rows, strict=True)) if any(column)]
    headings = tuple(table.headings[index] for index in columns) if table.headings else ()
    return Table(table.title, headings, [[row[index] for index in columns] for row in rows])


def plain(table: Table, gap: int = 2) -> str:
    """Return the lines of a table without its empty columns; `gap` spaces separate columns."""
    table = _without_empty_columns(table)
    lines = [
        list(map(str, row))
        for row in ([table.headings, *table.rows] if table.headings else table.rows)
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    body = [
        (" " * gap).join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([table.title, *body] if table.title else body)


def _print_tables(tables: Sequence[Table]) -> None:
    if sys.stdout.isatty():
        _draw_tables(tables)
    else:
        print("\n\n".join(plain(table) for table in tables), flush=True)


def _draw_tables(tables: Sequence[Table]) -> None:
    from rich.console import Console

    console = Console()
    for number, table in enumerate(tables):
        drawing = _drawing(table)
        # the terminal wraps a table that is too wide: squeezed columns cannot be read or copied
        needed = console.measure(drawing, options=console.options.update(width=10_000)).maximum
        print(end="\n" if number else "", flush=True)
        Console(width=max(console.width, needed)).print(drawing)


def _drawing(table: Table) -> "Drawing":
    from rich import box
    from rich.table import Table as Drawing
    from rich.text import Text

    title = Text(table.title, "bold") if table.title else None
    drawing = Drawing(
        title=title,
        title_justify="left",
        show_header=bool(table.headings),
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for heading in table.headings or [""] * len(table.rows[0]):
        drawing.add_column(heading, no_wrap=True)
    for row in table.rows:
        drawing.add_row(*[Text(str(cell)) for cell in row])  # Text: no markup in names
    return drawing


def printable(cell: object) -> str:
    """Return the cell as one printable line; names come from scripts."""
    if cell is None:
        return ""
    text = ("no", "yes")[cell] if isinstance(cell, bool) else str(cell)
    return "".join(letter if letter.isprintable() else "?" for letter in text.replace("\n", " "))
