"""What every command of ps-ctl takes, before or after its name: which servers, how to print, how long to wait."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from pscommon.core.errors import InvalidRequestError
from pscommon.option_types import SECONDS
from pscommon.values import Value, addresses

if TYPE_CHECKING:
    from psworker.ctl.servers import Servers


@dataclass(slots=True)
class Settings:
    """ps: HOST:PORT[,...]; output: "table" or "json"; timeout: seconds of one call to the servers."""

    ps: str = ""
    output: str = "table"
    timeout: float = 10.0

    def servers(self) -> "Servers":
        """Connects to them. InvalidRequestError where no address was given."""
        from psworker.ctl.servers import Servers

        if not self.ps:
            raise InvalidRequestError("--ps HOST:PORT is missing: the address of any server of the job")
        return Servers(self.ps.split(","), self.timeout)


pass_settings = click.make_pass_decorator(Settings, ensure=True)


def with_environment(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options in front of the command's name, where the environment counts too."""
    return _with_options(command, environment=True)


def shared(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same options after the command's name; they win."""
    return _with_options(command, environment=False)


def _with_options(command: Callable[..., Any], environment: bool) -> Callable[..., Any]:
    def option(flag: str, variables: list[str], **rest: Any) -> None:
        nonlocal command
        names = variables if environment else None
        command = click.option(flag, envvar=names, expose_value=False, callback=_remember, **rest)(command)

    option("--timeout", ["PS_TIMEOUT"], type=SECONDS, help="How long a server may take to answer [default: 10].")
    option("--output", ["PS_OUTPUT"], type=click.Choice(["table", "json"]), help="Form of the result [default: table].")
    option(
        "--ps",
        ["PS_PS", "PS_SERVERS"],
        type=Value("HOST:PORT[,...]", addresses),
        help="Servers of the job; any one is enough.",
    )
    return command


def _remember(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value is not None:
        setattr(ctx.ensure_object(Settings), str(parameter.name), value)
