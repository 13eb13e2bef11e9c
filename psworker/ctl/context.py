"""What every command of ps-ctl takes, before or after its name: which servers, how to print, how
long to wait.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pscommon.settings.option_types import SECONDS
from pscommon.settings.values import ValueType, addresses
from pscommon.system.local_jobs import only_local_job

if TYPE_CHECKING:
    from psworker.ctl.job_client import CoordinatorClient


@dataclass(slots=True)
class CommandContext:
    """What all commands take.

    ps: HOST:PORT[,...].
    output: "table" or "json".
    timeout: seconds of one call to the servers.
    is_ps_flag: `ps` was given on the command line, not in the environment.
    """

    ps: str = ""
    is_ps_flag: bool = False
    output: str = "table"
    timeout: float = 10.0

    def servers(self) -> "CoordinatorClient":
        """Connect to them, or to the user's only job on this machine if no address was given.

        Raises:
            InvalidRequestError: no address was given, and there is no such job, or more than one.
        """
        from psworker.ctl.job_client import CoordinatorClient

        ps = self.ps or only_local_job("--ps HOST:PORT is missing").address
        return CoordinatorClient(ps.split(","), self.timeout)


pass_settings = click.make_pass_decorator(CommandContext, ensure=True)


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
        command = click.option(flag, envvar=names, expose_value=False, callback=_remember, **rest)(
            command
        )

    option(
        "--timeout",
        ["PS_TIMEOUT"],
        type=SECONDS,
        help="How long a server may take to answer [default: 10].",
    )
    option(
        "--output",
        ["PS_OUTPUT"],
        type=click.Choice(["table", "json"]),
        help="Form of the result [default: table].",
    )
    option(
        "--ps",
        ["PS_PS", "PS_SERVERS"],
        type=ValueType("HOST:PORT[,...]", addresses),
        help="Servers of the job; any one is enough [default: your only job on this machine].",
    )
    return command


def _remember(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value is None:
        return
    settings = ctx.ensure_object(CommandContext)
    setattr(settings, str(parameter.name), value)
    if parameter.name == "ps":
        settings.is_ps_flag = ctx.get_parameter_source("ps") is ParameterSource.COMMANDLINE
