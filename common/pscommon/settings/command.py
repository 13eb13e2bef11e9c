"""Sources of settings: flag, environment variable PS_<FLAG>, TOML file of --config, default.

One file may hold the settings of a whole cluster: top-level keys apply to every command that has
them, the tables [server], [worker] and [run] to that command. An unknown key is an error.
"""

import difflib
import os
import sys
import tomllib
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from pscommon.core.errors import PSError
from pscommon.core.exit_codes import ExitCode

FILE = "pscommon.settings.command.file"
"""Key of the file's path in the meta dictionary of a click context."""

# names of the TOML types in error messages
WORDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list of texts",
}

SOURCES = {
    ParameterSource.COMMANDLINE: "flag",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "file",
    ParameterSource.DEFAULT: "default",
}

# sections of --help
PLACE = "Place"
JOB = "Job"
SNAPSHOTS = "Snapshots"
FAILOVER = "Failover"
SECURITY = "Security"
LOCAL = "This process"
OUTPUT = "Output"
CLUSTER = "Cluster"

REMOVED = {
    "late_gradients": "the data of a late gradient are always returned",
    "malloc": "memory is always tuned for large buffers",
    "shipping": "replication is always synchronous",
}
"""Settings of earlier releases, and what holds since."""


class Setting(NamedTuple):
    """One merged value; its source is "flag", "environment", "file" or "default"."""

    key: str
    value: Any
    source: str


class UnsettledValue(NamedTuple):
    """Placeholder for a value on which tables disagree; a file can set it in `table`."""

    table: str


class Option(click.Option):
    """Setting with a flag, an environment variable PS_<FLAG> and a key in the file.

    Attributes:
        variables: environment variables, in order of precedence.
    """

    def __init__(
        self, flag: str, *, section: str, also: Sequence[str] = (), **attributes: Any
    ) -> None:
        """Make the option; `also` are additional environment variables. A default is shown."""
        attributes.setdefault("show_default", "default" in attributes)
        self.flag = flag
        self.section = section
        self.variables = ("PS_" + flag.removeprefix("--").replace("-", "_").upper(), *also)
        super().__init__([flag], envvar=list(self.variables), **attributes)

    @property
    def key(self) -> str:
        """Return the name in code: the words of the flag, joined by underscores."""
        return str(self.name)

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Name the flag and the source of its value in error messages."""
        source = ctx.get_parameter_source(self.key) if ctx else None
        if source is ParameterSource.ENVIRONMENT:
            variable = next(name for name in self.variables if os.environ.get(name))
            return f"'{self.flag}' (environment {variable})"
        return f"'{self.flag}'" + (
            f" (file {ctx.meta[FILE]})" if ctx and source is ParameterSource.DEFAULT_MAP else ""
        )

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Parse a value; convert a value of the file to the text of the flag first."""
        if ctx.get_parameter_source(self.key) is ParameterSource.DEFAULT_MAP:
            value = self._text(ctx, value)
        return super().type_cast_value(ctx, value)

    def _text(self, ctx: click.Context, value: Any) -> str:
        if isinstance(value, UnsettledValue):
            remedy = f"set it in [{value.table}], or use {self.flag}"
            raise click.BadParameter(f"the tables disagree; {remedy}", ctx, self)
        besides = (bool,) if self.is_flag else getattr(self.type, "besides", ())
        if type(value) is list and list in besides and {type(part) for part in value} <= {str}:
            return ",".join(value)
        if type(value) is list or type(value) not in (str, *besides):
            fitting = " or ".join(["text in quotes", *(WORDS[kind] for kind in besides[-1:])])
            raise click.BadParameter(
                f"{value!r} has the wrong type; the file must have {fitting} here", ctx, self
            )
        return str(value)


class SettingsCommand(click.Command):
    """Command made of Options, --config and --version; invoke() returns the parsed context."""

    def __init__(
        self,
        name: str,
        options: Sequence[Option],
        *,
        tables: Mapping[str, Sequence[Option]],
        reads: Sequence[str],
        **remaining: Any,
    ) -> None:
        """Make the command.

        Args:
            name: name of the command.
            options: its options.
            tables: all tables of a file, with their options.
            reads: tables that apply to this command, its own one last.
            remaining: arguments for click.Command.
        """
        self.options = tuple(options)
        self.tables = {
            table: frozenset(option.key for option in members) for table, members in tables.items()
        }
        self.reads = tuple(reads)
        super().__init__(
            name, params=[_config_option(), *options, *remaining.pop("arguments", ())], **remaining
        )
        click.version_option(package_name="paramserver", message="%(prog)s %(version)s")(self)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line; say of a removed flag why there is none."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            why = REMOVED.get(error.option_name.removeprefix("--").replace("-", "_"))
            if why is None:
                raise
            problem = f"`{error.option_name}` was removed: {why}. Try: leave it out"
            raise click.UsageError(problem, ctx) from error

    def invoke(self, ctx: click.Context) -> click.Context:
        """Return the context; the work starts outside of click and its context."""
        return ctx

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one block of help per section, in order of declaration."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(parameter, "section", "General options"), []).append(
                    record
                )
        for title, records in sorted(
            sections.items(), key=lambda item: item[0] == "General options"
        ):
            with formatter.section(title):
                formatter.write_dl(records)


def sources(ctx: click.Context) -> list[Setting]:
    """Return the merged values of a parsed command with their sources, in order of --help."""
    options = [option for option in ctx.command.params if isinstance(option, Option)]
    return [
        Setting(
            option.key,
            ctx.params[option.key],
            SOURCES[ctx.get_parameter_source(option.key) or ParameterSource.DEFAULT],
        )
        for option in options
    ]


def given(ctx: click.Context) -> dict[str, Any]:
    """Return the values from a flag, the environment or a file, without defaults."""
    return {setting.key: setting.value for setting in sources(ctx) if setting.source != "default"}


def run_command(
    command: click.Command, start: Callable[[click.Context], int], args: Sequence[str] | None = None
) -> int:
    """Parse the command line, call `start` with the context and return the exit code.

    A usage error or a PSError gives one line on stderr and its exit code. A traceback is printed
    only at --log-level debug.
    """
    name = command.name or "ps"
    ctx: Any = None
    _open_standard_streams()
    try:
        ctx = command.main(args=args, prog_name=name, standalone_mode=False)
        return start(ctx) if isinstance(ctx, click.Context) else int(ctx or 0)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    except PSError as error:
        debug = isinstance(ctx, click.Context) and ctx.params.get("log_level") == "debug"
        print_error(name, error, debug)
        return error.exit_code


def _open_standard_streams() -> None:
    """Open closed standard streams (`2>&-`) on /dev/null.

    Otherwise a file or socket gets a number to which libraries print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # open() returns the lowest free number
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def print_error(name: str, error: PSError, debug: bool = False) -> None:
    """Print an expected error as one line on stderr; with `debug` print its traceback first."""
    if debug:
        traceback.print_exception(error)
    hint = f"exit code {error.exit_code}; ps-ctl explain {error.reason}"
    print(f"{name}: {error.reason}: {error} ({hint})", file=sys.stderr, flush=True)


def pick(
    document: Mapping[str, Any],
    tables: Mapping[str, Collection[str]],
    reads: Sequence[str],
    wanted: Collection[str],
) -> dict[str, Any]:
    """Return the values of a file for one command.

    Tables override top-level keys; the last table of `reads`, the command's own, overrides the
    others. If two other tables disagree, the value is an UnsettledValue, which the environment
    or a flag can still override.

    Raises ValueError if a table or key is unknown, or a key is given twice.

    reads: tables that apply to the command. wanted: its keys.
    """
    top = {key: value for key, value in document.items() if not isinstance(value, Mapping)}
    inner = {key: value for key, value in document.items() if isinstance(value, Mapping)}
    known = frozenset(name for members in tables.values() for name in members)
    for table in inner:
        if table not in tables:
            raise ValueError(f"unknown table [{table}]{_suggestion(table, tables)}")
    chosen = _spelled(top, known, "")
    per_table = {
        table: _spelled(inner.get(table, {}), tables[table], f" in [{table}]") for table in tables
    }
    own = per_table.get(reads[-1], {}) if reads else {}
    merged: dict[str, Any] = {}
    for table in reads[:-1]:
        for key, value in per_table[table].items():
            merged[key] = value if merged.get(key, value) == value else UnsettledValue(reads[-1])
    return {key: value for key, value in {**chosen, **merged, **own}.items() if key in wanted}


def _spelled(values: Mapping[str, Any], known: Collection[str], where: str) -> dict[str, Any]:
    """Return the values by keys with underscores; refuse unknown and duplicate keys."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in REMOVED:
            raise ValueError(f"{key!r}{where} was removed: {REMOVED[name]}. Try: leave it out")
        if name not in known:
            raise ValueError(f"unknown key {key!r}{where}{_suggestion(name, known)}")
        if name in result:
            raise ValueError(f"{key!r} is given twice{where}")
        result[name] = value
    return result


def _suggestion(word: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(word, sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known))}"


def _config_option() -> click.Option:
    return click.Option(
        ["--config"],
        envvar="PS_CONFIG",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_read_config,
        help="TOML file with any of these settings; environment variables (PS_<FLAG>) override it.",
    )


def _read_config(ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
    command = ctx.command
    if path is None or not isinstance(command, SettingsCommand):
        return
    ctx.meta[FILE] = path
    try:
        # some editors write a byte order mark
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        wanted = [option.key for option in command.options]
        ctx.default_map = pick(document, command.tables, command.reads, wanted)
    except (ValueError, OSError) as error:  # TOML and UTF-8 errors are ValueErrors
        raise click.UsageError(f"{path}: {error}", ctx) from error
